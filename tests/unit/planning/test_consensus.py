"""Agreement of ranks: on the figures of a step, and on the end if one of them fails."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.swap.planning.consensus import RankError, Ranks
from megatron.swap.planning.workload import Step

STEP = Step(7, 30.0, 8.0, 4.0, 800.0, 3, 0.0)


class OtherRank:
    """The collectives of rank 0 of two. The test says what rank 1 brings."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.figures = [20.0, 9.0, 3.0, 900.0, 2.0, 0.5, 0.0]
        self.item: Any = None
        self.sent: list[Any] = []
        monkeypatch.setattr(torch.distributed, "all_reduce", self.all_reduce)
        monkeypatch.setattr(torch.distributed, "all_gather_object", self.all_gather_object)
        self.ranks = Ranks()
        self.ranks.num_ranks = 2

    def all_reduce(self, mine: torch.Tensor, how: Any, group: Any) -> None:
        assert how == torch.distributed.ReduceOp.MAX
        mine.copy_(mine.maximum(torch.tensor(self.figures, dtype=torch.float64)))

    def all_gather_object(self, items: list[Any], mine: Any, group: Any) -> None:
        self.sent.append(mine)
        items[:] = [mine, self.item]

    def fails(self, error: Exception) -> None:
        """Rank 1 fails in what it computes before its next collective."""
        sent: list[Any] = []

        def take(items: list[Any], mine: Any, group: Any) -> None:
            sent.append(mine)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "all_gather_object", take)
            with pytest.raises(type(error)):
                self.ranks.gather(raising(error))
        self.item, self.figures[-1] = sent[0], 1.0


def raising(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> OtherRank:
    return OtherRank(monkeypatch)


@pytest.mark.parametrize("ms", [30.0, None])
def test_of_each_figure_the_worst_counts(ms: float | None, other: OtherRank) -> None:
    """The other rank has more in every second figure. A time that one rank lacks stays unknown."""
    step = other.ranks.worst(lambda: Step(7, ms, 8.0, 4.0, 800.0, 3, 0.0))
    assert step == Step(7, ms, 9.0, 4.0, 900.0, 3, 0.5)
    assert other.sent == []


def test_results_of_all_ranks_in_their_order(other: OtherRank) -> None:
    other.item = "b"
    assert other.ranks.gather(lambda: "a") == ["a", "b"]
    assert other.ranks.all_or_none(lambda: "a") == "a"


@pytest.mark.parametrize("ask", [
    lambda ranks: ranks.gather(lambda: 1),
    lambda ranks: ranks.all_or_none(lambda: 1),
    lambda ranks: ranks.worst(lambda: STEP),
])  # fmt: skip
def test_a_rank_whose_peer_failed_ends_with_the_reason(ask: Callable[[Ranks], Any], other: OtherRank) -> None:
    other.fails(KeyError("odd"))
    with pytest.raises(RankError, match=r"rank 1 failed between two steps, so all ranks end\. Its error: KeyError: 'o"):
        ask(other.ranks)


@pytest.mark.parametrize("ask", [Ranks.gather, Ranks.all_or_none, Ranks.worst])
def test_a_rank_that_fails_tells_the_others_and_raises_its_own_error(
    ask: Callable[[Ranks, Callable[[], Any]], Any], other: OtherRank
) -> None:
    with pytest.raises(ZeroDivisionError, match="mine"):
        ask(other.ranks, raising(ZeroDivisionError("mine")))
    assert len(other.sent) == 1, "the other rank waits for ever"
