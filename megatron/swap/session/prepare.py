"""Before Megatron is imported: make it run here at all, and quietly."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.swap.patches import compile_helpers, cpu, quiet, registry
from megatron.swap.patches.registry import AppliedPatches

_applied: list[AppliedPatches] = []


def prepare(argv: Sequence[str] = ()) -> None:
    """Apply what a PyPI wheel, or a machine without CUDA, lacks; and keep Megatron's start-up output short. Idempotent.

    A script of your own on a GPU, beside a Megatron-LM checkout, needs none of this.

    Args:
        argv: the command line, only to see whether it asks for Megatron's own output (``--swap-log-level debug``).

    Raises:
        PatchError: the installed Megatron is not the one that a patch was written for.
    """
    if _applied:
        return
    patches = [compile_helpers.PATCH]
    if not torch.cuda.is_available():
        patches += cpu.CPU_PATCHES
    if not _asks_for_debug(argv):
        quiet.hush()
        patches += quiet.QUIET_PATCHES
    _applied.append(registry.apply(patches))


def _asks_for_debug(argv: Sequence[str]) -> bool:
    words = " ".join(argv).replace("=", " ")
    return "--swap-log-level debug" in words
