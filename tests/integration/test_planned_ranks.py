"""``swap.activations(model, memory_gib=…)`` in a loop of two gloo ranks, by ``DistributedDataParallel``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.machine import ROOT

RANK = """
import copy, os, sys
import torch
from megatron import swap
from torch.nn.parallel import DistributedDataParallel
from tests.plain_loop import WIDTH, loss_of, mlps
from tests.planned_loop import NUM_STEPS, QUIET, check, unswapped

rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

def batch(number):
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(2 * number + rank))

def train(model, swapped):
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(NUM_STEPS):
        with parallel.no_sync():
            loss_of(parallel(batch(2 * step))).backward()
        loss = loss_of(parallel(batch(2 * step + 1)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if swapped is not None:
            swapped.step()
        if rank == 0:
            with torch.no_grad():
                losses.append(loss_of(model(batch(step))))
    return losses

torch.manual_seed(7)
model = mlps()
_, full_gib = unswapped(model, batch)
copied = copy.deepcopy(model)
expected = train(model, None)
with swap.activations(copied, memory_gib=0.4 * full_gib, **QUIET) as swapped:
    losses = train(copied, swapped)
    check(swapped.stats())
    plans = [None, None]
    torch.distributed.all_gather_object(plans, swapped.plan())
assert all(torch.equal(one, other) for one, other in zip(losses, expected, strict=True))
assert all(map(torch.equal, model.parameters(), copied.parameters()))
assert plans[0] == plans[1]
assert swapped.stats().out_bytes > 0
torch.distributed.destroy_process_group()
print("equal", flush=True)
os._exit(0)  # DistributedDataParallel leaks its group: a thread of gloo's may abort a process that ends normally
"""


@pytest.mark.nightly
def test_two_ranks_follow_one_plan(tmp_path: Path) -> None:
    """Rank 0 also evaluates between steps, whose ends are told."""
    command = [sys.executable, "-c", RANK]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), f"{tmp_path}/store"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env=env,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=100)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(said)
    assert all(text.endswith("equal\n") for text in said)
