"""Let torch.compile keep as many variants of a kernel as a run of ours calls for.

Megatron's fused kernels (``swiglu``, say) are compiled, once for each way in which they are called: with a static size
and then any, with and without gradients, from the thread of forward and from that of backward (which has another number
of threads). With recomputing all of these occur, and one more was over torch's limit: that call ran uncompiled, which
rounds more often, and losses were no longer equal to the bit.
"""

from __future__ import annotations

from patches.registry import Patch

LIMIT = 64

PATCH = Patch(
    module="torch._dynamo.config",
    attribute="recompile_limit",
    build=lambda original: max(original, LIMIT),
    reason="beyond 8 variants a kernel runs uncompiled, with other roundings; recomputing calls it in more ways",
    written_for="torch 2.11.0",
)
