"""Let torch.compile keep as many variants of a kernel as a run with recomputation needs.

torch.compile makes a variant of Megatron's fused kernels (``swiglu``, say) for each kind of call: static and dynamic
size, with and without gradients, forward's and backward's thread (with another number of threads). Recomputation makes
all of these calls, beyond torch's limit. Calls beyond the limit run uncompiled and round more often, so losses differ.
"""

from __future__ import annotations

from megatron.swap.patches.registry import Patch

LIMIT = 64  # variants of a kernel; torch's own limit is 8

PATCH = Patch(
    module="torch._dynamo.config",
    attribute="recompile_limit",
    build=lambda original: max(original, LIMIT),
    reason="beyond 8 variants a kernel runs uncompiled and rounds differently; recomputation needs more variants",
    sources={"torch 2.11.0": None},
)
