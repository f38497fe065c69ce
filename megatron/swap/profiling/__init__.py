"""Measures a run: saved storages, step times, link speed, traces.

Owns the recorder, the observer, the footprint meter, the link benchmark and the profiler. May import `planner`
(recordings and profiles as data), `memory`, `devices`, `native` and `common`.
"""
