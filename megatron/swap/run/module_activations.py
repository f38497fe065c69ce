"""Activation swapping for models that are not Megatron's: chosen layers, or a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.log import logger
from megatron.swap.common.settings import Settings
from megatron.swap.common.spelling import ACTIVATIONS
from megatron.swap.common.types import UsageError, layer_positions
from megatron.swap.engine.policy import Policy, policy_of
from megatron.swap.models.found_layers import layers_of
from megatron.swap.models.layer_devices import device_of
from megatron.swap.models.plannable import refuse_unplannable
from megatron.swap.run.planned_activations import PlannedActivations
from megatron.swap.run.run_device import RunDevice
from megatron.swap.run.swapped_activations import SwappedActivations


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
) -> SwappedActivations | PlannedActivations:
    """Swap what autograd saves in the layers of ``model``: offload it after forward, reload it before backward.

    With a budget (``memory_gib`` or ``memory_fraction``) the first steps are measured, and then a planner keeps,
    offloads or recomputes what is saved, so that steps are as fast as possible within the budget.

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
            ``nn.ModuleList`` and ``nn.Sequential`` in it, in order. A layer that appears several times counts once.
            To train on a GPU, move the model there first.
        layers: the layers to swap: ``0-9``, ``0,4-7``, ``every:2``, ``all``; or a policy, which is asked by number. The
            last ones before the loss are kept, since backward needs them at once.
        min_mib: smaller storages are kept, unless ``layers`` is a policy, which decides itself.
        host_gib: most host memory to use, in GiB; ``None``: what is safe on this machine.
        prefetch_gib: most GiB that are reloaded ahead of use; ``None``: as much as the largest layer saves.
        verify: compare checksums of every storage that is reloaded.
        oom_guard: when an allocation on the GPU fails, evict saved tensors to the host and retry the allocation.
        cpu_delay_ms: longest random delay of a copy; for a model on the CPU, where threads emulate the copy engines.
        memory_gib: most device memory that a step may take, in GiB. ``model`` is the whole model then, and ``layers``
            stays ``all``. Steps end at the first forward after an optimizer of the model's parameters has stepped, or
            where ``PlannedActivations.step`` says so. Call it on every rank.
        memory_fraction: the same, as a fraction of the device's memory.
        save_plan: file for the plan that is chosen.
        save_profile: file for the profile that it was made from.
        log: takes the lines that the planner prints; ``None``: they go to the logger ``megatron.swap``, and without
            handlers to standard error.
        autocast_cache: False: within the layers, autocast does not keep its casts of fp32 weights until forward ends,
            half of the weights' memory. Results are those of layers under ``torch.autocast(..., cache_enabled=False)``:
            a weight that a forward uses several times gets its gradients summed in fp32, not in 16 bits.

    A planner's ``Infeasible`` comes out of the call that ends a step: ``step``, or the model's forward.

    Raises:
        UsageError: the arguments cannot work for this model; nothing was changed.
        HostMemoryError: the host has less memory than ``host_gib``.
    """
    found = layers_of(model)
    is_planned = memory_gib is not None or memory_fraction is not None
    if None not in (memory_gib, memory_fraction):
        raise UsageError("memory_fraction beside memory_gib: the planner chooses within one budget. Leave one out.")
    if not is_planned and (save_plan is not None or save_profile is not None):
        raise UsageError("save_plan and save_profile write what the planner finds: give memory_gib too.")
    settings = Settings(
        layers=layers if isinstance(layers, str) and not is_planned else "none",
        min_mib=min_mib, host_gib=host_gib, prefetch_gib=prefetch_gib, verify=verify, oom_guard=oom_guard,
        cpu_delay_ms=cpu_delay_ms, memory_gib=memory_gib, memory_fraction=memory_fraction, save_plan=save_plan,
        save_profile=save_profile,
    )  # fmt: skip
    if is_planned:
        if layers != "all":
            raise UsageError(
                f"layers {layers!r} beside memory_gib: the planner chooses within one budget. Leave one out."
            )
        refuse_unplannable(model)
    run_device = RunDevice(settings, 0, Ranges(), torch_device=device_of(found))
    if is_planned:
        return PlannedActivations(model, found, settings, run_device, log or logger.info, autocast_cache)  # type: ignore[arg-type]
    policy = policy_of(settings, len(found)) if isinstance(layers, str) else layers
    _check_policy(policy, layers, len(found))
    _check_tail(policy, len(found), num_ahead=1 if prefetch_gib is None else 0)
    return SwappedActivations(found, policy, settings, run_device, autocast_cache)


def _check_policy(policy: Policy, given: str | Policy, num_layers: int) -> None:
    if not isinstance(policy, Policy):
        raise UsageError(
            f"swap.activations was given {given!r} as layers: it must be a text such as '0-9' or 'all', or a Policy."
        )
    if not any(map(policy.swaps_layer, range(num_layers))):
        raise UsageError(f"layers {given!r}: none of the {num_layers} layers would be swapped. Name one, or 'all'.")
    if any(map(policy.recomputes_whole, range(num_layers))):
        raise UsageError(
            f"layers {given!r}: recomputes whole layers, for which Megatron's layers are needed. Put "
            "torch.utils.checkpoint around them in the model, and swap others."
        )


def _check_tail(policy: Policy, num_layers: int, num_ahead: int) -> None:
    """Refuse a policy that would swap only trailing layers, which are kept. ``num_ahead``: least layers prefetched."""
    is_swapped = [policy.swaps_layer(number) for number in range(num_layers)]
    positions = layer_positions(is_swapped, ends_in_loss=True)
    if all(position.is_trailing_kept(num_ahead) for position in positions if position.swapped):
        raise UsageError(
            f"of {num_layers} layers only the last would be swapped, and those are kept: backward needs them at once. "
            "Swap earlier ones, or pass smaller layers: their children in the order of forward."
        )
