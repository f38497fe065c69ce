"""The largest model, the longest sequence or the largest micro-batch that each method trains."""
