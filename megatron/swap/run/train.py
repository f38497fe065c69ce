"""Swapping in any training loop: ``train`` for every model, ``activations`` for models other than Megatron's."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from torch import nn

from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.settings import Settings, parse_layers
from megatron.swap.common.spelling import ACTIVATIONS, Spelling
from megatron.swap.common.types import GIB, UsageError, layer_positions
from megatron.swap.devices.base import Device
from megatron.swap.engine.policy import Policy, policy_of
from megatron.swap.models.found_layers import device_of, is_megatrons, layers_of
from megatron.swap.models.hints import ModelHints
from megatron.swap.models.plannable import refuse_unplannable
from megatron.swap.params.module_weights import WeightSwap
from megatron.swap.params.module_weights import weights as offload_weights
from megatron.swap.planning.training_steps import check_optimizer
from megatron.swap.run.console import Console, LogConsole
from megatron.swap.run.run import Run
from megatron.swap.run.run_device import RunDevice

LEAST_HOST_GIB = 2**-18  # a page, so that activations which do not fit are refused in their own words
OF_MEGATRON = {  # settings that act on Megatron's models alone
    "modules", "recompute", "loss_chunks", "fp8_weights", "plan", "optimizer_state", "summary", "profile",
    "profile_steps", "deterministic",
}  # fmt: skip
NAMES = {field.name for field in dataclasses.fields(Settings)} - {"optimizer"} | {"weights"}
TRAIN = Spelling(*NAMES, others="{}_state")  # the setting `optimizer` is `optimizer_state` here


@TRAIN.errors()
def train(
    model: nn.Module | Iterable[nn.Module],
    optimizer: Any = None,
    *,
    memory_gib: float | None = None,
    layers: str | Policy | None = None,
    plan: str | None = None,
    optimizer_state: float | str | None = None,
    weights: str | None = None,
    hints: ModelHints | Sequence[nn.Module] | None = None,
    log: Callable[[str], None] | None = None,
    **settings: Any,
) -> Run:
    """Swap the saved tensors of a model's layers, from the next step on.

    ::

        with swap.train(model, optimizer, memory_gib=60) as run:
            ...                  # the training loop that you have
        print(run.stats())

    Losses, gradients and weights are bit-equal to a run without swapping. Call it on every rank, when the model is on
    its device.

    Args:
        model: a model of PyTorch, or this rank's chunks of a Megatron model, in Megatron's wrappers or without them.
        optimizer: its ``step`` ends a training step; where a gradient scaler may skip it, call ``Run.step``. Without an
            optimizer a step ends at the first forward after an optimizer of the model's parameters has stepped.
        memory_gib: most device memory that a step may take: the first steps are measured, then a planner keeps,
            offloads or recomputes saved tensors.
        layers: layers to swap: ``0-9``, ``0,4-7``, ``every:2``, ``all``. Or a policy, unless the model is Megatron's.
        plan: a plan file, for a Megatron model.
        optimizer_state: fraction of the state of Megatron's optimizer that is offloaded, or ``auto`` with a budget.
        weights: layers whose frozen weights are offloaded, too, written as ``layers``. Not for a Megatron model.
        hints: the layers, in the order of forward, of a model where they are not the children of ``nn.ModuleList``s
            and ``nn.Sequential``s; or a ``ModelHints``, which says more.
        log: takes each line that is printed; by default the logger ``megatron.swap``.
        settings: more of the ``--swap-`` flags, without the prefix and with underscores: ``min_mib=0.1``.

    Raises:
        UsageError: the arguments cannot work for this model; nothing was changed.
        HostMemoryError: the host has less memory than the run needs at least.
        PatchError: this Megatron lacks a symbol that the settings need.
    """
    if not isinstance(model, nn.Module) and isinstance(model, Iterable):
        model = list(model)
    policy = layers if isinstance(layers, Policy) else None
    if policy is not None and memory_gib is not None:
        raise UsageError("layers= is a policy beside memory_gib=: the planner decides within a budget. Leave one out.")
    given = {"memory_gib": memory_gib, "layers": None if policy else layers, "plan": plan, **settings}
    parsed = Settings.of(given | {"optimizer": optimizer_state})
    console = LogConsole(TRAIN, log, parsed.log_level)
    if hints is None and is_megatrons(model):
        from megatron.swap.run.install import swap_built  # needs megatron.core

        if weights is not None or policy is not None:
            raise UsageError("this is a Megatron model: weights= and a policy are for others. Give layers='0-9'.")
        return swap_built(model, optimizer, parsed, console)
    for name, value in {"plan": plan, "optimizer_state": optimizer_state, **settings}.items():
        if name in OF_MEGATRON and value is not None:
            raise UsageError(f"{name}={value!r} is for Megatron models, and this is another one. Leave it out.")
    if not (parsed.acts or policy or weights or layers):
        raise UsageError("nothing is to be swapped. Give memory_gib=60 (GiB), layers='0-9' (or 'all') or weights.")
    checked = None if hints is None else _checked(hints, model)
    return _swapped(model, optimizer, policy, parsed, console, weights=weights, hints=checked)


@ACTIVATIONS.errors()
def activations(
    model: nn.Module | Iterable[nn.Module],
    layers: str | Policy = "all",
    *,
    min_mib: float = 1.0,
    host_gib: float | None = None,
    prefetch_gib: float | None = None,
    verify: bool = False,
    oom_guard: bool = False,
    cpu_delay_ms: float = 0.0,
    memory_gib: float | None = None,
    memory_fraction: float | None = None,
    save_plan: str | None = None,
    save_profile: str | None = None,
    log: Callable[[str], None] | None = None,
    autocast_cache: bool = True,
) -> Run:
    """Swap the saved tensors of the layers of ``model``: offload them after forward, reload them before backward.

    With a budget (``memory_gib`` or ``memory_fraction``) the first steps are measured. Then a planner keeps, offloads
    or recomputes saved tensors, so that steps are as fast as possible within the budget.

    ::

        with swap.activations(model, "0-9") as swapped:
            for batch in data:
                loss = model(batch).loss
                loss.backward()
                optimizer.step()
        print(swapped.stats())

    Losses, gradients and weights are bit-equal to a run without swapping. Nothing has to be called between steps.

    Args:
        model: a model, or its layers in the order of forward. The layers of a model are the children of every outermost
            ``nn.ModuleList`` and ``nn.Sequential``, in order. A layer that appears several times counts once. To train
            on a GPU, move the model there first.
        layers: the layers to swap: ``0-9``, ``0,4-7``, ``every:2``, ``all``; or a policy, which is asked by number. The
            last layers before the loss are kept: backward needs them at once.
        min_mib: smaller storages are kept, unless ``layers`` is a policy, which decides itself.
        host_gib: most host memory to use, in GiB; by default a safe part of this machine's.
        prefetch_gib: most GiB that are reloaded ahead of use; by default the bytes that the largest layer saves.
        verify: compare checksums of every storage that is reloaded.
        oom_guard: when an allocation on the GPU fails, evict saved tensors to the host and retry the allocation.
        cpu_delay_ms: longest random delay of a copy; for a model on the CPU, where threads emulate the copy engines.
        memory_gib: most device memory that a step may take, in GiB. ``model`` is the whole model then, and ``layers``
            stays ``all``. A step ends at the first forward after an optimizer of the model's parameters has stepped, or
            at ``Run.step``. Call it on every rank.
        memory_fraction: the same, as a fraction of the device's memory.
        save_plan: file for the plan that is chosen.
        save_profile: file for the profile behind the plan.
        log: takes the lines that the planner prints; by default the logger ``megatron.swap``, and without handlers
            standard error.
        autocast_cache: False: within the layers, autocast does not keep its casts of fp32 weights until forward ends,
            half of the weights' memory. Results are those of ``torch.autocast(..., cache_enabled=False)``: a weight
            that a forward uses several times gets its gradients summed in fp32, not in 16 bits.

    A planner's ``Infeasible`` comes out of the call that ends a step: ``step``, or the model's forward.

    Raises:
        UsageError: the arguments cannot work for this model; nothing was changed.
        HostMemoryError: the host has less memory than ``host_gib``.
    """
    if not isinstance(layers, str | Policy):
        raise UsageError(
            f"swap.activations was given {layers!r} as layers: it must be a text such as '0-9' or 'all', or a Policy."
        )
    is_planned = memory_gib is not None or memory_fraction is not None
    if is_planned and layers != "all":
        raise UsageError(f"layers {layers!r} beside memory_gib: the planner chooses within one budget. Leave one out.")
    policy = layers if isinstance(layers, Policy) else None
    settings = Settings(
        layers="none" if is_planned or policy else str(layers),
        min_mib=min_mib, host_gib=host_gib, prefetch_gib=prefetch_gib, verify=verify, oom_guard=oom_guard,
        cpu_delay_ms=cpu_delay_ms, memory_gib=memory_gib, memory_fraction=memory_fraction, save_plan=save_plan,
        save_profile=save_profile,
    )  # fmt: skip
    return _swapped(model, None, policy, settings, LogConsole(ACTIVATIONS, log), autocast_cache=autocast_cache)


def _swapped(
    model: nn.Module | Iterable[nn.Module], optimizer: Any, policy: Policy | None, settings: Settings, console: Console,
    *, autocast_cache: bool = True, weights: str | None = None, hints: ModelHints | None = None,
) -> Run:  # fmt: skip
    """Return a run of a model that is not Megatron's. Arguments as for ``train`` and ``activations``."""
    if not settings.auto and (settings.save_plan is not None or settings.save_profile is not None):
        raise UsageError("save_plan and save_profile write what the planner finds: give memory_gib too.")
    found = layers_of(model) if hints is None else list(hints.layers)
    if settings.auto:
        refuse_unplannable(model)
    elif settings.swaps_layers or policy is not None or not (weights or settings.oom_guard):
        chosen = policy or policy_of(settings, len(found))
        _check_policy(chosen, policy or settings.layers, len(found))
        _check_tail(chosen, len(found), num_ahead=1 if settings.prefetch_gib is None else 0)
    if policy is not None:  # the layers that it names are its own matter
        settings = replace(settings, layers="all")
    if hints is None:
        whole = model if isinstance(model, nn.Module) and settings.auto else None
        hints = ModelHints(whole, found, autocast_cache=autocast_cache)
    check_optimizer(optimizer, [model] if isinstance(model, nn.Module) else found)
    run_device = RunDevice(settings, console.rank, Ranges(), torch_device=device_of(found))
    if weights is None:
        return Run(settings, copy(hints), console, run_device, policy).begin(optimizer)
    offloaded = _offloaded(model, found, weights, settings, run_device.device)  # one device: weights go first
    try:
        if settings.host_gib is not None:  # the weights are within it
            left_gib = settings.host_gib - offloaded.stats.host_bytes / GIB
            settings = replace(settings, host_gib=max(left_gib, LEAST_HOST_GIB))
        run = Run(settings, copy(hints), console, run_device, policy)
        run.weights = offloaded
    except BaseException:
        offloaded.close()
        raise
    return run.begin(optimizer)


def _checked(hints: Any, model: nn.Module | Iterable[nn.Module]) -> ModelHints:
    """Return ``hints``, or those for a list of layers, once the layers are known to be the model's."""
    if isinstance(hints, list | tuple) and isinstance(model, nn.Module):
        hints = ModelHints(model, hints)
    if not isinstance(hints, ModelHints):
        raise UsageError(f"hints={hints!r}: must be a list of the model's layers, or a ModelHints.")
    found = layers_of(hints.layers)
    mine = set(model.modules()) if isinstance(model, nn.Module) else set()
    if hints.chunks != [model] or len(found) != len(hints.layers) or not mine.issuperset(found):
        raise UsageError("hints= must be made for this model, with each layer once, as a module of the model.")
    return hints


def _offloaded(
    model: nn.Module | Iterable[nn.Module], found: Sequence[nn.Module], weights: str, settings: Settings,
    device: Device,
) -> WeightSwap:  # fmt: skip
    """Return the frozen weights of the layers that ``weights`` names, in host memory."""
    if not isinstance(model, nn.Module) or not isinstance(weights, str):
        raise UsageError(f"weights={weights!r}: must be a text such as '0-9' or 'all', beside a model, not its layers.")
    try:
        numbers = sorted(parse_layers(weights, len(found)))
    except UsageError as error:
        raise UsageError(str(error).replace("--swap-layers", "--swap-weights")) from None
    if not numbers:
        raise UsageError(f"weights={weights!r} names no layer. Name one, or leave it out.")
    chosen = [found[number] for number in numbers]
    return offload_weights(model, chosen, training=True, host_gib=settings.host_gib, device=device)


def _check_policy(policy: Policy, given: str | Policy, num_layers: int) -> None:
    if not any(map(policy.swaps_layer, range(num_layers))):
        raise UsageError(f"layers {given!r}: none of the {num_layers} layers would be swapped. Name one, or 'all'.")
    if any(map(policy.recomputes_whole, range(num_layers))):
        raise UsageError(
            f"layers {given!r}: recomputes whole layers, for which Megatron's layers are needed. Put "
            "torch.utils.checkpoint around them in the model, and swap others."
        )


def _check_tail(policy: Policy, num_layers: int, num_ahead: int) -> None:
    """Refuse a policy that would swap only trailing layers, which are kept. ``num_ahead``: fewest layers prefetched."""
    is_swapped = [policy.swaps_layer(number) for number in range(num_layers)]
    positions = layer_positions(is_swapped, ends_in_loss=True)
    if all(position.is_trailing_kept(num_ahead) for position in positions if position.swapped):
        raise UsageError(
            f"of {num_layers} layers only the last would be swapped, and those are kept: backward needs them at once. "
            "Swap earlier ones, or pass smaller layers: their children in the order of forward."
        )
