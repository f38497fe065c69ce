"""Vocabulary of all packages: records, settings, plan files, counters, named ranges, results that ranks exchange.

Owns the types, errors and units, `Settings`, `Plan`, strict JSON files, `Counters` and `Ranges`. Imports no other room.
Only `collectives` touches anything but the standard library.
"""
