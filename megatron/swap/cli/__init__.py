"""The console script `megatron-swap`: `plan` and `doctor`.

Owns the command line of the planner and the check of an environment. May import `planner` and `common` alone, so that
it runs on machines without torch. `doctor.py` imports nothing of ours and parses under older Pythons: it must be able
to say what is wrong wherever something is.
"""
