"""Core attention without TransformerEngine, on ``torch.nn.functional.scaled_dot_product_attention``.

Megatron's own local core attention stores the scores: sequence² elements for each head. PyTorch's fused kernels do not;
on Hopper cuDNN's is nearly twice as fast as flash attention.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.swap.common.types import UsageError
from megatron.swap.megatron_lm.layer_specs import default_layer_spec, make_layer_spec

# Fastest first. PyTorch skips a backend that does not support a shape.
_FASTEST = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
]  # fmt: skip
# The backward passes of cuDNN and of the memory-efficient kernel add in an order that varies from run to run.
_DETERMINISTIC = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


class SdpaCoreAttention(MegatronModule):
    """Softmax attention between queries, keys and values of shape [sequence, batch, heads, channels].

    ``deterministic`` gives the same result in every run, at some cost in speed. Causal attention ignores a given mask
    unless ``use_given_mask`` (``--reset-attention-mask``). Raises a ``UsageError`` if the configuration needs a feature
    that these kernels lack.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType, attention_type: str,
        attention_dropout: float | None = None, softmax_scale: float | None = None, k_channels: int | None = None,
        v_channels: int | None = None, cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None, deterministic: bool = False, use_given_mask: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(config=config)
        _require_supported(config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        assert config.kv_channels is not None
        assert config.num_query_groups is not None
        self.attn_mask_type = attn_mask_type
        # Without it a given mask is taken for the causal mask, as in TransformerEngine: no fused kernel takes an
        # arbitrary mask without a loss of speed or memory.
        self.use_given_mask = use_given_mask
        self.deterministic = deterministic
        num_heads = divide(config.num_attention_heads, pg_collection.tp.size())
        self.is_grouped = divide(config.num_query_groups, pg_collection.tp.size()) != num_heads
        # Query-key layer scaling divides the scores by the layer number and multiplies them again before the softmax,
        # because of the range of fp16. No scores are stored here, so it would change nothing.
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.backends = _DETERMINISTIC if deterministic else _FASTEST

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None, attention_bias: Tensor | None = None, packed_seq_params: Any = None,
    ) -> Tensor:  # fmt: skip
        """Return the context, [sequence, batch, heads × value channels]. ``attention_mask`` is True where masked out.

        Raises a ``UsageError`` for packed sequences or a bias.
        """
        if packed_seq_params is not None:
            raise UsageError(
                "The local spec's attention takes no packed sequences. Drop the flags that pack them "
                "(--sft, --dataloader-inter-document-masking), or use --transformer-impl transformer_engine."
            )
        if attention_bias is not None:
            raise UsageError("The local spec's attention takes no bias. Use --transformer-impl transformer_engine.")
        allowed, is_causal = self._allowed(query, key, attention_mask, attn_mask_type or self.attn_mask_type)
        num_value_channels = value.shape[-1]
        if self.deterministic and num_value_channels < query.shape[-1]:
            # Flash attention needs equal widths. Columns of zeros stay zero and are cut off below.
            value = F.pad(value, (0, query.shape[-1] - num_value_channels))
        dropout = self.dropout if self.training else 0.0
        with self._random_state(dropout), sdpa_kernel(self.backends, set_priority=True):
            context = F.scaled_dot_product_attention(
                query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), attn_mask=allowed,
                dropout_p=dropout, is_causal=is_causal, scale=self.softmax_scale, enable_gqa=self.is_grouped,
            )  # fmt: skip
        return context[..., :num_value_channels].permute(2, 0, 1, 3).flatten(2)

    def _allowed(
        self, query: Tensor, key: Tensor, attention_mask: Tensor | None, mask_type: AttnMaskType
    ) -> tuple[Tensor | None, bool]:
        """Return PyTorch's arguments: a mask (True: attend) or None, and whether attention is causal."""
        num_queries, num_keys = query.shape[0], key.shape[0]
        is_causal = mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        if not is_causal:
            return (None if attention_mask is None else ~attention_mask), False
        is_given = attention_mask is not None and (self.use_given_mask or mask_type is not AttnMaskType.causal)
        if not is_given and num_queries == num_keys:
            return None, True
        # The last query sees all keys, also when there are fewer queries than keys.
        ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        allowed = ones.tril(diagonal=num_keys - num_queries)
        if is_given:
            assert attention_mask is not None
            allowed = allowed & ~attention_mask
        return allowed, False

    def _random_state(self, dropout: float) -> contextlib.AbstractContextManager[Any]:
        """Return the context of dropout's random state, which must differ among tensor-parallel ranks."""
        if dropout == 0.0 or self.config.sequence_parallel:  # under sequence parallelism the current state differs
            return contextlib.nullcontext()
        return tensor_parallel.get_cuda_rng_tracker().fork()


def sdpa_layer_spec(
    deterministic: bool = False, use_given_mask: bool = False, base: Any = None
) -> Callable[..., ModuleSpec | TransformerBlockSubmodules]:
    """Make a ``GPTModelConfig.transformer_layer_spec`` whose local core attention is ``SdpaCoreAttention``.

    ``base`` is the spec to modify, or a function that returns it; by default Megatron's choice. Other arguments as for
    ``SdpaCoreAttention``. The result is a function of the model's config and virtual pipeline stage.
    """

    def transformer_layer_spec(config: Any, vp_stage: int | None = None) -> ModuleSpec | TransformerBlockSubmodules:
        spec = make_layer_spec(default_layer_spec if base is None else base, config, vp_stage)
        params = {"deterministic": deterministic, "use_given_mask": use_given_mask}
        return with_core_attention(spec, ModuleSpec(module=SdpaCoreAttention, params=params))

    return transformer_layer_spec


def with_core_attention(spec: Any, core_attention: ModuleSpec) -> Any:
    """Return a copy of ``spec`` with Megatron's local core attention replaced. Other core attention stays."""
    # Layers share spec objects, and so do models: copy, do not change.
    if isinstance(spec, TransformerBlockSubmodules):
        layers = [with_core_attention(layer, core_attention) for layer in spec.layer_specs or []]
        return dataclasses.replace(spec, layer_specs=layers)
    attention: Any = getattr(spec.submodules, "self_attention", None)
    submodules: Any = getattr(attention, "submodules", None)
    if getattr(submodules, "core_attention", None) is not DotProductAttention:
        return spec
    submodules = dataclasses.replace(submodules, core_attention=core_attention)
    attention = dataclasses.replace(attention, submodules=submodules)
    return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, self_attention=attention))


def _require_supported(config: TransformerConfig) -> None:
    unsupported = {
        f"--context-parallel-size {config.context_parallel_size}": config.context_parallel_size > 1,
        f"--window-size {config.window_size}": config.window_size is not None,
        f"--softmax-type {config.softmax_type}": config.softmax_type != "vanilla",
        "--qk-clip": config.qk_clip,
    }
    for flag, is_given in unsupported.items():
        if is_given:
            raise UsageError(
                f"{flag}: the local spec's attention does not support it. Drop the flag, or install "
                "TransformerEngine and use --transformer-impl transformer_engine."
            )
