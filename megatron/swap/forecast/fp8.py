"""FP8 layers: the bytes that quantization moves, the tensors that are saved, and the copies of weights.

Read from TransformerEngine 2.20.2 (``module/layernorm_linear.py``, ``module/linear.py``, ``tensor/storage/``). Linear
layers quantize three tensors, each in a layout for each direction: their input, their weight, their output's gradient.
Autograd saves the input in the layout of backward, in place of bf16. Except with ``delayed``, linear_proj saves its
bf16 input, which attention saves anyway, and quantizes it again (Megatron's ``core/transformer/attention.py``). Norms,
attention, activation function, residuals and the output layer stay in bf16.
"""

from dataclasses import replace

from megatron.swap.common.plan import LAYER_SECTION, Model
from megatron.swap.common.types import UsageError
from megatron.swap.forecast.attention import FUSED
from megatron.swap.forecast.facts import MegatronFacts
from megatron.swap.forecast.gpus import GPUS, Gpu
from megatron.swap.forecast.states import States

RECIPES = ("tensorwise", "delayed", "blockwise")  # the FP8 recipes that the formulas cover
NUM_READS = {"tensorwise": 2, "delayed": 1, "blockwise": 1}  # of quantization's input; a read more for the scale
KEEP_CONTEXT = ("tensorwise", "blockwise")  # recipes with which linear_proj saves its input in bf16
BLOCK = 128  # values with a scale of their own, in fp32, under the recipe ``blockwise``
SPEEDS = {"blockwise": (0.88, 0.80)}
"""Speed of products in forward and in backward, relative to ``Gpu.fp8_tflops``; others: 1. Fitted to the unswapped runs
of two shapes on one H200 (docs/results/h200-fp8.jsonl)."""
PROJ = "self_attention.linear_proj"
RESIDUAL_SECTION = "residual"  # runs linear_proj again, for the sum that the second norm reads
RECOMPUTE_INPUTS = {
    "self_attention.linear_qkv/1": ("self_attention.linear_qkv/0",),
    f"{PROJ}/0": (f"{FUSED}/3",),
    "mlp.linear_fc1/1": ("mlp.linear_fc1/0",),
    "mlp.linear_fc2/0": ("mlp/0",),
    "mlp/0": ("mlp.linear_fc1/0",),
}
"""Sites of an FP8 layer that can be recomputed alone, and their inputs. All but linear_fc1's output are quantized
again."""
ONLY_QUANTIZED = frozenset({f"{PROJ}/0"})  # quantized sites that are made from a bf16 tensor that is saved
OF_LINEARS = frozenset({"mlp/0", "qkv", RESIDUAL_SECTION})
"""Sites and sections that run a linear layer again: not with ``delayed``, which would write the next scales."""
_ALL = frozenset({*RECOMPUTE_INPUTS, "qkv", RESIDUAL_SECTION, LAYER_SECTION})
RECOMPUTED = {recipe: _ALL - OF_LINEARS if recipe == "delayed" else _ALL for recipe in RECIPES}
"""The sites of ``RECOMPUTE_INPUTS``, and the sections, that the engine can recompute with each recipe."""
OF_ONE_SCALE = frozenset({"self_attention.linear_qkv/1", "mlp.linear_fc1/1"})
"""Inputs of column-parallel layers: ranks agree on their scale with ``tensorwise`` and sequence parallelism."""
BF16, FP32 = 2, 4  # bytes of a value


def recomputed(model: Model) -> frozenset[str]:
    """Return the sites and sections of an FP8 layer of ``model`` that the engine can recompute."""
    assert model.fp8_recipe is not None
    agree = model.fp8_recipe == "tensorwise" and model.sequence_parallel and model.tensor_parallel > 1
    return RECOMPUTED[model.fp8_recipe] - (OF_ONE_SCALE if agree else frozenset())


def check_gpu(model: Model, gpu: Gpu) -> None:
    """Raise ``UsageError`` if the model has FP8 layers, and the GPU no FP8, or another way to compute the recipe."""
    if model.fp8_recipe is None or model.fp8_recipe in gpu.fp8_recipes:
        return
    others = [name for name, one in GPUS.items() if model.fp8_recipe in one.fp8_recipes]
    if gpu.fp8_recipes:
        raise UsageError(
            f"--fp8-recipe {model.fp8_recipe}: is not known on {gpu.name}. Known there: "
            f"{', '.join(gpu.fp8_recipes)}. GPUs with {model.fp8_recipe}: {', '.join(others)}."
        )
    raise UsageError(
        f"--fp8-format: {gpu.name} has no FP8 in the table. Leave it out, or choose one of {', '.join(others)}."
    )


def check_fp8_weights(facts: MegatronFacts) -> None:
    """Raise ``UsageError`` where ``--swap-fp8-weights recompute`` has no copies to drop, or bits would change."""
    if why := why_copies_stay(facts):
        raise UsageError(f"--swap-fp8-weights recompute {why}")


def why_copies_stay(facts: MegatronFacts) -> str | None:
    """Return why linear layers must keep copies of their weights in FP8, or have none. None: they may drop them."""
    recipe, is_fused = facts.fp8_recipe, facts.use_transformer_engine_op_fuser
    fused = "cannot be combined with --use-transformer-engine-op-fuser: its layers keep copies. Drop one of the two."
    alone = "the weights themselves are in 8 bits there. Drop one of the two."
    history = "weights would enter a history of scales once a micro-batch. Choose --fp8-recipe tensorwise or blockwise."
    excluded = [
        (not facts.fp8, "needs --fp8-format: without it there are no copies of weights in 8 bits."),
        (facts.transformer_impl != "transformer_engine", "needs --transformer-impl transformer_engine."),
        (is_fused, fused),
        (facts.fp8 and facts.fp8_param_gather, f"cannot be combined with --fp8-param-gather: {alone}"),
        (recipe == "delayed", f"cannot be combined with --fp8-recipe delayed: {history}"),
        (recipe not in ("tensorwise", "blockwise"), f"is made for --fp8-recipe tensorwise or blockwise, not {recipe}."),
    ]
    return next((why for is_given, why in excluded if is_given), None)


def moved_bytes(recipe: str, bf16_bytes: float, num_layouts: int = 2) -> float:
    """Return the bytes that quantizing a bf16 tensor reads and writes."""
    return bf16_bytes * NUM_READS[recipe] + num_layouts * bf16_bytes / BF16


def saved_sites(
    recipe: str, path: str, quantized: float, norm_input: float | None = None
) -> tuple[tuple[str, float], ...]:
    """Return the sites of a linear layer, in the order in which it saves them, and their bytes."""
    # Bytes of the product's input, and of the norm's in a layer that has a norm, are given in bf16.
    num_values = quantized / BF16
    # Block scales are a site of their own. A single scale for a whole tensor is too small to count.
    sizes = [num_values, FP32 * num_values / BLOCK] if recipe == "blockwise" else [num_values]
    if norm_input is not None:
        sizes.insert(0, norm_input)
    return tuple((f"{path}/{ordinal}", size) for ordinal, size in enumerate(sizes))


def linear_params(model: Model) -> float:
    """Return the weights of a layer's linear layers, over all ranks."""
    head = model.head_size or model.hidden_size // model.num_attention_heads
    attention = head * (2 * model.num_attention_heads + 2 * model.num_query_groups)
    return model.hidden_size * (attention + model.ffn_hidden_size * (3 if model.gated else 2))


def fp8_params(model: Model, layers: tuple[int, ...]) -> float:
    """Return the weights of a pipeline stage's ``layers`` that a rank has in FP8, as copies or alone."""
    if model.fp8_recipe is None or not model.keeps_fp8_weights:
        return 0.0
    return linear_params(model) * len(set(layers) - set(model.bf16_layers)) / model.tensor_parallel


def with_fp8_weights(states: States, gpu: Gpu, num_fp8: float, num_params: float) -> States:
    """Return ``states`` with FP8 copies of ``num_fp8`` of ``num_params`` weights, and transposes of moments in FP8."""
    saved = states.weight_bytes if states.has_fp8_weights else 0
    fp8_bytes = (gpu.num_fp8_layouts - saved) * num_fp8 / num_params
    transpose_bytes = states.num_fp8_moments * (gpu.num_fp8_layouts - 1)
    return replace(states, fp8_bytes=fp8_bytes, transpose_bytes=transpose_bytes)


def quantize_weights_ms(recipe: str, gpu: Gpu, num_fp8: float) -> float:
    """Return the time in which a step quantizes its weights once, in ms."""
    return moved_bytes(recipe, BF16 * num_fp8) / (gpu.memory_gb_s * 1e6)
