"""Let torch.compile keep as many variants of a kernel as a run with recomputation needs.

torch.compile makes a variant of Megatron's fused kernels (``swiglu``, say) for each kind of call: with a static size
and then any size, with and without gradients, on the forward and the backward thread (where torch uses another number
of threads). With recomputation all of these occur, and exceed torch's limit. Calls beyond the limit run uncompiled and
round more often, so that losses are no longer equal to the bit.
"""

from __future__ import annotations

from megatron.swap.patches.registry import Patch

LIMIT = 64
"""Variants of a kernel; torch's own limit is 8."""

PATCH = Patch(
    module="torch._dynamo.config",
    attribute="recompile_limit",
    build=lambda original: max(original, LIMIT),
    reason="beyond 8 variants a kernel runs uncompiled and rounds differently; recomputation needs more variants",
    sources={"torch 2.11.0": None},
)
