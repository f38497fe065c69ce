"""Measures a run: saved storages, step times, link speed, traces.

Owns the recorder, the observer, the footprint meter, the link benchmark and the profiler. May import
`planner.recording` and `planner.profile` (data alone), `memory`, `devices` and `common`.
"""
