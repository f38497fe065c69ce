"""One rank fails: all ranks end, in time, and the others say why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.harness import SWAP_SMALL, Trainer

PLANTED = Path(__file__).with_name("planted_error_script.py")


@pytest.mark.parametrize(
    ("place", "rank"), [("solve", 0), ("layers", 1), ("profile", 1), ("recorder", 0)]
)
def test_an_error_in_the_planner_of_one_rank(trainer: Trainer, place: str, rank: int) -> None:
    """Without agreement the other rank waited in its next collective for as long as the first one lived."""
    flags = f"--train-iters 14 --lr-decay-iters 14 {SWAP_SMALL} --swap-memory-gib 1"
    run = trainer.failing(f"{flags} --planted {place} {rank}", ranks=2, program=PLANTED)
    assert re.search(rf"^\[rank{rank}\]: ZeroDivisionError: planted", run.output, flags=re.MULTILINE), run.tail
    told = rf"^\[rank{1 - rank}\]: error: rank {rank} failed between two steps, .*Its error: ZeroDivisionError: planted"
    assert re.search(told, run.output, flags=re.MULTILINE), run.tail
    assert "Connection closed by peer" not in run.output
