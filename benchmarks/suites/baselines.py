"""Baselines that Megatron has no flag for. Each wraps the built model chunks and changes nothing else."""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch


def save_on_cpu(chunks: list[Any]) -> None:
    """Use PyTorch's `save_on_cpu`: every tensor that the decoder saves goes to pinned memory, and back on demand."""
    for chunk in chunks:
        _around(chunk.decoder, lambda: torch.autograd.graph.save_on_cpu(pin_memory=True))


def torchtune_offload(chunks: list[Any], *, use_streams: bool = True) -> None:
    """Use torchtune's offloading as torchtune does: one context manager for all steps, entered for each forward."""
    from torchtune.training import OffloadActivations  # type: ignore[import-not-found]

    for chunk in chunks:
        context = OffloadActivations(use_pin_memory=True, use_streams=use_streams)
        _around(chunk.decoder, itertools.repeat(context).__next__)


torchtune_offload_one_stream = partial(torchtune_offload, use_streams=False)
"""The same without torchtune's copy stream.

With it, kernels may read overwritten memory: TransformerEngine's backward frees the saved tensors
(`clear_tensor_data`), and the next copy to the device reuses memory that torchtune had allocated on its copy stream
while kernels still read it."""


def deepspeed_checkpoint(chunks: list[Any]) -> None:
    """Wrap each layer in DeepSpeed's CheckpointFunction, which keeps the layer's inputs in host memory."""
    import deepspeed  # type: ignore[import-not-found, import-untyped]

    # Otherwise DeepSpeed looks for MPI.
    deepspeed.init_distributed(auto_mpi_discovery=False, dist_init_required=False, verbose=False)
    deepspeed.checkpointing.configure(mpu_=None, checkpoint_in_cpu=True)
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            _checkpointed(layer, deepspeed.checkpointing.checkpoint)


def _around(module: Any, context: Callable[[], AbstractContextManager[Any]]) -> None:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with context():
            return inner(*args, **kwargs)

    module.forward = forward


def _checkpointed(layer: Any, checkpoint: Callable[..., Any]) -> None:
    """Checkpoint a layer by its hidden states alone: masks and rotary tables are one object for all layers."""
    inner = layer.forward

    def forward(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        def run(hidden_states: Any) -> Any:
            output, context = inner(hidden_states, *args, **kwargs)
            assert context is None, "a layer with cross attention"
            return output

        return checkpoint(run, hidden_states), None

    layer.forward = forward
