"""Measures a run: saved storages, step times, link speed, traces.

Owns the recorder, recordings and what makes profiles of them, the observer, the footprint meter, the link benchmark and
the profiler. May import `forecast.figures` and `planner.profile` (data alone), `memory`, `devices` and `common`.
"""
