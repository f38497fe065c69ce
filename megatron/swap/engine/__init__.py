"""Keeps, offloads or recomputes each storage that autograd saves, and orders the copies and waits.

The path of a saved tensor: `saved_tensors` (pack) asks `decider`, and hands the tensor to `offload` (copy, release).
When backward unpacks, `saved_tensors` asks `reload` (prefetch, fetch) or `recompute`. `manager` tells them when a layer
begins and ends. `oom_guard` acts when an allocation fails.

Owns the saved-tensor hooks, the decision about each storage, its handle and its copies. May import `profiling`,
`memory`, `devices`, `native` and `common`. Knows nothing of Megatron.
"""
