"""From a profile to a plan: cost model and solver, pure functions over plain records.

Owns profiles, the mixed-integer program and the simulated step. No torch, no Megatron, no GPU; may import `common`
alone. This file imports no solver: `engine` and `profiling` use `recording`.
"""
