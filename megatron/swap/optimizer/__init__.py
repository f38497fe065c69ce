"""Optimizer state in host memory or on disk, and an optimizer step that runs bucket by bucket.

Owns the stepper, the copies of buckets, and the records of each parameter's offloaded tensors. May import `memory`,
`devices` and `common`. Knows nothing of Megatron.

A step, from top to bottom: `stepper` steps the buckets by calls of the optimizer's own step (`partial_step`),
`bucket_loader` decides which buckets are on the device, `transfers` copies them, `state_memory` allocates their host
memory, and `param_state` records where each tensor is. Between steps: `selection` chooses the parameters whose state is
offloaded, `state` offloads or keeps it and serves checkpoints, and `overlap` runs copies concurrently with layers.
"""
