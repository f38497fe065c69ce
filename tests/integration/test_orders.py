"""The order of all copies, waits, allocations and releases of the real trainer, on a lazy device: as the goldens say.

::

    PYTHONPATH=. python -m tests.integration.test_orders FOLDER    # writes the goldens anew; the logs are in FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron.swap.common.plan import PlanClass, save_plan
from tests.integration.harness import SWAP_SMALL, Trainer, Zygote
from tests.integration.rows import DROPOUT, MIXED, MOE, plan_for
from tests.logged_device import digest, goldens, write

PROGRAM = Path(__file__).with_name("orders_script.py")
EVEN = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
"""All experts get as many tokens, whatever a router computes on this machine."""
PIPELINE = "--pipeline-model-parallel-size 2 --global-batch-size 8"


class Case(NamedTuple):
    flags: str
    ranks: int = 1
    plan: tuple[PlanClass, ...] = ()


CASES = {
    "trainer: all layers": Case("--swap-layers all"),
    "trainer: pipeline": Case(f"{PIPELINE} --swap-layers all", 2),
    "trainer: chunks": Case(f"{PIPELINE} --num-virtual-stages-per-pipeline-rank 2 --swap-layers all", 2),
    "trainer: a plan": Case(f"--bf16 {DROPOUT}", plan=MIXED),
    "trainer: experts": Case(f"{MOE} {EVEN} --swap-layers all"),
    "trainer: optimizer on disk": Case("--swap-optimizer 1 --swap-disk-dir . --swap-disk-gib 1 --swap-host-gib 0.02"),
    "trainer: half of the optimizer, bf16": Case(f"--bf16 {DROPOUT} --swap-layers all --swap-optimizer 0.5"),
    "trainer: optimizer, distributed": Case("--use-distributed-optimizer --swap-optimizer 1", 2),
}

IN_THE_SHORT_RUN = ("trainer: pipeline", "trainer: half of the optimizer, bf16")


def logs(trainer: Any, folder: Path, case: Case) -> list[list[str]]:
    """Return the logs of all ranks."""
    flags = f"{SWAP_SMALL} {case.flags}"
    if case.plan:
        save_plan(plan_for(case.flags, *case.plan), folder / "plan.json")
        flags += f" --swap-plan {folder / 'plan.json'}"
    run = trainer.run(flags, ranks=case.ranks, program=PROGRAM)
    assert run.returncode == 0, run.tail
    return [(run.directory / f"orders-{rank}.log").read_text().splitlines() for rank in range(case.ranks)]


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.short if name in IN_THE_SHORT_RUN else ()) for name in CASES
])  # fmt: skip
def test_the_order_is_as_it_was(trainer: Trainer, tmp_path: Path, name: str) -> None:
    found = logs(trainer, tmp_path, CASES[name])
    assert all(any(" copies " in line for line in log) for log in found)
    assert [digest(log) for log in found] == goldens()[name], f"python -m {__name__} FOLDER, in both trees"


if __name__ == "__main__":
    made = {}
    with Zygote() as zygote:
        for number, (name, case) in enumerate(CASES.items()):
            here = Path(sys.argv[1]).resolve() / str(number)
            here.mkdir(parents=True, exist_ok=True)
            made[name] = [digest(log) for log in logs(Trainer(zygote, here, here), here, case)]
            print(name, made[name])
    write(made)
