"""Optimizer state in host memory or on disk, and an optimizer step that runs bucket by bucket.

Owns the stepper, the copies of buckets, and the records of each parameter's offloaded tensors. May import `memory`,
`devices` and `common`. Knows nothing of Megatron.

A step, from top to bottom: `stepper`, `partial_step` (the optimizer's own step), `transfers` (copies), `state_memory`
(host memory), `param_state` (records). Between steps: `selection` chooses parameters, `state` offloads or keeps their
state, `overlap` runs copies beside layers.
"""
