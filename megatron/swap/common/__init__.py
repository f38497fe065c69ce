"""Vocabulary of all packages: records, settings, plan files, counters, named ranges, what ranks exchange.

Owns the types, errors and units, `SwapConfig`, `Plan`, strict JSON files, `Counters` and `Ranges`. Imports no other
room. Only `collectives` touches anything but the standard library.
"""
