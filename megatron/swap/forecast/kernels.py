"""The kernels of a dense layer: FLOPs, bytes, saved sites, and the inputs of recomputing them.

The formulas are those of TransformerEngine layers (rotary positions, fused attention, linear layers in bf16 or FP8). In
bf16, sites and sizes were checked against traces, and memory byte for byte against peaks (docs/dev/planner.md).
"""

from dataclasses import dataclass, replace

from megatron.swap.common.plan import Model
from megatron.swap.common.types import UsageError
from megatron.swap.forecast.attention import BACKWARD_FLOPS, FUSED, attention_path, workspace
from megatron.swap.forecast.fp8 import KEEP_CONTEXT, ONLY_QUANTIZED, PROJ, SPEEDS, moved_bytes, recomputed, saved_sites
from megatron.swap.forecast.fp8 import RECOMPUTE_INPUTS as FP8_RECOMPUTE_INPUTS
from megatron.swap.forecast.gpus import Gpu
from megatron.swap.forecast.mlp_chunks import MLP_CHUNKS, MOST_CHUNKS, mlp_chunks

BYTES = 2  # bytes of a bf16 value
INPUT, FC1_INPUT = "self_attention.linear_qkv/0", "mlp.linear_fc1/0"  # sites of the inputs of a layer's norms


@dataclass(frozen=True)
class Kernel:
    name: str
    flops: float
    num_bytes: float
    saves: tuple[tuple[str, float], ...] = ()  # sites that its backward needs, with sizes in bytes
    reads: tuple[str, ...] = ()  # needed sites that others have saved
    backward_flops: float = 2.0  # relative to forward, as ``backward_bytes``
    backward_bytes: float = 2.0
    gradients: float = 0.0  # peak bytes of gradients during its backward
    weight_gradient: float = 0.0  # bytes of its weight's bf16 gradient, which is added to an fp32 buffer
    is_attention: bool = False
    is_flash: bool = False
    is_fp8: bool = False
    speeds: tuple[float, float] = (1.0, 1.0)  # parts of the GPU's TFLOP/s that forward and backward reach
    quantized_bytes: float = 0.0  # that quantization reads and writes in forward
    gradient_quantized_bytes: float = 0.0  # the same in backward


@dataclass(frozen=True)
class Sizes:
    """Bytes of the tensors of a layer on a rank."""

    hidden: float
    sharded: float
    query: float
    key: float
    fc1: float
    activation: float
    log_sum_exp: float
    tokens: float


def sizes_of(model: Model) -> Sizes:
    tokens = model.seq_length / model.context_parallel * model.micro_batch_size
    head = model.head_size or model.hidden_size // model.num_attention_heads
    tensor = model.tensor_parallel
    hidden = tokens * model.hidden_size * BYTES
    activation = tokens * model.ffn_hidden_size / tensor * BYTES
    return Sizes(
        hidden=hidden, sharded=hidden / tensor if model.sequence_parallel else hidden,
        query=tokens * model.num_attention_heads / tensor * head * BYTES,
        key=tokens * max(1.0, model.num_query_groups / tensor) * head * BYTES,
        fc1=activation * (2 if model.gated else 1), activation=activation,
        log_sum_exp=tokens * model.num_attention_heads / tensor * 4, tokens=tokens,
    )  # fmt: skip


def kernels(model: Model) -> list[Kernel]:
    """Return the kernels of a dense TransformerEngine layer's forward, in order, or raise ``UsageError`` for others."""
    uncovered = {
        f"--transformer-impl {model.transformer_impl}": model.transformer_impl != "transformer_engine",
        f"--num-experts {model.num_experts}": model.num_experts,
        f"weights in {model.dtype} (--bf16 is missing)": model.dtype != "bf16",
        f"{MLP_CHUNKS} {model.mlp_chunks} with FP8": model.mlp_chunks > 1 and model.fp8_recipe is not None,
        f"{MLP_CHUNKS} {model.mlp_chunks} (above {MOST_CHUNKS})": model.mlp_chunks > MOST_CHUNKS,
    }
    if wrong := [what for what, is_wrong in uncovered.items() if is_wrong]:
        raise UsageError(
            f"{', '.join(wrong)}: cannot be planned without a measurement. Measure a profile: train with "
            "--swap-save-profile FILE, then plan with --profile FILE."
        )
    size, wide = sizes_of(model), model.hidden_size
    hidden, query, key = size.hidden, size.query, size.key
    per_byte = 2 * wide / BYTES  # FLOPs of a linear layer with one side of the hidden size, per byte of its other side
    weights = wide / size.tokens  # bytes of a weight's gradient, per byte of its other side
    core = 2 * size.tokens * model.seq_length / BYTES
    qkv, path = query + 2 * key, attention_path(model)
    steps = [
        Kernel("qkv", per_byte * qkv, 2 * hidden + qkv,
               ((INPUT, size.sharded), ("self_attention.linear_qkv/1", size.sharded)),
               gradients=2 * hidden + qkv + weights * qkv, weight_gradient=weights * qkv),
        Kernel("rotary", 0, 2 * qkv, gradients=hidden + 2 * qkv),
        Kernel("attention", core * query / size.tokens, query * 2 + 2 * key,
               ((f"{path}/0", query), (f"{path}/1", key), (f"{path}/2", key), (f"{path}/3", query),
                (f"{path}/{4 if model.flash_attention else 6}", size.log_sum_exp)),
               backward_flops=BACKWARD_FLOPS, is_attention=True, is_flash=model.flash_attention,
               gradients=hidden + query + qkv + workspace(model, query, key, size.log_sum_exp)),
        Kernel("proj", per_byte * query, 0, reads=(f"{path}/3",), gradients=hidden + query + weights * query,
               weight_gradient=weights * query),
        Kernel("residual", 0, 3 * size.sharded, backward_bytes=0.4, gradients=hidden),
        *_mlp(model, size),
        Kernel("residual", 0, 3 * size.sharded, backward_bytes=0.4, gradients=hidden),
    ]  # fmt: skip
    if model.fp8_recipe is None:
        return steps
    recipe = model.fp8_recipe
    linears = {
        "qkv": (hidden, qkv, saved_sites(recipe, "self_attention.linear_qkv", size.sharded, size.sharded)),
        "proj": (query, hidden, () if recipe in KEEP_CONTEXT else saved_sites(recipe, PROJ, query)),
        "fc1": (hidden, size.fc1, saved_sites(recipe, "mlp.linear_fc1", size.sharded, size.sharded)),
        "fc2": (size.activation, hidden, saved_sites(recipe, "mlp.linear_fc2", size.activation)),
    }  # bytes of input and output in bf16, and the sites
    for index, step in enumerate(steps):
        if step.name in linears:
            inputs, outputs, saves = linears[step.name]
            later = 0 if saves else 1  # layouts of the input that backward makes
            weight = 0.0 if model.keeps_fp8_weights else step.weight_gradient  # is made in both directions
            steps[index] = replace(
                step, saves=saves, reads=() if saves else step.reads, is_fp8=True,
                speeds=SPEEDS.get(recipe, step.speeds),
                quantized_bytes=moved_bytes(recipe, inputs, 2 - later) + moved_bytes(recipe, weight, 1),
                gradient_quantized_bytes=moved_bytes(recipe, outputs + weight) + later * moved_bytes(recipe, inputs, 1),
                gradients=step.gradients + outputs + weight,  # in FP8, in two layouts: the output's gradient, weights
            )  # fmt: skip
    return steps


def _mlp(model: Model, size: Sizes) -> list[Kernel]:
    hidden, chunks = size.hidden, mlp_chunks(model)
    per_byte, weights = 2 * model.hidden_size / BYTES, model.hidden_size / size.tokens  # as in ``kernels``
    both = weights * (size.fc1 + size.activation)
    steps = [] if len(chunks) == 1 else [Kernel("split", 0, 0, gradients=hidden + 2 * size.sharded)]
    for chunk in chunks:
        inner, fc1, activation = chunk.part * hidden, chunk.part * size.fc1, chunk.part * size.activation
        # The gradients of the inputs of chunks that are done, and autograd's sums of both weights' gradients.
        held = chunk.done * size.sharded + (both if chunk.done else 0)
        norm, whole = (chunk.norm, chunk.part * size.sharded), (FC1_INPUT, size.sharded)
        saves, reads = ((norm,), (FC1_INPUT,)) if chunk.number else ((whole, norm), ())
        steps += [
            Kernel("fc1", per_byte * fc1, 2 * inner, saves, reads, weight_gradient=weights * size.fc1,
                   gradients=held + hidden + inner + fc1 + weights * size.fc1),
            Kernel("activation", 0, fc1 + activation, ((chunk.fc1, fc1),), gradients=held + hidden + activation + fc1),
            Kernel("fc2", per_byte * activation, 0, ((chunk.activation, activation),),
                   gradients=held + hidden + activation + weights * size.activation,
                   weight_gradient=weights * size.activation),
        ]  # fmt: skip
    if len(chunks) > 1:  # joins the outputs. Its backward moves nothing, but that of the split joins gradients
        steps.append(Kernel("join", 0, 2 * size.sharded, backward_bytes=1.0, gradients=hidden))
    return steps


def forward_ms_of(step: Kernel, gpu: Gpu) -> float:
    tflops = gpu.attention_tflops if step.is_attention else gpu.fp8_tflops if step.is_fp8 else gpu.tflops
    num_bytes, speed = step.num_bytes + step.quantized_bytes, step.speeds[0]
    if step.is_flash:
        speed *= gpu.flash_speeds[0]
    return step.flops / (tflops * speed * 1e9) + num_bytes / (gpu.memory_gb_s * 1e6)


def backward_ms_of(step: Kernel, gpu: Gpu) -> float:
    num_bytes = step.num_bytes * step.backward_bytes + step.weight_gradient * (BYTES + 8) / BYTES
    flops, speeds, quantized = step.flops * step.backward_flops, step.speeds[::-1], step.gradient_quantized_bytes
    as_forward = replace(step, flops=flops, speeds=speeds, num_bytes=num_bytes, quantized_bytes=quantized)
    return forward_ms_of(as_forward, replace(gpu, flash_speeds=gpu.flash_speeds[::-1]))


def kernel_ms(model: Model, gpu: Gpu) -> dict[str, float]:
    """Return the forward time of each kernel in ms. Kernels of the same name are summed."""
    times: dict[str, float] = {}
    for step in kernels(model):
        times[step.name] = times.get(step.name, 0.0) + forward_ms_of(step, gpu)
    return times


def recompute_inputs(model: Model) -> dict[str, tuple[str, ...]]:
    """Return the sites that an elementwise kernel or a linear layer recomputes, and the sites that it reads."""
    if model.fp8_recipe is not None:
        return _fp8_inputs(model)
    found: dict[str, tuple[str, ...]] = {"self_attention.linear_qkv/1": (INPUT,)}
    for chunk in mlp_chunks(model):
        found |= {chunk.norm: (FC1_INPUT,), chunk.fc1: (FC1_INPUT,), chunk.activation: (chunk.fc1,)}
    return found


def _fp8_inputs(model: Model) -> dict[str, tuple[str, ...]]:
    path = attention_path(model)
    return {site: tuple(need.replace(FUSED, path) for need in needs) for site, needs in FP8_RECOMPUTE_INPUTS.items()}


def recompute_ms(model: Model, gpu: Gpu, sizes: dict[str, float]) -> dict[str, float]:
    """Return the ms to recompute each site that can be recomputed alone. ``sizes``: bytes of all sites."""
    times, bytes_per_ms = kernel_ms(model, gpu), gpu.memory_gb_s * 1e6
    chunks = mlp_chunks(model)
    # With sequence parallelism linear layers do not run again: they gather their input from other ranks.
    costs = {} if model.sequence_parallel else {chunk.fc1: chunk.part * times["fc1"] for chunk in chunks}
    if model.fp8_recipe is None:
        norms = ["self_attention.linear_qkv/1", *(chunk.norm for chunk in chunks)]
        costs |= {site: 2 * sizes[site] / bytes_per_ms for site in norms}
        costs |= {one.activation: (sizes[one.activation] + sizes[one.fc1]) / bytes_per_ms for one in chunks}
        return costs
    inputs = _fp8_inputs(model)
    for site in inputs.keys() & sizes.keys() - {chunks[0].fc1}:
        in_bf16 = BYTES * sizes[site]  # a quantized value has one byte
        made = 0.0 if site in ONLY_QUANTIZED else in_bf16 + sum(sizes[need] for need in inputs[site])
        costs[site] = (made + moved_bytes(model.fp8_recipe, in_bf16)) / bytes_per_ms
    return {site: cost for site, cost in costs.items() if site in recomputed(model)}
