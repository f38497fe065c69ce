"""Vocabulary of every room: records, settings, plan files, counters and named ranges, what ranks exchange.

Owns the types, errors and units, `SwapConfig`, `Plan`, strict JSON files, `Counters` and `Ranges`. Imports no other
room. Only `instrumentation` and `collectives` touch anything but the standard library.
"""
