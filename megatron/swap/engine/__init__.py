"""Activations: keeps, offloads or recomputes each storage that autograd saves, and orders the copies and waits.

The path of a saved tensor: `layer_hooks` (a layer begins), `saved_tensors` (pack), `decider` (keep, offload or
recompute), `offload` (copy, release), `reload` (prefetch, fetch) or `recompute`, `saved_tensors` (unpack). `build`
constructs these, `manager` calls them in order, `evict` and `oom_guard` step in when an allocation fails.

Owns the saved-tensor hooks, the decision about each storage, its handle and its copies. May import `profiling`,
`memory`, `devices`, `native` and `common`. Knows nothing of Megatron.
"""
