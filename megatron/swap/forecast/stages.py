"""Chooses an option for all planned stages of a pipeline, and the stage that decides whether and how fast it trains."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron.swap.forecast.options import Option


@dataclass(frozen=True)
class Decision:
    """The option for all planned stages, with the options of the stage that decides."""

    rank: int  # the stage that the chosen option does not fit, or the slower stage
    found: Sequence[Option]  # the options of that stage
    chosen: Option | None  # one of ``found`` that fits every planned stage, or None
    least: Option  # the option with the smallest budget that is enough for every planned stage
    unfit: Mapping[str, int] = field(default_factory=dict)
    """Name of an option that fits this stage → another stage that it does not fit."""


def planned_ranks(num_stages: int, rank: int | None, is_saved: bool) -> tuple[int, ...]:
    """Return the stages to plan: ``rank`` if it is given, one for a plan file, else the first and the last."""
    if rank is not None or is_saved:
        return (rank or 0,)
    # Stages between them hold no more micro-batches than the first, and neither embedding nor loss.
    return tuple(sorted({0, num_stages - 1}))


def decide(found: Mapping[int, Sequence[Option]], choose: Callable[[Sequence[Option]], Option | None]) -> Decision:
    """Choose an option that every stage has, by its worst stage. ``choose`` returns the best of some, or None."""
    worst = list(_worst(found))
    chosen = choose([option for _, option in worst])
    least_rank, least = min(worst, key=lambda pair: pair[1].needed_gib)
    rank = least_rank if chosen is None else next(rank for rank, option in worst if option is chosen)
    unfit = {
        option.name: other
        for option in found[rank] if option.fits
        for other, options in found.items()
        if not any(one.fits for one in options if one.name == option.name)
    }  # fmt: skip
    return Decision(rank, found[rank], chosen, least, unfit)


def _worst(found: Mapping[int, Sequence[Option]]) -> Iterator[tuple[int, Option]]:
    """Yield each option that all stages have, of the stage that it does not fit, or else of the slowest."""
    by_name = {rank: {one.name: one for one in options} for rank, options in found.items()}
    for name in next(iter(by_name.values())):
        stages = [(rank, options[name]) for rank, options in by_name.items() if name in options]
        if len(stages) < len(found):
            continue
        unfit = [pair for pair in stages if not pair[1].fits]
        if unfit:
            yield max(unfit, key=lambda pair: pair[1].needed_gib)
        else:
            yield max(stages, key=lambda pair: pair[1].prediction.step_ms if pair[1].prediction else 0.0)
