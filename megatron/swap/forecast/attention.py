"""Attention of a layer: its saved tensors, and the memory and time of its backward, by library."""

from megatron.swap.common.plan import Model

BACKWARD_FLOPS = 2.9  # FLOPs of attention's backward relative to its forward, at the same speed
FUSED, FLASH = "self_attention.core_attention.fused_attention", "self_attention.core_attention.flash_attention"
"""Paths of saved tensors of cuDNN and of flash-attn: the first four are query, key, value and context."""


def takes_flash(attention_backend: object, transformer_impl: str) -> bool:
    """Whether Megatron's flags of these names choose flash-attn, which only TransformerEngine does."""
    backend = str(attention_backend).rpartition(".")[2]  # Megatron: ``AttnBackend.flash``
    return backend == "flash" and transformer_impl == "transformer_engine"


def attention_path(model: Model) -> str:
    return FLASH if model.flash_attention else FUSED


def workspace(model: Model, query: float, key: float, log_sum_exp: float) -> float:
    """Return the memory that attention's backward takes beside its gradients, in the unit of the arguments."""
    # Both libraries sum the queries' gradient in fp32. With grouped queries cuDNN makes the gradients of keys and
    # values for each query head, in bf16; flash-attn sums them in fp32 (traced on one H200:
    # docs/results/h200-attention.json).
    is_grouped = model.num_query_groups < model.num_attention_heads
    if model.flash_attention:
        return 2 * query + 2 * log_sum_exp + (4 * key if is_grouped else 0)
    return 2 * query + log_sum_exp + (2 * query if is_grouped else 0)
