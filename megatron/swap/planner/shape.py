"""Estimates a profile from a model's shape and a GPU's figures: FLOPs and bytes of every kernel of a dense layer.

The formulas are those of TransformerEngine layers (rotary positions, fused attention, linear layers in bf16 or FP8).
In bf16, sites and sizes were checked against traces, and memory byte for byte against measured peaks
(docs/dev/planner.md).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from megatron.swap.common.plan import LAYER_SECTION, Model
from megatron.swap.common.types import GIB, LOSS_ROWS, MIB, UsageError
from megatron.swap.planner.fp8 import (
    KEEP_CONTEXT,
    ONLY_QUANTIZED,
    PROJ,
    SPEEDS,
    check_gpu,
    fp8_params,
    linear_params,
    moved_bytes,
    quantize_weights_ms,
    recomputed,
    saved_sites,
)
from megatron.swap.planner.fp8 import (
    RECOMPUTE_INPUTS as FP8_RECOMPUTE_INPUTS,
)
from megatron.swap.planner.gpus import Gpu
from megatron.swap.planner.loss_chunks import loss_bytes
from megatron.swap.planner.profile import (
    Device,
    LayerClass,
    Link,
    NonLayer,
    NonLayerSite,
    OffloadedState,
    Pipeline,
    Profile,
    Section,
    SiteProfile,
)
from megatron.swap.planner.states import DISK_MS_PER_GIB, States

BYTES = 2
"""Bytes of one bf16 value."""
WORKSPACE_GIB = 0.096
"""Measured memory of libraries besides weights, gradients and optimizer state."""
OPTIMIZER_BYTES_PER_PARAM = 38
"""Bytes per parameter that an Adam step, the gradient norm and clearing gradients read and write."""


@dataclass(frozen=True)
class Kernel:
    """One kernel of a layer's forward. ``saves``: the sites that its backward needs, with sizes in bytes."""

    name: str
    flops: float
    num_bytes: float
    saves: tuple[tuple[str, float], ...] = ()
    backward_flops: float = 2.0
    """FLOPs of backward relative to forward; ``backward_bytes`` likewise."""
    backward_bytes: float = 2.0
    gradients: float = 0.0
    """Peak bytes of gradients during its backward."""
    weight_gradient: float = 0.0
    """Bytes of its weight's bf16 gradient, which is added to an fp32 buffer."""
    is_attention: bool = False
    is_fp8: bool = False
    speeds: tuple[float, float] = (1.0, 1.0)
    """Parts of the GPU's TFLOP/s that forward and backward reach."""
    quantized_bytes: float = 0.0
    """Bytes that quantizing the input reads and writes in forward; ``gradient_quantized_bytes``: in backward."""
    gradient_quantized_bytes: float = 0.0


@dataclass(frozen=True)
class _Sizes:
    """Bytes of the tensors of one layer on one rank."""

    hidden: float
    sharded: float
    query: float
    key: float
    fc1: float
    activation: float
    log_sum_exp: float
    tokens: float


def _sizes(model: Model) -> _Sizes:
    tokens = model.seq_length / model.context_parallel * model.micro_batch_size
    head = model.head_size or model.hidden_size // model.num_attention_heads
    tensor = model.tensor_parallel
    hidden = tokens * model.hidden_size * BYTES
    activation = tokens * model.ffn_hidden_size / tensor * BYTES
    return _Sizes(
        hidden=hidden,
        sharded=hidden / tensor if model.sequence_parallel else hidden,
        query=tokens * model.num_attention_heads / tensor * head * BYTES,
        key=tokens * max(1.0, model.num_query_groups / tensor) * head * BYTES,
        fc1=activation * (2 if model.gated else 1),
        activation=activation,
        log_sum_exp=tokens * model.num_attention_heads / tensor * 4,
        tokens=tokens,
    )


def kernels(model: Model) -> list[Kernel]:
    """Return the kernels of a dense TransformerEngine layer's forward, in order.

    Raises:
        UsageError: the formulas do not cover the layer.
    """
    uncovered = {
        f"--transformer-impl {model.transformer_impl}": model.transformer_impl != "transformer_engine",
        f"--num-experts {model.num_experts}": model.num_experts,
        f"weights in {model.dtype} (--bf16 is missing)": model.dtype != "bf16",
    }
    if wrong := [what for what, is_wrong in uncovered.items() if is_wrong]:
        raise UsageError(
            f"{', '.join(wrong)}: cannot be planned without a measurement. Measure a profile: train with "
            "--swap-save-profile FILE, then plan with --profile FILE."
        )
    size, wide = _sizes(model), model.hidden_size
    hidden, query, key = size.hidden, size.query, size.key
    per_byte = 2 * wide / BYTES  # FLOPs of a linear layer with one side of the hidden size, per byte of its other side
    weights = wide / size.tokens  # bytes of a weight's gradient, per byte of its other side
    context, core = "self_attention.core_attention.fused_attention", 2 * size.tokens * model.seq_length / BYTES
    qkv = query + 2 * key
    steps = [
        Kernel("qkv", per_byte * qkv, 2 * hidden + qkv,
               (("self_attention.linear_qkv/0", size.sharded), ("self_attention.linear_qkv/1", size.sharded)),
               gradients=2 * hidden + qkv + weights * qkv, weight_gradient=weights * qkv),
        Kernel("rotary", 0, 2 * qkv, gradients=hidden + 2 * qkv),
        Kernel("attention", core * query / size.tokens, query * 2 + 2 * key,
               ((f"{context}/0", query), (f"{context}/1", key), (f"{context}/2", key), (f"{context}/3", query),
                (f"{context}/6", size.log_sum_exp)),
               backward_flops=2.9, gradients=hidden + query + qkv, is_attention=True),
        Kernel("proj", per_byte * query, 0, gradients=hidden + query + weights * query,
               weight_gradient=weights * query),
        Kernel("residual", 0, 3 * size.sharded, backward_bytes=0.4, gradients=hidden),
        Kernel("fc1", per_byte * size.fc1, 2 * hidden,
               (("mlp.linear_fc1/0", size.sharded), ("mlp.linear_fc1/1", size.sharded)),
               gradients=2 * hidden + size.fc1 + weights * size.fc1, weight_gradient=weights * size.fc1),
        Kernel("activation", 0, size.fc1 + size.activation, (("mlp/0", size.fc1),),
               gradients=hidden + size.activation + size.fc1),
        Kernel("fc2", per_byte * size.activation, 0, (("mlp.linear_fc2/0", size.activation),),
               gradients=hidden + size.activation + weights * size.activation,
               weight_gradient=weights * size.activation),
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
                step, saves=saves, is_fp8=True, speeds=SPEEDS.get(recipe, step.speeds),
                quantized_bytes=moved_bytes(recipe, inputs, 2 - later) + moved_bytes(recipe, weight, 1),
                gradient_quantized_bytes=moved_bytes(recipe, outputs + weight) + later * moved_bytes(recipe, inputs, 1),
                gradients=step.gradients + outputs + weight,  # in FP8, in two layouts: the output's gradient, weights
            )  # fmt: skip
    return steps


# Sites that a later kernel than the saving one reads too: attention and proj share the context, which is saved once.
FIRST_NEEDED_BY = {"self_attention.core_attention.fused_attention/3": "proj"}

RECOMPUTE_INPUTS = {
    "self_attention.linear_qkv/1": ("self_attention.linear_qkv/0",),
    "mlp.linear_fc1/1": ("mlp.linear_fc1/0",),
    "mlp.linear_fc2/0": ("mlp/0",),
    "mlp/0": ("mlp.linear_fc1/0",),
}
"""Sites that one elementwise kernel or linear recomputes, and the sites it reads, which may be recomputed too."""
LINEAR_OUTPUTS = {"mlp/0": "fc1"}
"""Recomputable outputs of linear layers. With sequence parallelism they are not recomputed, because the linear gathers
its input from other ranks."""


def _forward_ms(step: Kernel, gpu: Gpu) -> float:
    tflops = gpu.attention_tflops if step.is_attention else gpu.fp8_tflops if step.is_fp8 else gpu.tflops
    num_bytes = step.num_bytes + step.quantized_bytes
    return step.flops / (tflops * step.speeds[0] * 1e9) + num_bytes / (gpu.memory_gb_s * 1e6)


def _backward_ms(step: Kernel, gpu: Gpu) -> float:
    num_bytes = step.num_bytes * step.backward_bytes + step.weight_gradient * (BYTES + 8) / BYTES
    flops, speeds, quantized = step.flops * step.backward_flops, step.speeds[::-1], step.gradient_quantized_bytes
    return _forward_ms(replace(step, flops=flops, speeds=speeds, num_bytes=num_bytes, quantized_bytes=quantized), gpu)


def layer_class(model: Model, gpu: Gpu, layers: tuple[int, ...], is_input_held: bool = False) -> LayerClass:
    """Return a class of equal layers. ``is_input_held``: there are other references to their input."""
    steps = kernels(model)
    saved_at: dict[str, float] = {}
    needed_at: dict[str, float] = {}
    done_at: dict[str, float] = {}
    sizes: dict[str, float] = {}
    now = 0.0
    for step in steps:
        now += _forward_ms(step, gpu)
        for site, num_bytes in step.saves:
            saved_at[site], sizes[site] = now, num_bytes
    forward_ms, now = now, 0.0
    temporaries = []
    first_needed: dict[str, float] = {}
    for step in reversed(steps):
        temporaries.append((now, step.gradients / MIB))
        for site, kernel in FIRST_NEEDED_BY.items():
            if kernel == step.name and not step.saves:  # else it has saved a copy in FP8
                first_needed[site] = now
        for site, _ in step.saves:
            needed_at[site] = first_needed.get(site, now)
        now += _backward_ms(step, gpu)
        done_at.update((site, now) for site, _ in step.saves)
    costs = _recompute_ms(model, gpu, sizes) if model.fp8_recipe is None else _fp8_recompute_ms(model, gpu, sizes)
    inputs = RECOMPUTE_INPUTS if model.fp8_recipe is None else FP8_RECOMPUTE_INPUTS
    sites = tuple(
        SiteProfile(
            site, sizes[site] / MIB, saved_at[site], needed_at[site], done_at[site],
            recompute_ms=costs.get(site), recompute_needs=inputs[site] if site in costs else (),
            is_ineligible=is_input_held and site == "self_attention.linear_qkv/0",
        )
        for site in sizes
    )  # fmt: skip
    size = _sizes(model)
    peak_mib = 2 * size.hidden / MIB
    if model.fp8_recipe is not None:  # linear_fc2 holds its bf16 input, which is not saved, and both its FP8 layouts
        copies = 0.0 if model.keeps_fp8_weights else steps[-2].weight_gradient  # two layouts of its weight
        peak_mib = max(peak_mib, (size.hidden + 1.5 * size.activation + copies) / MIB)
    sections = _sections(model, gpu, sites, peak_mib)
    if model.fp8_recipe is not None:
        sections = tuple(part for part in sections if part.name in recomputed(model))
    return LayerClass(layers, forward_ms, now, sites, sections, tuple(temporaries), peak_mib)


def kernel_ms(model: Model, gpu: Gpu) -> dict[str, float]:
    """Return the forward time of each kernel in ms. Kernels with one name are summed."""
    times: dict[str, float] = {}
    for step in kernels(model):
        times[step.name] = times.get(step.name, 0.0) + _forward_ms(step, gpu)
    return times


def _fp8_recompute_ms(model: Model, gpu: Gpu, sizes: dict[str, float]) -> dict[str, float]:
    """Return the time to recompute each site of an FP8 layer that the engine can recompute, in ms."""
    assert model.fp8_recipe is not None
    costs, times = {}, kernel_ms(model, gpu)
    for site in recomputed(model) & FP8_RECOMPUTE_INPUTS.keys() & sizes.keys():
        if site in LINEAR_OUTPUTS:
            if not model.sequence_parallel:
                costs[site] = times[LINEAR_OUTPUTS[site]]
            continue
        in_bf16 = BYTES * sizes[site]  # a quantized value has one byte
        made = 0.0 if site in ONLY_QUANTIZED else in_bf16 + sum(sizes[need] for need in FP8_RECOMPUTE_INPUTS[site])
        costs[site] = (made + moved_bytes(model.fp8_recipe, in_bf16)) / (gpu.memory_gb_s * 1e6)
    return costs


def _recompute_ms(model: Model, gpu: Gpu, sizes: dict[str, float]) -> dict[str, float]:
    """Return the time to recompute each site of a bf16 layer, in ms."""
    times = kernel_ms(model, gpu)
    costs = {}
    for site, needs in RECOMPUTE_INPUTS.items():
        if site not in LINEAR_OUTPUTS:
            costs[site] = (sizes[site] + sum(sizes[need] for need in needs)) / (gpu.memory_gb_s * 1e6)
        elif not model.sequence_parallel:
            costs[site] = times[LINEAR_OUTPUTS[site]]
    return costs


def _sections(model: Model, gpu: Gpu, sites: tuple[SiteProfile, ...], peak_mib: float) -> tuple[Section, ...]:
    """Return the sections ``layer`` and, without sequence parallelism, ``qkv``.

    The output of linear_qkv is not saved itself: the rotary embedding and a copy turn it into three sites. They are
    recomputed together.
    """
    times = kernel_ms(model, gpu)
    names = [site.site for site in sites]
    qkv = tuple(f"self_attention.core_attention.fused_attention/{i}" for i in range(3))
    whole = Section(LAYER_SECTION, tuple(names[1:]), (names[0],), sum(times.values()), peak_mib)
    if model.sequence_parallel:
        return (whole,)
    intermediates_mib = sum(site.mib for site in sites if site.site in qkv)
    return Section("qkv", qkv, (names[0],), times["qkv"] + times["rotary"], intermediates_mib), whole


def chunks_of(model: Model, pipeline_rank: int) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each virtual stage of a pipeline stage.

    Raises:
        UsageError: the layers do not divide into the stages.
    """
    stages, virtual = model.pipeline_parallel, model.num_virtual_stages
    if model.num_layers % (stages * virtual):
        raise UsageError(f"{model.num_layers} layers do not divide into {stages} x {virtual} pipeline stages.")
    deep = model.num_layers // (stages * virtual)
    return tuple(
        tuple(range((stage * stages + pipeline_rank) * deep, (stage * stages + pipeline_rank + 1) * deep))
        for stage in range(virtual)
    )


def num_params(model: Model, tied: bool) -> tuple[float, float]:
    """Return the parameters of one layer, and those of embedding, final norm and output layer, over all ranks."""
    wide = model.hidden_size
    return linear_params(model) + 2 * wide, wide * model.padded_vocab_size * (1 if tied else 2) + wide


def params_of_rank(model: Model, tied: bool, pipeline_rank: int = 0) -> float:
    """Return the parameters of one rank of a pipeline stage."""
    stages = model.pipeline_parallel
    of_layer, of_ends = num_params(model, tied)
    has_ends = (pipeline_rank == 0) + (pipeline_rank == stages - 1)
    ends = of_ends if stages == 1 else of_ends / 2 * has_ends
    return (of_layer * (model.num_layers // stages) + ends) / model.tensor_parallel


def gradient_stand_ins_gib(model: Model, states: States, has_loss: bool) -> float:
    """Return the tensors that autograd gets as weight gradients where layers add to ``main_grad`` themselves.

    TransformerEngine and Megatron (``get_dummy_wgrad``) keep one for each shape of a linear layer's weight.
    """
    of_output = model.hidden_size * model.padded_vocab_size if has_loss else 0
    return states.weight_bytes * (linear_params(model) + of_output) / model.tensor_parallel / GIB


def shape_profile(
    model: Model, gpu: Gpu, num_micro_batches: int, *,
    tied: bool = False, states: States = States(), pipeline_rank: int = 0,  # noqa: B008
    host_gib: float | None = None, state_on_disk_gib: float = 0.0,
    loss_chunks: int = 1, has_sum_in_loss: bool = False, fuses_gradients: bool = False,
) -> Profile:  # fmt: skip
    """Estimate the profile of ``model`` on ``gpu``.

    Args:
        tied: whether embedding and output layer share their weights.
        states: storage of weights, gradients and optimizer state.
        host_gib: limit of host memory for activations; ``None``: no limit.
        state_on_disk_gib: the part of the offloaded state that host memory has no room for.
        loss_chunks, has_sum_in_loss: chunks of the sequence in which output layer and loss run; ``loss_bytes``.
        fuses_gradients: layers add to ``main_grad`` themselves.

    Raises:
        UsageError: the layers do not divide into the stages, the formulas do not cover the model, or the GPU has no
            FP8.
    """
    check_gpu(model, gpu)
    gpu = gpu.for_width(model.hidden_size)
    stages = model.pipeline_parallel
    chunks = chunks_of(model, pipeline_rank)
    here = [layer for chunk in chunks for layer in chunk]
    heads = {chunk[0] for chunk in chunks}  # the pipeline schedule holds a stage's input
    in_bf16, classes = set(model.bf16_layers), []
    for is_head, is_bf16 in itertools.product((True, False), repeat=2):
        alike = tuple(layer for layer in here if (layer in heads) is is_head and (layer in in_bf16) is is_bf16)
        if alike:
            of_layer = replace(model, fp8_recipe=None) if is_bf16 else model
            classes.append(layer_class(of_layer, gpu, alike, is_head))

    has_input, has_loss = pipeline_rank == 0, pipeline_rank == stages - 1
    params = params_of_rank(model, tied, pipeline_rank)
    layers_ms = sum(len(entry.layers) * (entry.forward_ms + entry.backward_ms) for entry in classes)
    optimizer_ms = params * OPTIMIZER_BYTES_PER_PARAM / (gpu.optimizer_gb_s * 1e6)
    if model.fp8_recipe is not None:
        optimizer_ms += quantize_weights_ms(model.fp8_recipe, gpu, fp8_params(model, tuple(here)))
    fraction, disk_ms = states.offload_fraction, state_on_disk_gib * DISK_MS_PER_GIB
    optimizer_ms += max(states.copy_ms(params, gpu.link_both_gb_s), disk_ms)
    is_fixed = not states.is_auto
    state = OffloadedState(states.state_gib(params), fraction, 0.0, state_on_disk_gib, disk_ms, is_fixed)
    stand_ins_gib = gradient_stand_ins_gib(model, states, has_loss) if fuses_gradients else 0.0
    return Profile(
        source=f"arithmetic; {gpu.source}",
        model=model,
        device=Device(gpu.name, gpu.memory_gib),
        link=Link(gpu.link_gb_s, gpu.link_gb_s, gpu.link_both_gb_s, gpu.link_both_gb_s),
        static_gib=states.device_gib(params) + WORKSPACE_GIB + stand_ins_gib,
        allocator_gib=None,
        host_gib=host_gib,
        num_micro_batches=num_micro_batches,
        non_layer=_non_layer(
            model, gpu, has_input, loss_chunks if has_loss else 0, has_sum_in_loss, layers_ms, optimizer_ms
        ),
        layers=tuple(classes),
        pipeline=Pipeline(stages, pipeline_rank, chunks),
        offloaded_state=state if fraction else None,
        optimizer_gib=states.optimizer_gib(params),
    )


def _non_layer(
    model: Model, gpu: Gpu, has_input: bool, loss_chunks: int, has_sum_in_loss: bool, layers_ms: float,
    optimizer_ms: float,
) -> NonLayer:  # fmt: skip
    """Return the figures of final norm, logits and the chunked cross entropy (``cross_entropy.py``).

    The cross entropy saves the logits. The embedding saves the token numbers, which the batch holds anyway. The output
    layer saves the final norm's output, which the model's frames hold until forward ends. Backward
    computes the logits of all chunks but one again.

    Args:
        loss_chunks: 0: the loss is on another rank.
    """
    size, sites, loss_ms = _sizes(model), [], 0.0
    non_layer = NonLayer(0.0, 0.0, optimizer_ms, 0.0, 0.0)
    if loss_chunks:
        logits = size.tokens * model.padded_vocab_size / model.tensor_parallel
        flops = 2 * logits * model.hidden_size / (gpu.tflops * 1e9)
        held = loss_bytes(model, loss_chunks, has_sum_in_loss)
        entropy_ms, gradient_ms = 12 * logits / (gpu.memory_gb_s * 1e6), 4 * logits / (gpu.memory_gb_s * 1e6)
        again_ms = flops * (loss_chunks - 1) / loss_chunks
        loss_ms = 3 * flops + entropy_ms + gradient_ms + again_ms
        sites = [
            NonLayerSite("decoder.final_layernorm/0", size.sharded / MIB, loss_ms),
            NonLayerSite("output_layer/0", size.sharded / MIB, entropy_ms + gradient_ms + again_ms, "held"),
            NonLayerSite("loss/0", held.logits / MIB, 0.0),
        ]
        non_layer = NonLayer(
            forward_ms=flops + entropy_ms,
            backward_ms=2 * flops + gradient_ms + again_ms,
            optimizer_ms=optimizer_ms,
            kept_gib=held.kept / GIB,
            peak_gib=held.peak / GIB,
        )
    if has_input:
        sites.insert(0, NonLayerSite("embedding.word_embeddings/0", 8 * size.tokens / MIB, layers_ms + loss_ms, "held"))
    return replace(non_layer, sites=tuple(sites))


def with_megatrons_loss(profile: Profile) -> Profile:
    """Return ``profile`` with Megatron's own loss, which saves a copy of the logits in fp32."""
    if not profile.has_loss:
        return profile
    model = profile.model
    tokens = model.seq_length * model.micro_batch_size / model.context_parallel
    copy_gib = 4 * tokens * model.padded_vocab_size / model.tensor_parallel / GIB
    chunk_gib = copy_gib / max(1, tokens // LOSS_ROWS)
    non_layer = profile.non_layer
    return replace(profile, non_layer=replace(
        non_layer, kept_gib=non_layer.kept_gib + copy_gib / 2, peak_gib=non_layer.peak_gib + copy_gib - chunk_gib
    ))  # fmt: skip


def with_measured_times(profile: Profile, forward_ms: float, backward_ms: float, step_ms: float) -> Profile:
    """Return ``profile`` with its times scaled so that a micro-batch's forward and backward equal the measured ones."""
    non_layer, layers = profile.non_layer, profile.layers
    forward = forward_ms / (non_layer.forward_ms + sum(len(e.layers) * e.forward_ms for e in layers))
    backward = backward_ms / (non_layer.backward_ms + sum(len(e.layers) * e.backward_ms for e in layers))
    rest = max(0.0, step_ms - profile.num_micro_batches * (forward_ms + backward_ms))
    return replace(
        profile,
        non_layer=replace(non_layer_scaled(non_layer, forward, backward), optimizer_ms=rest),
        layers=tuple(scaled(entry, forward, backward) for entry in layers),
    )


def non_layer_scaled(non_layer: NonLayer, forward: float, backward: float, mib: float = 1.0) -> NonLayer:
    """Return ``non_layer`` scaled as ``scaled`` does. Idle times of sites scale with ``backward``."""
    return replace(
        non_layer,
        forward_ms=non_layer.forward_ms * forward,
        backward_ms=non_layer.backward_ms * backward,
        kept_gib=non_layer.kept_gib * mib,
        peak_gib=non_layer.peak_gib * mib,
        sites=tuple(replace(site, mib=site.mib * mib, idle_ms=site.idle_ms * backward) for site in non_layer.sites),
    )


def scaled(entry: LayerClass, forward: float, backward: float, mib: float = 1.0) -> LayerClass:
    """Return ``entry`` with its times multiplied by ``forward`` and ``backward``, and its sizes by ``mib``."""
    return replace(
        entry,
        forward_ms=entry.forward_ms * forward,
        backward_ms=entry.backward_ms * backward,
        sites=tuple(
            replace(site, mib=site.mib * mib, saved_at_ms=site.saved_at_ms * forward,
                    needed_at_ms=site.needed_at_ms * backward, done_at_ms=site.done_at_ms * backward,
                    recompute_ms=None if site.recompute_ms is None else site.recompute_ms * forward)
            for site in entry.sites
        ),
        sections=tuple(
            replace(part, recompute_ms=part.recompute_ms * forward, peak_mib=part.peak_mib * mib)
            for part in entry.sections
        ),
        temporaries=tuple((at * backward, size * mib) for at, size in entry.temporaries),
        forward_peak_mib=entry.forward_peak_mib * mib,
    )  # fmt: skip
