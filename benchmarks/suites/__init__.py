"""Every way of saving activation memory, side by side.

``definitions`` holds the suites, which ``suite`` reads: cases, and methods to run them with. ``methods`` turns a
method's text into flags, environment and wrapper. ``results`` keeps the rows, ``table`` and ``picture`` show them.
"""
