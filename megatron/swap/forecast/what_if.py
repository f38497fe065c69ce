"""Scales a profile to another link, sequence length or micro-batch size."""

from dataclasses import replace

from megatron.swap.forecast.figures import with_figures
from megatron.swap.forecast.gpus import GPUS
from megatron.swap.forecast.shape import layer_class, non_layer_scaled, scaled
from megatron.swap.planner.profile import Link, Profile


def with_link(profile: Profile, gb_s: float) -> Profile:
    return replace(profile, link=Link(gb_s, gb_s, gb_s, gb_s))


def with_tokens(profile: Profile, seq_length: int | None = None, micro_batch_size: int | None = None) -> Profile:
    """Return ``profile`` for another sequence length or micro-batch size, at least 1."""
    old = profile.model
    new = replace(
        old,
        seq_length=old.seq_length if seq_length is None else seq_length,
        micro_batch_size=old.micro_batch_size if micro_batch_size is None else micro_batch_size,
    )
    tokens = new.seq_length * new.micro_batch_size / (old.seq_length * old.micro_batch_size)
    # Only ratios are used, so an H200 stands in for devices that are not in the table.
    gpu = next((gpu for gpu in GPUS.values() if gpu.name == profile.device.name), GPUS["h200"])
    # Bytes scale with the tokens. A layer's time scales with its FLOPs, and those of attention with the square of the
    # sequence length.
    dense = replace(old, transformer_impl="transformer_engine", dtype="bf16", num_experts=None)
    before = layer_class(dense, gpu, (0,))
    then = layer_class(replace(dense, seq_length=new.seq_length, micro_batch_size=new.micro_batch_size), gpu, (0,))
    forward, backward = then.forward_ms / before.forward_ms, then.backward_ms / before.backward_ms
    return with_figures(replace(
        profile,
        source=f"{profile.source}; scaled to sequences of {new.seq_length}, micro-batches of {new.micro_batch_size}",
        model=new,
        layers=tuple(scaled(entry, forward, backward, tokens) for entry in profile.layers),
        non_layer=non_layer_scaled(profile.non_layer, tokens, tokens, tokens),
        optimizer_gib=profile.optimizer_gib * (1.0 if profile.layers else tokens),
        hook_ms=0.0,  # with other sizes the device waits for the host elsewhere
    ))  # fmt: skip
