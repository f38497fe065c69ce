"""Our core attention against plain attention in double precision, and its place in Megatron's layer specs."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.swap.common.types import UsageError
from megatron.swap.megatron_lm.attention import SdpaCoreAttention, sdpa_layer_spec, with_core_attention

SEQUENCE, BATCH, HEADS, CHANNELS = 12, 2, 4, 8
ONE_RANK = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))


def make_attention(
    *, num_query_groups: int = HEADS, dropout: float = 0.0, mask_type: AttnMaskType = AttnMaskType.causal,
    **options: Any,
) -> SdpaCoreAttention:  # fmt: skip
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * CHANNELS, num_attention_heads=HEADS, num_query_groups=num_query_groups,
        attention_dropout=dropout,
    )  # fmt: skip
    return SdpaCoreAttention(config, 1, mask_type, "self", pg_collection=ONE_RANK, **options)


def make_inputs(num_groups: int = HEADS, v_channels: int = CHANNELS, num_keys: int = SEQUENCE) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)

    def random(length: int, heads: int, channels: int) -> Tensor:
        return torch.randn(length, BATCH, heads, channels, generator=generator).requires_grad_()

    sizes = (SEQUENCE, HEADS, CHANNELS), (num_keys, num_groups, CHANNELS), (num_keys, num_groups, v_channels)
    return [random(*size) for size in sizes]


def reference(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float | None = None) -> Tensor:
    """Return attention as in the textbook, in double precision."""
    query, key, value = (x.double().permute(1, 2, 0, 3) for x in (query, key, value))
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (scale or 1 / math.sqrt(query.shape[-1]))
    weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
    return (weights @ value).permute(2, 0, 1, 3).flatten(2)


def causal(num_queries: int = SEQUENCE, num_keys: int = SEQUENCE) -> Tensor:
    return torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)


def assert_same(inputs: list[Tensor], actual: Tensor, expected: Tensor) -> None:
    """Check that values and gradients agree to the precision of fp32."""
    weights = torch.randn(expected.shape, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    actual_grads = torch.autograd.grad((actual.double() * weights).sum(), inputs)
    expected_grads = torch.autograd.grad((expected * weights).sum(), inputs)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    for actual_grad, expected_grad in zip(actual_grads, expected_grads, strict=True):
        torch.testing.assert_close(actual_grad, expected_grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_groups", [HEADS, 2, 1])
def test_causal_with_grouped_queries(num_groups: int, deterministic: bool) -> None:
    inputs = make_inputs(num_groups)
    attention = make_attention(num_query_groups=num_groups, deterministic=deterministic)
    assert_same(inputs, attention(*inputs, None), reference(*inputs, causal()))


def test_narrow_values_a_scale_and_more_keys_than_queries() -> None:
    inputs = make_inputs(v_channels=CHANNELS - 3)
    attention = make_attention(k_channels=CHANNELS, v_channels=CHANNELS - 3, softmax_scale=0.3)
    assert_same(inputs, attention(*inputs, None), reference(*inputs, causal(), 0.3))
    inputs = make_inputs(num_keys=SEQUENCE + 5)
    assert_same(inputs, make_attention()(*inputs, None), reference(*inputs, causal(SEQUENCE, SEQUENCE + 5)))


def document_mask() -> Tensor:
    """Return a mask that is true where attention is forbidden: two documents, with another border in each sample."""
    document = torch.tensor([[0] * 5 + [1] * 7, [0] * 8 + [1] * 4])
    return (document[:, :, None] != document[:, None, :])[:, None]


def test_masks() -> None:
    inputs = make_inputs(2)
    attention = make_attention(num_query_groups=2, use_given_mask=True)
    assert_same(inputs, attention(*inputs, document_mask()), reference(*inputs, causal() & ~document_mask()))
    inputs, attention = make_inputs(), make_attention()
    arbitrary = make_attention(mask_type=AttnMaskType.arbitrary)
    assert_same(inputs, arbitrary(*inputs, document_mask()), reference(*inputs, ~document_mask()))
    everything = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool)  # the type of a call goes before the layer's
    context = attention(*inputs, None, attn_mask_type=AttnMaskType.no_mask)
    assert_same(inputs, context, reference(*inputs, everything))


class StateTracker:
    """A fake of Megatron's tracker: it has a random state of its own and leaves the outer one untouched."""

    def __init__(self, seed: int) -> None:
        self.generator_state = torch.Generator().manual_seed(seed).get_state()

    def fork(self) -> StateTracker:
        return self

    def __enter__(self) -> None:
        self.outer = torch.get_rng_state()
        torch.set_rng_state(self.generator_state)

    def __exit__(self, *exception: object) -> None:
        self.generator_state = torch.get_rng_state()
        torch.set_rng_state(self.outer)


def test_dropout_is_reproducible_and_draws_from_the_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs()
    attention = make_attention(dropout=0.5)

    def contexts(seed: int) -> tuple[Tensor, Tensor]:
        tracker = StateTracker(seed)
        monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
        return attention(*inputs, None), attention(*inputs, None)

    before = torch.get_rng_state()
    first, second = contexts(3)
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(first, second)
    assert all(map(torch.equal, contexts(3), (first, second)))
    assert not torch.equal(contexts(4)[0], first)
    attention.eval()
    assert_same(inputs, attention(*inputs, None), reference(*inputs, causal()))


def test_what_is_refused() -> None:
    for name, value, flag in (("context_parallel_size", 2, "--context-parallel-size 2"),
                              ("window_size", (4, 0), "--window-size"),
                              ("softmax_type", "learnable", "--softmax-type learnable")):  # fmt: skip
        config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
        setattr(config, name, value)
        with pytest.raises(UsageError, match=flag):
            SdpaCoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=ONE_RANK)
    for given in ({"packed_seq_params": object()}, {"attention_bias": torch.zeros(1)}):
        with pytest.raises(UsageError, match=r"packed|bias"):
            make_attention()(*make_inputs(), None, **given)


def core_attention_of(layer: ModuleSpec) -> Any:
    return layer.submodules.self_attention.submodules.core_attention


@pytest.mark.parametrize("latent", [False, True])
def test_spec_is_copied_not_changed(latent: bool) -> None:
    shared = get_gpt_layer_local_spec(multi_latent_attention=latent)
    ours = sdpa_layer_spec(deterministic=True, base=shared)(SimpleNamespace())
    assert core_attention_of(ours).module is SdpaCoreAttention
    assert core_attention_of(ours).params == {"deterministic": True, "use_given_mask": False}
    assert core_attention_of(shared) is DotProductAttention
    assert ours.submodules.mlp is shared.submodules.mlp
    shared.submodules.self_attention.submodules.core_attention = object  # another one stays
    assert with_core_attention(shared, ModuleSpec(module=SdpaCoreAttention)) is shared


def test_every_layer_of_a_mixture_of_experts_is_reached() -> None:
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_moe_experts=2, moe_layer_freq=[0, 1]
    )
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=None, pp_rank=0)
    ours = with_core_attention(block, ModuleSpec(module=SdpaCoreAttention))
    assert [core_attention_of(layer).module for layer in ours.layer_specs] == [SdpaCoreAttention] * 2
    assert [core_attention_of(layer) for layer in block.layer_specs] == [DotProductAttention] * 2
