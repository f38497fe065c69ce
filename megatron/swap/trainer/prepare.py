"""Preparation before Megatron is imported, so that it runs on this machine."""

from collections.abc import Sequence

import torch

from megatron.swap.common.failures import report_errors
from megatron.swap.common.types import SwapError
from megatron.swap.patches import compile_helpers, cpu, registry
from megatron.swap.patches.empty_part import empty_part_patch
from megatron.swap.patches.registry import AppliedPatches, PatchError
from megatron.swap.trainer.inputs import refuse_empty_part

_applied: list[AppliedPatches] = []


def prepare(argv: Sequence[str] = ()) -> None:
    """Apply patches for PyPI's wheel and for machines without CUDA. Idempotent.

    From here on an error of this package ends the process with its message alone: without a traceback, unless
    ``--swap-log-level debug`` asks for it. A script of your own on a GPU, beside a Megatron-LM checkout, needs none of
    this.

    Args:
        argv: the command line.

    Raises:
        PatchError: there is no CUDA, and the patches that replace it were not written for this Megatron.
    """
    report_errors(() if asks_for_debug(argv) else (SwapError, PatchError))
    if _applied:
        return
    needed = () if torch.cuda.is_available() else cpu.CPU_PATCHES
    optional = [compile_helpers.PATCH, empty_part_patch(refuse_empty_part)]
    _applied.append(registry.apply(needed, optional))
    registry.say_left_out(_applied[-1])


def asks_for_debug(argv: Sequence[str]) -> bool:
    words = " ".join(argv).replace("=", " ")
    return "--swap-log-level debug" in words
