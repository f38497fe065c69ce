"""The pages on benchmarks, from docs/results alone: docs/benchmarks.md, and docs/benchmarks with the appendix."""
