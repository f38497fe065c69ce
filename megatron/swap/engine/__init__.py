"""Activations: what is kept, offloaded or recomputed of what autograd saves, and the copies and waits that follow.

The path of a saved tensor: `layer_hooks` (a layer begins), `saved_tensors` (pack), `decider` (keep, offload or
recompute), `offload` (copy, release), `reload` (prefetch, fetch) or `recompute`, `saved_tensors` (unpack). `build`
puts these together, `manager` conducts them, `evict` and `oom_guard` step in when an allocation fails.

Owns the saved-tensor hooks, the decision about each storage, its handle and its copies. May import `profiling`,
`planner.recording`, `memory`, `devices`, `native` and `common`. Knows nothing of Megatron.
"""
