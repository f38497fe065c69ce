"""Measured runs, each in a process of its own.

``grid`` makes the runs of suites and sweeps; ``program`` is what their commands share. ``launch`` starts the process
``child`` with a ``request``; ``stopwatch`` measures there, and ``outcome`` says how it ended.
"""
