"""The same run on another link, with other sequences or batches: a profile scaled, not measured again."""

from __future__ import annotations

from dataclasses import replace

from megatron.swap.planner.gpus import GPUS, Gpu
from megatron.swap.planner.profile import Link, Profile
from megatron.swap.planner.shape import layer_class, non_layer_scaled, scaled


def with_link(profile: Profile, gb_s: float) -> Profile:
    """All copies at ``gb_s``."""
    return replace(profile, link=Link(gb_s, gb_s, gb_s, gb_s))


def with_tokens(profile: Profile, seq_length: int | None = None, micro_batch_size: int | None = None) -> Profile:
    """Other lengths: bytes go with the tokens, a layer's time with its FLOPs (attention's grow with the square).

    Raises:
        UsageError: below 1.
    """
    old = profile.model
    new = replace(
        old,
        seq_length=old.seq_length if seq_length is None else seq_length,
        micro_batch_size=old.micro_batch_size if micro_batch_size is None else micro_batch_size,
    )
    tokens = new.seq_length * new.micro_batch_size / (old.seq_length * old.micro_batch_size)
    gpu = next((gpu for gpu in GPUS.values() if gpu.name == profile.device.name), GPUS["h200"])
    forward, backward = _ratios(profile, gpu, new.seq_length, new.micro_batch_size)
    return replace(
        profile,
        source=f"{profile.source}; scaled to sequences of {new.seq_length}, micro-batches of {new.micro_batch_size}",
        model=new,
        layers=tuple(scaled(entry, forward, backward, tokens) for entry in profile.layers),
        non_layer=non_layer_scaled(profile.non_layer, tokens, tokens, tokens),
    )


def _ratios(profile: Profile, gpu: Gpu, seq_length: int, micro_batch_size: int) -> tuple[float, float]:
    """How much longer a layer takes, by arithmetic: the share of attention is what matters.

    A device that is not in the table is scaled as an H200 is: only the ratio is used.
    """
    dense = replace(profile.model, transformer_impl="transformer_engine", dtype="bf16", num_experts=None)
    old = layer_class(dense, gpu, (0,))
    new = layer_class(replace(dense, seq_length=seq_length, micro_batch_size=micro_batch_size), gpu, (0,))
    return new.forward_ms / old.forward_ms, new.backward_ms / old.backward_ms
