"""The console script `megatron-swap`: `plan` and `doctor`.

Owns the command line of the planner and the check of an environment. May import `forecast`, `planner` and `common`, so
that it runs on machines without torch; `plan_hf.py` imports `dry`, which needs torch. `doctor.py` imports nothing of
this package and parses under older Pythons, so that it can report problems in any environment.
"""
