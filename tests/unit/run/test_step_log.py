"""The records of steps: what a long run keeps of each."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.swap.common.counters import Counters
from megatron.swap.common.settings import Settings
from megatron.swap.engine.oom_guard import Rescue
from megatron.swap.run.console import Console
from megatron.swap.run.step_log import NUM_UNREAD, StepLog


class Run:
    """A run of two layers. Rescues and retries are those of the test."""

    def __init__(self, summary: str | None) -> None:
        self.counters = Counters()
        self.rescues: list[Rescue] = []
        self.num_retries = 0
        self.manager: Any = SimpleNamespace(counters=self.counters, guard=SimpleNamespace(take_rescues=self.take))
        self.device: Any = SimpleNamespace(take_retries=lambda: self.num_retries)
        self.log = StepLog(Settings(summary=summary), Console("quiet", 0, 1))
        self.number = 0

    def take(self) -> list[Rescue]:
        taken, self.rescues = self.rescues, []
        return taken

    def step(self, loss: float = 0.5) -> None:
        self.number += 1
        for layer in range(2):
            self.counters.layers[layer].out_bytes += 10 * (layer + 1)
        self.log.take(self.number, {"lm loss": torch.tensor([loss])}, 1.0, self.device, self.manager)


def test_without_a_summary_the_sums_and_the_last_step_are_kept() -> None:
    run = Run(None)
    for number in range(5):
        run.num_retries = 2 if number in (1, 3) else 0
        run.step()
    earlier, last = run.log.records
    assert (earlier.iteration, last.iteration) == (4, 5)
    assert earlier.moved.layers == {0: (40, 0), 1: (80, 0)}
    assert last.moved.layers == {0: (10, 0), 1: (20, 0)}
    assert (earlier.num_alloc_retries, earlier.num_full, last.num_full) == (4, 2, 0)
    assert earlier.num_rescues == 0


@pytest.mark.parametrize("num_steps", [3, NUM_UNREAD + 5])
def test_with_a_summary_every_step_is_kept_and_its_loss_is_the_same_to_the_bit(num_steps: int) -> None:
    run = Run("summary.json")
    losses = torch.rand(num_steps, generator=torch.Generator().manual_seed(1)).tolist()
    for loss in losses:
        run.step(loss)
    records = run.log.records
    assert [record.iteration for record in records] == list(range(1, num_steps + 1))
    assert [float(record.loss) for record in records] == losses
    assert {record.moved.out_bytes for record in records} == {30}
    assert records[-1].moved.layers == {0: (10, 0), 1: (20, 0)}
    assert sum(isinstance(record.loss, torch.Tensor) for record in records) <= NUM_UNREAD
