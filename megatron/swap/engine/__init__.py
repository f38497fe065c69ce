"""Keeps, offloads or recomputes each storage that autograd saves, and orders the copies and waits.

The path of a saved tensor: `saved_tensors` (pack), `decider` (decision), `offload` (copy, release), `reload` (prefetch,
fetch) or `recompute`, `saved_tensors` (unpack). `manager` calls them in order. `evict` and `oom_guard` act when an
allocation fails.

Owns the saved-tensor hooks, the decision about each storage, its handle and its copies. May import `profiling`,
`memory`, `devices`, `native` and `common`. Knows nothing of Megatron.
"""
