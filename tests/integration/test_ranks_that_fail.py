"""One rank fails: all ranks end, in time, and the others say why."""

import re
from pathlib import Path

import pytest

from tests.integration.harness import SWAP_SMALL, Trainer

PLANTED = Path(__file__).with_name("planted_error_script.py")
SIGNALLED = Path(__file__).with_name("signalled_script.py")


@pytest.mark.parametrize(("place", "rank"), [pytest.param("solve", 0, marks=pytest.mark.nightly), ("recorder", 1)])
def test_an_error_in_the_planner_of_one_rank(trainer: Trainer, place: str, rank: int) -> None:
    """Without agreement the other rank waited in its next collective for as long as the first one lived."""
    flags = f"--train-iters 14 --lr-decay-iters 14 {SWAP_SMALL} --swap-memory-gib 1"
    run = trainer.failing(f"{flags} --planted {place} {rank}", ranks=2, program=PLANTED)
    assert re.search(rf"^\[rank{rank}\]: ZeroDivisionError: planted", run.output, flags=re.MULTILINE), run.tail
    told = rf"^\[rank{1 - rank}\]: error: rank {rank} failed between two steps, .*Its error: ZeroDivisionError: planted"
    assert re.search(told, run.output, flags=re.MULTILINE), run.tail
    assert not re.search("Connection (closed|reset) by peer", run.output)


def test_a_rank_that_is_killed_ends_the_others(trainer: Trainer) -> None:
    """The zygote kills a rank that does not end by itself within two seconds, and tells: its exit status is -9."""
    flags = f"--train-iters 14 --lr-decay-iters 14 {SWAP_SMALL} --swap-memory-gib 1"
    run = trainer.run(f"{flags} SIGKILL 7:1", ranks=2, program=SIGNALLED, check=False)
    assert run.returncode == 1, run.tail
    broken = r"^\[rank0\]: RuntimeError: .*Connection (closed|reset) by peer"  # as the system finds it first
    assert re.search(broken, run.output, flags=re.MULTILINE), run.tail
    assert "[rank1]:" not in run.output
