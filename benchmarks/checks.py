"""What it costs that layers which run again are compared with their forward.

    python -m benchmarks.checks fingerprint
    python -m benchmarks.checks transformers --layers 16 --tokens 8192 --method 29.4
    python -m benchmarks.checks megatron FLAGS OF pretrain_gpt_swap.py

One process trains under one plan. The comparisons are on for some steps, off for as many, on again, and so on. Each of
these rows of steps ends with an idle GPU. The last line is JSON: the times of a step in each row, their medians and the
ratio.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks import any_model, machine
from benchmarks.training_loop import DEVICE, plan_of, settle, synchronize, timed
from megatron.swap.engine.checksum import fingerprint
from megatron.swap.engine.layer_state import StateReader
from megatron.swap.engine.recomputed_run import RunChecks
from megatron.swap.engine.saved_tensors import SavedTensors

STEPS = 5
"""In a row, on, then off. Steps of a row run as in training: the host is ahead of the GPU."""
ROUNDS = 6
WARM_UP = 12
"""Steps of Megatron's trainer before the first change; its plan is given."""


class Switch:
    """Turns the comparisons of this process on and off, and keeps the times of steps."""

    def __init__(self) -> None:
        self.is_on = True
        self.times: dict[bool, list[float]] = {True: [], False: []}
        self._began = 0.0
        self._place = 0
        nothing = lambda *_: None  # noqa: E731
        checks = [(StateReader, "read"), *((RunChecks, name) for name in ("print_in_turn", "before_step", "read"))]
        for owner, name in checks:
            mock.patch.object(owner, name, self._either(getattr(owner, name), nothing)).start()
        checked = self._either(SavedTensors.checked_run, lambda *_, **__: lambda function, *args, **kwargs: function(
            *args, **kwargs))  # fmt: skip
        mock.patch.object(SavedTensors, "checked_run", checked).start()

    def _either(self, on: Callable[..., Any], off: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (on if self.is_on else off)(*args, **kwargs)

    def step_ended(self) -> bool:
        """Note that a step has ended, and after some take their time. Return whether all are taken."""
        self._place += 1
        if self._place % (STEPS + 1) == 1:  # the first one is not counted
            synchronize()
            self._began = time.perf_counter()
        elif self._place % (STEPS + 1) == 0:
            synchronize()
            self.times[self.is_on].append(round(1e3 * (time.perf_counter() - self._began) / STEPS, 3))
            self.is_on = not self.is_on
        return self._place == 2 * ROUNDS * (STEPS + 1)

    def row(self) -> dict[str, Any]:
        on, off = self.times[True], self.times[False]
        ratios = [one / other for one, other in zip(on, off, strict=True)]
        row = {"on_ms": statistics.median(on), "off_ms": statistics.median(off)}
        row |= {"ratio": round(statistics.median(ratios), 5), "ratio_of_means": round(sum(on) / sum(off), 5)}
        return {**row, "times_on_ms": on, "times_off_ms": off}


def of_fingerprint(arguments: list[str]) -> dict[str, Any]:
    """Return the time that a fingerprint of some sizes takes on the device."""
    row = {}
    for mib in (1, 16, 128, 235) if DEVICE == "cuda" else (1,):
        tensor = torch.randn(mib << 19, device=DEVICE).bfloat16()
        timed(lambda tensor=tensor: fingerprint(tensor), 3)  # type: ignore[misc]
        row[f"{mib}_mib_ms"] = round(timed(lambda tensor=tensor: fingerprint(tensor), 50), 4)  # type: ignore[misc]
    return row


def of_transformers(arguments: list[str]) -> dict[str, Any]:
    """Return the row of ``benchmarks.any_model`` with a budget."""
    options = any_model.parser().parse_args(arguments)
    step, swapped = any_model.training_step(options, options.method)
    settle(step, swapped, 0)
    switch = Switch()
    step()
    while not switch.step_ended():
        step()
    row = {**vars(options), **plan_of(swapped), **switch.row()}
    whole = swapped.plan().count("recomputed as a whole")
    swapped.close()
    return {**row, "classes_recomputed_whole": whole}


def of_megatron(arguments: list[str]) -> dict[str, Any]:
    """Return the row of Megatron's trainer with flags."""
    import pretrain_gpt_swap

    steps, switch = 0, Switch()

    def stepped(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps > WARM_UP:
            switch.step_ended()

    register_optimizer_step_post_hook(stepped)
    iterations = WARM_UP + 2 * ROUNDS * (STEPS + 1)
    sys.argv = ["pretrain_gpt_swap.py", *arguments, "--train-iters", str(iterations)]
    pretrain_gpt_swap.main()
    return {"flags": arguments, **switch.row()}


def main() -> None:
    kind, *arguments = sys.argv[1:]
    rows = {"fingerprint": of_fingerprint, "transformers": of_transformers, "megatron": of_megatron}
    print(json.dumps({"kind": kind, **machine.facts(), **rows[kind](arguments)}), flush=True)


if __name__ == "__main__":
    main()
