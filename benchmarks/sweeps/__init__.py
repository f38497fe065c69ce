"""The largest model, the longest sequence or the largest micro-batch that each method trains.

``definitions`` holds the sweeps, which ``sweep`` reads; ``axes`` makes their values. ``forecast`` predicts where a
search begins and what cannot fit, ``search`` chooses the next value, ``results`` keeps the rows.
"""
