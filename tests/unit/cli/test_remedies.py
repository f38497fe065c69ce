"""Changes of training flags with which a run fits, or needs no disk."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.swap.cli import plan as planner
from megatron.swap.cli import remedies
from megatron.swap.cli.remedies import GRADIENTS, changes, is_needed, remedy_line
from megatron.swap.common.types import UsageError
from megatron.swap.forecast.flags import read_flags
from megatron.swap.forecast.options import DISK, PLANNED, STATE

FLAGS = (
    "--num-layers 40 --hidden-size 5120 --ffn-hidden-size 17920 --num-attention-heads 40 --group-query-attention "
    "--num-query-groups 8 --vocab-size 128256 --swiglu --bf16 --seq-length 8192 --max-position-embeddings 8192 "
    "--micro-batch-size 4 --global-batch-size 16 --untie-embeddings-and-output-weights --hidden-dropout 0"
)
"""A 15B."""
CHUNKS, SMALLER = ("--mlp-chunks-for-training", "2"), ("--micro-batch-size", "2")


def option(name: str = PLANNED, step_ms: float = 1000.0, flags: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(name=name, prediction=SimpleNamespace(step_ms=step_ms), flags=flags)


def decision(chosen: Any) -> Any:
    return SimpleNamespace(chosen=chosen, found=[option("nothing", 500.0)])


@pytest.mark.parametrize(
    ("flags", "num_gpus", "expected"),
    [("", 1, [GRADIENTS, CHUNKS, SMALLER]), ("", 2, [GRADIENTS, ("--use-distributed-optimizer",), CHUNKS, SMALLER]),
     ("--micro-batch-size 1", 1, [GRADIENTS]), (" ".join(GRADIENTS), 2, [CHUNKS, SMALLER])],
)  # fmt: skip
def test_changes_leave_gpus_and_tokens_alone(flags: str, num_gpus: int, expected: list) -> None:
    assert changes(read_flags(f"{FLAGS} {flags}".split(), num_gpus)) == expected


def test_the_smallest_changes_that_do_are_ordered_by_speed() -> None:
    training = read_flags(FLAGS.split(), 2)
    asked: list[tuple[str, ...]] = []
    times = {GRADIENTS: 900.0, CHUNKS: 850.0, SMALLER: 800.0}

    def decide(flags: Sequence[str]) -> Any:
        asked.append(tuple(flags))
        if flags == ("--use-distributed-optimizer",):
            return decision(option(DISK, 100.0))
        return decision(option(step_ms=times[tuple(flags)]))

    found = remedies.remedies(training, decide)
    assert [one.flags for one in found] == [SMALLER, CHUNKS, GRADIENTS]
    assert [one.times for one in found] == [1.6, 1.7, 1.8]
    assert max(map(len, asked)) == len(GRADIENTS), "pairs are not tried if one change does"


def test_pairs_are_tried_if_no_single_change_does() -> None:
    training = read_flags(FLAGS.split())

    def decide(flags: Sequence[str]) -> Any:
        if {*CHUNKS} <= {*flags}:
            return decision(None)
        if flags == SMALLER:
            raise UsageError("the batch does not divide")
        return decision(option(STATE, flags=("--swap-optimizer", "auto")) if {*SMALLER} <= {*flags} else None)

    (found,) = remedies.remedies(training, decide)
    assert found.flags == (*GRADIENTS, *SMALLER)
    assert remedies.remedies(training, lambda _: decision(None)) == []
    line = remedy_line([found], 4096, has_chosen=False)
    assert line.startswith("It fits with --main-grads-dtype bf16")
    assert line.endswith("--micro-batch-size 2 (4,096 tokens/s, 2.00 x the unswapped step time, with --swap-optimizer "
                         "auto).")  # fmt: skip


@pytest.mark.parametrize(
    ("chosen", "flags", "expected"),
    [(None, "", True), (option(DISK, 600.0), "", True), (option(DISK, 599.0), "", False),
     (option(STATE, 5000.0), "", False), (option(DISK, 600.0), "--swap-optimizer auto --swap-disk-dir /d", False)],
)  # fmt: skip
def test_a_disk_that_was_asked_for_or_that_is_fast_needs_no_remedy(chosen: Any, flags: str, expected: bool) -> None:
    assert is_needed(chosen, option("nothing", 500.0), read_flags(f"{FLAGS} {flags}".split())) is expected


@pytest.mark.slow
def test_plan_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    """15B on one H200 with 100 GiB of host memory: with a disk six times as slow as with 16-bit gradients."""
    words = ["--gpu", "h200", "--host-gib", "100", "--", *FLAGS.split(), "--micro-batch-size", "1"]
    assert planner.main(words) == 0
    verdict, better = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert "only with a disk, at 6." in verdict
    assert better.startswith(f"Faster without a disk with {' '.join(GRADIENTS)} (5,")
    assert better.endswith(" 1.12 x the unswapped step time, with --swap-optimizer auto).")


def test_a_micro_batch_size_that_plan_is_given_may_be_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def found(training: Any, decide: Any) -> list[Any]:
        smaller = next(words for words in changes(training) if "--micro-batch-size" in words)
        assert smaller == ("--micro-batch-size", "1")
        asked.append(int(decide(smaller).found[0].profile.model.micro_batch_size))
        return []

    monkeypatch.setattr(planner, "is_needed", lambda *_: True)
    monkeypatch.setattr(planner, "remedies", found)
    planner.main(["--gpu", "h200", "--micro-batch-size", "2", "--host-gib", "100", "--", *FLAGS.split()])
    assert asked == [1]
