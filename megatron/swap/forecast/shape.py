"""Estimates a profile from a model's shape and a GPU's figures."""

import itertools
from dataclasses import replace

from megatron.swap.common.plan import LAYER_SECTION, Model
from megatron.swap.common.types import GIB, LOSS_ROWS, MIB, UsageError
from megatron.swap.forecast.attention import attention_path
from megatron.swap.forecast.figures import figures_of
from megatron.swap.forecast.fp8 import (
    RESIDUAL_SECTION,
    check_gpu,
    fp8_params,
    linear_params,
    quantize_weights_ms,
    recomputed,
)
from megatron.swap.forecast.gpus import Gpu
from megatron.swap.forecast.kernels import (
    FC1_INPUT,
    INPUT,
    backward_ms_of,
    forward_ms_of,
    kernel_ms,
    kernels,
    recompute_inputs,
    recompute_ms,
    sizes_of,
)
from megatron.swap.forecast.loss_chunks import loss_bytes
from megatron.swap.forecast.states import DISK_MS_PER_GIB, States, type_bytes
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

WORKSPACE_GIB = 0.096  # measured memory of libraries besides weights, gradients and optimizer state
OPTIMIZER_BYTES_PER_PARAM = 38  # read and written by an Adam step, the gradient norm and clearing gradients


def layer_class(
    model: Model, gpu: Gpu, layers: tuple[int, ...], is_input_held: bool = False, has_dropout: bool = False
) -> LayerClass:
    """Return a class of equal layers. With ``has_dropout`` sums of residual and output cannot be recomputed."""
    steps = kernels(model)
    saved_at: dict[str, float] = {}
    needed_at: dict[str, float] = {}
    done_at: dict[str, float] = {}
    sizes: dict[str, float] = {}
    now = 0.0
    for step in steps:
        now += forward_ms_of(step, gpu)
        for site, num_bytes in step.saves:
            saved_at[site], sizes[site] = now, num_bytes
    forward_ms, now = now, 0.0
    temporaries = []
    for step in reversed(steps):
        temporaries.append((now, step.gradients / MIB))
        for site in (*step.reads, *(site for site, _ in step.saves)):
            needed_at.setdefault(site, now)
        now += backward_ms_of(step, gpu)
        done_at.update((site, now) for site, _ in step.saves)
    costs, inputs = recompute_ms(model, gpu, sizes), recompute_inputs(model)
    sites = tuple(
        SiteProfile(
            site, sizes[site] / MIB, saved_at[site], needed_at[site], done_at[site],
            recompute_ms=costs.get(site), recompute_needs=inputs[site] if site in costs else (),
            is_ineligible=is_input_held and site == INPUT,
        )
        for site in sizes
    )  # fmt: skip
    size = sizes_of(model)
    peak_mib = (2 if model.mlp_chunks == 1 else 3) * size.hidden / MIB  # of chunks' outputs there are two copies
    if model.fp8_recipe is not None:  # linear_fc2 holds its bf16 input, which is not saved, and both its FP8 layouts
        copies = 0.0 if model.keeps_fp8_weights else steps[-2].weight_gradient  # two layouts of its weight
        peak_mib = max(peak_mib, (size.hidden + 1.5 * size.activation + copies) / MIB)
    sections = _sections(model, gpu, sites, peak_mib, has_dropout)
    if model.fp8_recipe is not None:
        sections = tuple(part for part in sections if part.name in recomputed(model))
    return LayerClass(layers, forward_ms, now, sites, sections, tuple(temporaries), peak_mib)


def _sections(
    model: Model, gpu: Gpu, sites: tuple[SiteProfile, ...], peak_mib: float, has_dropout: bool
) -> tuple[Section, ...]:
    """Return the section ``layer`` and, where the engine recomputes them, ``qkv`` and ``residual``."""
    times, mib = kernel_ms(model, gpu), {site.site: site.mib for site in sites}
    names = list(mib)
    found = [Section(LAYER_SECTION, tuple(names[1:]), (names[0],), sum(times.values()), peak_mib)]
    if not has_dropout and model.tensor_parallel == 1:
        again_ms = times["proj"] + times["residual"] / 2  # of two sums
        reads = INPUT, f"{attention_path(model)}/3"
        found.insert(0, Section(RESIDUAL_SECTION, (FC1_INPUT,), reads, again_ms, mib[FC1_INPUT]))
    if not model.sequence_parallel:
        # The output of linear_qkv is not saved: the rotary embedding and a copy turn it into three sites.
        qkv = tuple(f"{attention_path(model)}/{i}" for i in range(3))
        again_ms = times["qkv"] + times["rotary"]
        found.insert(0, Section("qkv", qkv, (names[0],), again_ms, sum(mib[site] for site in qkv)))
    return tuple(found)


def chunks_of(model: Model, pipeline_rank: int) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each virtual stage of a pipeline stage, or raise ``UsageError`` if they do not divide."""
    stages, virtual = model.pipeline_parallel, model.num_virtual_stages
    if model.num_layers % (stages * virtual):
        raise UsageError(f"{model.num_layers} layers do not divide into {stages} x {virtual} pipeline stages.")
    deep = model.num_layers // (stages * virtual)
    return tuple(
        tuple(range((stage * stages + pipeline_rank) * deep, (stage * stages + pipeline_rank + 1) * deep))
        for stage in range(virtual)
    )


def num_params(model: Model, tied: bool) -> tuple[float, float]:
    """Return the parameters of a layer, and those of embedding, final norm and output layer, over all ranks."""
    wide = model.hidden_size
    return linear_params(model) + 2 * wide, wide * model.padded_vocab_size * (1 if tied else 2) + wide


def params_of_rank(model: Model, tied: bool, pipeline_rank: int = 0) -> float:
    stages = model.pipeline_parallel
    of_layer, of_ends = num_params(model, tied)
    has_ends = (pipeline_rank == 0) + (pipeline_rank == stages - 1)
    ends = of_ends if stages == 1 else of_ends / 2 * has_ends
    return (of_layer * (model.num_layers // stages) + ends) / model.tensor_parallel


def gradient_stand_ins_gib(model: Model, states: States, has_loss: bool) -> float:
    """Return the tensors that autograd gets as weight gradients where layers add to ``main_grad`` themselves."""
    # TransformerEngine and Megatron (``get_dummy_wgrad``) keep one for each shape of a linear layer's weight.
    of_output = model.hidden_size * model.padded_vocab_size if has_loss else 0
    return states.weight_bytes * (linear_params(model) + of_output) / model.tensor_parallel / GIB


def shape_profile(
    model: Model, gpu: Gpu, num_micro_batches: int, *,
    tied: bool = False, states: States = States(), pipeline_rank: int = 0,  # noqa: B008
    host_gib: float | None = None, state_on_disk_gib: float = 0.0,
    loss_chunks: int = 1, has_sum_in_loss: bool = False, fuses_gradients: bool = False, has_dropout: bool = False,
) -> Profile:  # fmt: skip
    """Estimate the profile of ``model`` on ``gpu``, or raise ``UsageError`` if the formulas do not cover them.

    ``tied``: embedding and output layer share their weights. ``host_gib`` limits host memory for activations (None: no
    limit). ``state_on_disk_gib``: of offloaded state. ``fuses_gradients``: layers add to ``main_grad`` themselves.
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
            classes.append(layer_class(of_layer, gpu, alike, is_head, has_dropout))
    has_input, has_loss = pipeline_rank == 0, pipeline_rank == stages - 1
    params = params_of_rank(model, tied, pipeline_rank)
    layers_ms = sum(len(entry.layers) * (entry.forward_ms + entry.backward_ms) for entry in classes)
    optimizer_ms = params * OPTIMIZER_BYTES_PER_PARAM / (gpu.optimizer_gb_s * 1e6)
    if model.fp8_recipe is not None:
        optimizer_ms += quantize_weights_ms(model.fp8_recipe, gpu, fp8_params(model, tuple(here)))
    requantized_gib = 0.0
    if states.has_fp8_weights:
        requantized_gib = fp8_params(model, tuple(here)) * type_bytes("fp32") / states.num_shards / GIB
    fraction, disk_ms = states.offload_fraction, state_on_disk_gib * DISK_MS_PER_GIB
    optimizer_ms += max(states.copy_ms(params, gpu.link_both_gb_s), disk_ms)
    optimizer_ms += fraction * requantized_gib * GIB / (gpu.link_gb_s * 1e6)
    state = OffloadedState(
        states.state_gib(params), fraction, 0.0, state_on_disk_gib, disk_ms, not states.is_auto, requantized_gib
    )
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
        figures=figures_of(model),
    )


def _non_layer(
    model: Model, gpu: Gpu, has_input: bool, loss_chunks: int, has_sum_in_loss: bool, layers_ms: float,
    optimizer_ms: float,
) -> NonLayer:  # fmt: skip
    """Return the figures of final norm, logits and the chunked cross entropy (``cross_entropy.py``)."""
    size, sites, loss_ms = sizes_of(model), [], 0.0
    non_layer = NonLayer(0.0, 0.0, optimizer_ms, 0.0, 0.0)
    if loss_chunks:  # 0: the loss is on another rank
        logits = size.tokens * model.padded_vocab_size / model.tensor_parallel
        flops = 2 * logits * model.hidden_size / (gpu.tflops * 1e9)
        held = loss_bytes(model, loss_chunks, has_sum_in_loss)
        entropy_ms, gradient_ms = 12 * logits / (gpu.memory_gb_s * 1e6), 4 * logits / (gpu.memory_gb_s * 1e6)
        again_ms = flops * (loss_chunks - 1) / loss_chunks  # backward computes the logits of all chunks but one again
        loss_ms = 3 * flops + entropy_ms + gradient_ms + again_ms
        sites = [
            NonLayerSite("decoder.final_layernorm/0", size.sharded / MIB, loss_ms),
            # The output layer saves the final norm's output, which the model's frames hold until forward ends.
            NonLayerSite("output_layer/0", size.sharded / MIB, entropy_ms + gradient_ms + again_ms, "held"),
            NonLayerSite("loss/0", held.logits / MIB, 0.0),
        ]
        non_layer = NonLayer(
            forward_ms=flops + entropy_ms, backward_ms=2 * flops + gradient_ms + again_ms, optimizer_ms=optimizer_ms,
            kept_gib=held.kept / GIB, peak_gib=held.peak / GIB,
        )  # fmt: skip
    if has_input:
        # The embedding saves the token numbers, which the batch holds anyway.
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
    ))


def non_layer_scaled(non_layer: NonLayer, forward: float, backward: float, mib: float = 1.0) -> NonLayer:
    """Return ``non_layer`` scaled as ``scaled`` does. Idle times of sites scale with ``backward``."""
    return replace(
        non_layer, forward_ms=non_layer.forward_ms * forward, backward_ms=non_layer.backward_ms * backward,
        kept_gib=non_layer.kept_gib * mib, peak_gib=non_layer.peak_gib * mib,
        sites=tuple(replace(site, mib=site.mib * mib, idle_ms=site.idle_ms * backward) for site in non_layer.sites),
    )  # fmt: skip


def scaled(entry: LayerClass, forward: float, backward: float, mib: float = 1.0) -> LayerClass:
    """Return ``entry`` with its times multiplied by ``forward`` and ``backward``, and its sizes by ``mib``."""
    return replace(
        entry,
        forward_ms=entry.forward_ms * forward,
        backward_ms=entry.backward_ms * backward,
        sites=tuple(
            replace(site, mib=site.mib * mib, saved_at_ms=site.saved_at_ms * forward,
                    gone_at_ms=None if site.gone_at_ms is None else site.gone_at_ms * forward,
                    beside_mib=None if site.beside_mib is None else site.beside_mib * mib,
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
