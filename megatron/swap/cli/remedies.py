"""Searches the smallest changes of training flags with which a run fits, or needs no disk, and orders them by speed."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.swap.cli.plan_text import SLOW, num_holders, relative_time
from megatron.swap.common.types import UsageError
from megatron.swap.forecast.flags import Training
from megatron.swap.forecast.mlp_chunks import MLP_CHUNKS, advised_num_chunks
from megatron.swap.forecast.options import DISK, Option
from megatron.swap.forecast.stages import Decision

GRADIENTS = ("--main-grads-dtype", "bf16", "--use-precision-aware-optimizer", "--use-distributed-optimizer")
"""Flags for gradients in 16 bits. Megatron needs the last two for the first."""
MAX_NAMED = 3  # remedies that are named, the fastest first


@dataclass(frozen=True)
class Remedy:
    """Training flags to add, and the option that fits with them. ``times``: its step time over the unswapped one."""

    flags: tuple[str, ...]
    option: Option
    times: float


def is_needed(chosen: Option | None, unswapped: Option, training: Training) -> bool:
    """Whether nothing fits, or only something slow with a disk that nobody asked for."""
    if chosen is None:
        return True
    return chosen.name == DISK and not training.disk_gib and relative_time(chosen, unswapped) >= SLOW


def changes(training: Training) -> list[tuple[str, ...]]:
    """Return changes of flags that save memory on the same GPUs with the same tokens in a step."""
    model, states = training.model, training.states
    found: list[tuple[str, ...]] = []
    if states.gradient_bytes == 4 and model.dtype == "bf16":
        found.append(GRADIENTS)
    if num_holders(training) > 1 and not training.shares_state:
        found.append(("--use-distributed-optimizer",))
    if (num_chunks := advised_num_chunks(model)) > 1:
        found.append((MLP_CHUNKS, str(num_chunks)))
    if model.micro_batch_size > 1:
        found.append(("--micro-batch-size", str(model.micro_batch_size // 2)))
    return found


def remedies(training: Training, decide: Callable[[Sequence[str]], Decision]) -> list[Remedy]:
    """Return the smallest sets of changes with which the run fits without a disk, the fastest first."""
    single = changes(training)
    for size in range(1, len(single) + 1):
        found = []
        for chosen in itertools.combinations(single, size):
            flags = tuple(dict.fromkeys(word for flags in chosen for word in flags))
            try:
                decision = decide(flags)  # plans with these flags behind the given ones
            except UsageError:  # the batch does not divide
                continue
            option = decision.chosen
            if option is not None and option.prediction is not None and option.name != DISK:
                found.append(Remedy(flags, option, relative_time(option, decision.found[0])))
        if found:
            return sorted(found, key=_step_ms)[:MAX_NAMED]
    return []


def _step_ms(remedy: Remedy) -> float:
    assert remedy.option.prediction is not None
    return remedy.option.prediction.step_ms


def remedy_line(found: Sequence[Remedy], tokens: int, has_chosen: bool) -> str:
    """Return a sentence that names the remedies. ``tokens``: those of a step."""
    named = []
    for one in found:
        beside = f", with {' '.join(one.option.flags)}" if one.option.flags else ""
        speed = f"{tokens / _step_ms(one) * 1000:,.0f} tokens/s, {one.times:.2f} x the unswapped step time{beside}"
        named.append(f"{' '.join(one.flags)} ({speed})")
    return f"{'Faster without a disk' if has_chosen else 'It fits'} with {', or '.join(named)}."
