"""Models that cannot be planned, and what works against a plan in those that can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from megatron.swap.common.types import UsageError
from megatron.swap.models.found_layers import devices_of
from megatron.swap.params.stacks import is_compiled


def refuse_unplannable(model: Any) -> None:
    """Raise a ``UsageError`` for a model that cannot be planned; it says why, and what to do."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            "memory_gib and memory_fraction plan a whole model, and a list of layers was given. Pass the model, whose "
            "layers are in nn.ModuleList or nn.Sequential."
        )
    if is_compiled(model):
        raise UsageError(
            f"{type(model).__name__} is compiled as a whole: its steps and layers cannot be measured. Pass the model "
            "before torch.compile, and train it uncompiled."
        )
    if len(devices := sorted(map(str, devices_of([model])))) > 1:
        raise UsageError(
            f"{type(model).__name__} is on {', '.join(devices)}: a budget needs a model on one GPU. Move it there "
            '(no device_map="auto"), or swap layers without a budget.'
        )
    for name, module in model.named_modules():
        sharded = {"FSDPModule", "FullyShardedDataParallel"} & {kind.__name__ for kind in type(module).__mro__}
        if sharded:
            raise UsageError(
                f"{name or 'the model'} is sharded ({sharded.pop()}), so its weights are freed between uses: that is "
                "not planned. Use DistributedDataParallel."
            )


def take_over(model: nn.Module) -> Iterator[tuple[list[Callable[[], None]], str | None]]:
    """Switch off what would work against the planner in a transformers model. Yield how to undo each, and a line."""
    modules = list(model.modules())
    checkpointing = [module for module in modules if getattr(module, "gradient_checkpointing", False) is True]
    configs = {id(config): config for module in modules if (config := getattr(module, "config", None)) is not None}
    caching = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    for owners, name, line in (
        (checkpointing, "gradient_checkpointing",
         "the model's gradient checkpointing is off until close(): the planner decides instead"),
        (caching, "use_cache", "the model's use_cache is off until close(): a cache would hold keys and values"),
    ):  # fmt: skip
        for number, owner in enumerate(owners):
            yield [_switch_off(owner, name)], None if number else line


def _switch_off(owner: Any, name: str) -> Callable[[], None]:
    try:
        setattr(owner, name, False)
    except (AttributeError, TypeError) as error:  # a frozen dataclass
        raise UsageError(
            f"{type(owner).__name__}.{name} is on, works against a budget and cannot be changed ({error}). Set it to "
            "False where it is made."
        ) from error
    return lambda: setattr(owner, name, True)
