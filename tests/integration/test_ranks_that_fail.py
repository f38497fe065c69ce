"""One rank fails: all ranks end, in time, and the others say why."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.swap.common.types import GIB
from tests.integration.harness import ROOT, SWAP_SMALL, Trainer, assert_same_training, recorded

PLANTED = Path(__file__).with_name("planted_error_script.py")
SIGNALLED = Path(__file__).with_name("signalled_script.py")
SLOW = Path(__file__).with_name("slow_link_script.py")


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
    assert not re.search("Connection (closed|reset) by peer", run.output)


@pytest.mark.parametrize("flags", ["--swap-layers all", "--swap-memory-gib 1"])
def test_a_rank_that_is_killed_ends_the_others(trainer: Trainer, flags: str) -> None:
    """The zygote kills a rank that does not end by itself within two seconds, and tells: its exit status is -9."""
    steps = f"--train-iters 14 --lr-decay-iters 14 {SWAP_SMALL}"
    run = trainer.run(f"{steps} {flags} SIGKILL 7:1", ranks=2, program=SIGNALLED, check=False)
    assert run.returncode == 1, run.tail
    broken = r"^\[rank0\]: RuntimeError: .*Connection (closed|reset) by peer"  # as the system finds it first
    assert re.search(broken, run.output, flags=re.MULTILINE), run.tail
    assert "[rank1]:" not in run.output


def test_a_rank_whose_link_is_ten_times_slower(trainer: Trainer) -> None:
    """Ranks agree on the worst measurement: on one plan, and at the same step."""
    flags = "--train-iters 16 --lr-decay-iters 16"
    plain = trainer.unswapped(flags, ranks=2, saved="torch")
    budget_gib = 0.6 * plain.summary["saved_peak_bytes"] / 2 / GIB
    run = trainer.run(
        f"{flags} {SWAP_SMALL} --swap-memory-gib {budget_gib} --swap-save-profile profile.json {recorded('torch')} "
        "--slow-rank 1", ranks=2, program=SLOW,
    )  # fmt: skip
    assert_same_training(plain, run)
    assert run.summary["planning"]["stages"][-1]["stage"] == "stable"
    first, second = run.summary["ranks"]
    assert first["swapped_layers"] == second["swapped_layers"]


WAITING = """
import os, sys, time
import torch
from megatron.swap.planning.consensus import Ranks

rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
ranks = Ranks(timeout_minutes=5 / 60)
print("made", flush=True)
if rank == 1:
    sys.stdin.readline()  # stands still
    os._exit(0)
try:
    ranks.gather(lambda: 1)
except RuntimeError as error:
    print(f"ended: {error}", flush=True)
os._exit(0)
"""


def test_a_rank_that_stands_still_is_waited_for_as_long_as_the_run_says(tmp_path: Path) -> None:
    """``--distributed-timeout-minutes`` holds for what ranks agree on. Torch's default there is half an hour."""
    command = [sys.executable, "-c", WAITING]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
    with subprocess.Popen([*command, "1", f"{tmp_path}/store"], **pipes) as still:
        done = subprocess.run([*command, "0", f"{tmp_path}/store"], capture_output=True, text=True, env=env, timeout=60)
        still.communicate("\n")
    assert done.returncode == 0, done.stderr
    assert re.search(r"ended: .*Timed out waiting 5000ms", done.stdout), done.stdout
