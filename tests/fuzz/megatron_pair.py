"""Runs a case of ``megatron_case``: training without swapping, then with each of its plans, compared to the bit."""

import dataclasses
import random
import re
import tempfile
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron.swap.common.plan import LAYER_SECTION, Infeasible, Plan, PlanClass, SitePlan, load_plan, save_plan
from megatron.swap.common.types import GIB
from megatron.swap.engine import offload
from tests.fuzz.megatron_case import BUDGET, FOLDER, MEMORY, PLAN, Case
from tests.fuzz.megatron_training import Data, Trained, World, train
from tests.fuzz.records import difference

Row = dict[str, Any]


class Unequal(Exception):
    """Two trainings differ; the message says in what."""


def run_case(world: World, case: Case) -> Row:
    """Return this rank's row: ``outcome`` is ``equal``, ``skipped`` (upstream fails), ``different`` or ``failed``."""
    with tempfile.TemporaryDirectory() as folder:
        pair = _Pair(world, case, Path(world.gather(folder)[0]))
        row = pair.run()
    row["figures"] = pair.figures
    return row


class _Pair:
    def __init__(self, world: World, case: Case, folder: Path) -> None:
        self._world, self._case, self._folder = world, case, folder
        self._data = Data(case.lengths, case.with_mask)
        self._needed: dict[str, float] = {}
        self._plain: list[Trained] = []
        self.figures: dict[str, float] = {}

    def run(self) -> Row:
        try:
            self._plain = self._phases([""] if not self._case.stop_after else ["", ""], "plain")
            error = trace = ""
        except Exception as failure:
            error = _text(failure)
            trace = traceback.format_exc()
        try:
            errors = [text for text in self._world.gather(error, 20.0 if error else 600.0) if text]
        except torch.distributed.DistStoreError:  # the other ranks wait for this one in upstream's collectives
            return {"outcome": "skipped", "error": error, "restart": True}
        if errors:
            causes = [text for text in errors if not re.search("Connection (closed|reset) by peer", text)]
            return {"outcome": "skipped", "error": (causes or errors)[0], "trace": trace}
        try:
            with mock.patch.object(offload, "COMMIT_BYTES", self._case.commit_bytes):
                self._swapped()
            row = {"outcome": "equal"}
        except Unequal as unequal:
            row = {"outcome": "different", "error": str(unequal)}
        except Exception as failure:
            row = {"outcome": "failed", "error": _text(failure), "trace": traceback.format_exc()}
        self._world.gather(row["outcome"])  # no rank is ahead of the others' folder
        return row

    def _swapped(self) -> None:
        case = self._case
        if case.scarcity:
            self._measure()
        if case.stop_after:
            self._compare(self._phases(list(case.swaps), "swapped"), "resumed")
            return
        for number, swap in enumerate(case.swaps):
            if case.plan == "random" and number:
                self._vary_plan()
            self._compare(self._phases([swap], f"swapped{number}"), f"swapped {number}")

    def _measure(self) -> None:
        limit = " --swap-cpu-memory-gib 4" if MEMORY in " ".join(self._case.swaps) else ""
        flags = f"--swap-summary {self._folder}/measured.json --swap-log-level quiet{limit}"
        (measured,) = self._phases([flags], "measured")
        self._compare([measured], "measured")
        saved = measured.figures["saved_peak_bytes"]
        most = [float(text) for text in self._world.gather(str(saved))]
        self._needed[BUDGET] = (1 - self._case.scarcity) * max(most) / GIB
        self._needed[MEMORY] = (measured.figures["device_peak_bytes"] - self._case.scarcity * saved) / GIB

    def _filled(self, swap: str) -> str:
        for name, gib in self._needed.items():
            swap = swap.replace(name, f"{gib:.9f}")
        return swap.replace(PLAN, str(self._folder / "plan.json")).replace(FOLDER, str(self._folder))

    def _phases(self, swaps: list[str], name: str) -> list[Trained]:
        case, done = self._case, []
        for number, swap in enumerate(swaps):
            flags = f"{case.model} {swap}"
            if len(swaps) > 1:
                folder = self._folder / name
                flags += f" --ckpt-format torch --save {folder} --save-interval 1000"
                flags += f" --load {folder}" if number else f" --exit-interval {case.stop_after}"
            trained = self._train(flags)
            for figure, value in trained.figures.items() if swap else ():
                self.figures[figure] = self.figures.get(figure, 0) + value
            done.append(trained)
        return done

    def _train(self, flags: str) -> Trained:
        """Train with the memory that was asked for; where that cannot suffice, with more."""
        while True:
            try:
                return train(self._world, self._filled(flags), self._data, spec=self._case.spec)
            except Infeasible as error:  # a plan exists from there on
                if self._needed[BUDGET] >= error.smallest_gib:
                    raise
                self._needed[BUDGET] = error.smallest_gib
            except torch.OutOfMemoryError as error:  # of what is no saved tensor
                if "has nothing more to evict" not in str(error) or self._world.num_ranks > 1:
                    raise
                self._needed[MEMORY] *= 1.05

    def _compare(self, trained: list[Trained], name: str) -> None:
        for number, (plain, swapped) in enumerate(zip(self._plain, trained, strict=True)):
            if line := difference(plain.record, swapped.record):
                raise Unequal(f"{name}, phase {number}: {line}")

    def _vary_plan(self) -> None:
        path = self._folder / "plan.json"
        if self._world.rank == 0:
            save_plan(varied(load_plan(path), random.Random(self._case.seed)), path)
        self._world.gather("")


def varied(plan: Plan, choose: random.Random) -> Plan:
    classes = []
    actions = choose.choices(("keep", "swap", "recompute"), k=6)
    for layer in plan.layers():
        if choose.random() < 0.15:
            continue
        sites = {site: SitePlan(choose.choice(actions)) for site in plan.planned(layer) if choose.random() < 0.9}
        classes.append(PlanClass(str(layer), sites, (LAYER_SECTION,) if choose.random() < 0.15 else ()))
    window = choose.choice([None, None, 1e-6, 1e-5])
    return dataclasses.replace(plan, classes=tuple(classes), prefetch_gib=window)


def _text(error: BaseException) -> str:
    text = str(error) or traceback.extract_tb(error.__traceback__)[-1].line  # an assertion without a message
    return f"{type(error).__name__}: {text}"
