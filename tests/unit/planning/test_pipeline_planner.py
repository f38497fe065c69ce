"""Plans of several pipeline stages, with made-up profiles."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megatron.swap.planner.profile import LayerClass, Pipeline, Profile
from megatron.swap.planner.solve import solve
from megatron.swap.planning.pipeline_planner import PipelinePlanner
from tests.unit.planner.cases import profile, site


def stage(rank: int, allocator_gib: float) -> Profile:
    layers = (2 * rank, 2 * rank + 1)
    entry = LayerClass(layers, 2.0, 4.0, (site("a/0", 512, 1.0, 1.0, 2.0), site("b/0", 512, 1.0, 1.0, 2.0)))
    of = profile([entry], pipeline=Pipeline(2, rank, (layers,)), micro_batches=2)
    return replace(of, allocator_gib=allocator_gib, model=replace(of.model, num_layers=4))


class TwoStages:
    """Rank 0 of two: what rank 1 answers is computed here too."""

    rank = 0

    def __init__(self, other: Profile, budget_gib: float, reserve_gib: float | None) -> None:
        nothing = reserve_gib is not None and reserve_gib >= other.reserves_gib[0]
        self._others: list[Any] = [
            (1, other), [] if nothing else list(solve(other, budget_gib, 3, reserve_gib).plans)
        ]  # fmt: skip

    def gather(self, compute: Callable[[], Any]) -> list[Any]:
        return [compute(), self._others.pop(0)]


def test_a_stage_without_layers_has_its_only_plan() -> None:
    empty = replace(stage(0, 0.1), layers=(), pipeline=Pipeline(2, 0, ((),)), optimizer_gib=3.85)
    planner = PipelinePlanner(TwoStages(stage(1, 0.1), 4.0, None), 0, 3)  # type: ignore[arg-type]
    plans = planner.plans(lambda: empty, 4.0, None)
    assert {plan.layers() for plan in plans} == {(2, 3)}
    assert plans[0].predicted is not None
    assert plans[0].predicted.peak_gib == pytest.approx(3.95)


@pytest.mark.parametrize(
    ("fragments", "reserve_gib", "is_planned"),
    [
        ((0.1, 0.1), 0.2, True),
        ((0.1, 0.1), 2.0, False),
        ((0.1, 0.0), 0.2, False),  # where no allocator reserves memory, none was left free
    ],
)
def test_memory_is_left_free_in_all_stages_or_in_none(
    fragments: tuple[float, float], reserve_gib: float | None, is_planned: bool
) -> None:
    mine, other = stage(0, fragments[0]), stage(1, fragments[1])
    planner = PipelinePlanner(TwoStages(other, 4.0, reserve_gib), 0, 3)  # type: ignore[arg-type]
    plans = planner.plans(lambda: mine, 4.0, reserve_gib)
    assert bool(plans) == is_planned
