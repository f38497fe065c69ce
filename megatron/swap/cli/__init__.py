"""The console script `megatron-swap`: `plan` and `doctor`.

Owns the command line of the planner and the check of an environment. May import `planner` and `common` alone, so that
it runs on machines without torch; `plan_hf.py` imports `nn`, which runs a model dry. `doctor.py` imports nothing of
this package and parses under older Pythons, so that it can report problems in any environment.
"""
