"""Cost model and solver: pure functions from a profile to a plan.

Owns profiles, the mixed-integer program and the simulator. Uses no torch, no Megatron and no GPU; may import `common`
alone.
"""
