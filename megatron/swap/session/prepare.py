"""Preparation before Megatron is imported, so that it runs on this machine and prints little at start-up."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from megatron.swap.patches import compile_helpers, cpu, quiet, registry
from megatron.swap.patches.registry import AppliedPatches

_applied: list[AppliedPatches] = []


def prepare(argv: Sequence[str] = ()) -> None:
    """Apply patches for PyPI's wheel and for machines without CUDA, and shorten Megatron's output. Idempotent.

    A script of your own on a GPU, beside a Megatron-LM checkout, needs none of this.

    Args:
        argv: the command line. With ``--swap-log-level debug`` Megatron's output is not shortened.

    Raises:
        PatchError: there is no CUDA, and the patches that replace it were not written for this Megatron.
    """
    if _applied:
        return
    needed = () if torch.cuda.is_available() else cpu.CPU_PATCHES
    optional = [compile_helpers.PATCH]
    if not _asks_for_debug(argv):
        quiet.hush()
        optional += quiet.QUIET_PATCHES
    applied = registry.apply(needed, optional)
    _applied.append(applied)
    if os.environ.get("RANK", "0") == "0":
        for line in registry.lost_features(applied.left_out):
            print(f" swap: {line}", flush=True)


def _asks_for_debug(argv: Sequence[str]) -> bool:
    words = " ".join(argv).replace("=", " ")
    return "--swap-log-level debug" in words
