"""Initialize Megatron without CUDA, with process groups and named random states.

With ``allow_no_cuda`` upstream skips both if there is no CUDA device. So ``torch.cuda.device_count`` returns 1 while it
initializes, and only then.
"""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from megatron.swap.patches.registry import Patch


def _build(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize_megatron(*arguments: Any, **options: Any) -> Any:
        options["allow_no_cuda"] = True
        with (
            mock.patch.object(torch.cuda, "device_count", return_value=1),
            mock.patch.object(torch.cuda, "set_device"),
        ):
            result = original(*arguments, **options)
        atexit.unregister(_destroy_process_groups)  # if it runs twice
        atexit.register(_destroy_process_groups)
        return result

    return initialize_megatron


def _destroy_process_groups() -> None:
    # gloo's threads hold tensors of past collectives. A thread that drops a tensor's last reference while the
    # interpreter is finalized aborts the process ("terminate called without an active exception"). Destroyed groups
    # join their threads. After an error a collective may be under way, and the join would wait for ever.
    if torch.distributed.is_initialized() and not hasattr(sys, "last_exc"):
        torch.distributed.destroy_process_group()


# `pretrain` calls the function that megatron.training.training has imported by name.
PATCHES = (
    Patch(
        module="megatron.training.training",
        attribute="initialize_megatron",
        build=_build,
        reason="asserts that CUDA is available; without CUDA it sets up neither process groups nor random states",
        sources={
            "megatron-core 0.18.2": "5031098c1374272114cf9254e81ec6c97593aaca0c4d5f9debde90306baeba2e",
            "megatron-core 0.19.0": "d9b467adcaed1325932422670da7ee3b374bcd0f07f2f329780b54d41ca829c7",
        },
    ),
)
