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
from megatron import swap
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks import any_model, machine
from benchmarks.training_loop import DEVICE, SETTINGS, loss_of, model_of, plan_of, settle, synchronize
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
        for owner, name, off in (
            (StateReader, "read", lambda *_: None),
            (SavedTensors, "checked_run", lambda *_, **__: _unchecked),
            (RunChecks, "print_in_turn", lambda *_: None),
            (RunChecks, "before_step", lambda *_: None),
            (RunChecks, "read", lambda *_: None),
        ):
            mock.patch.object(owner, name, self._either(getattr(owner, name), off)).start()

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


def _unchecked(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def of_fingerprint() -> dict[str, Any]:
    """Return the time that a fingerprint of some sizes takes on the device."""
    row = {}
    for mib in (1, 16, 128, 235) if DEVICE == "cuda" else (1,):
        tensor = torch.randn(mib << 19, device=DEVICE).bfloat16()
        for _ in range(3):
            fingerprint(tensor)
        synchronize()
        began = time.perf_counter()
        for _ in range(50):
            fingerprint(tensor)
        synchronize()
        row[f"{mib}_mib_ms"] = round(1e3 * (time.perf_counter() - began) / 50, 4)
    return row


def of_transformers(arguments: list[str]) -> dict[str, Any]:
    """Return the row of ``benchmarks.any_model`` with a budget."""
    options = any_model.parser().parse_args(arguments)
    model = model_of(options, torch.bfloat16).train()
    swapped = swap.activations(model.model, memory_gib=float(options.method), **SETTINGS)
    assert isinstance(swapped, swap.PlannedActivations)
    tokens = torch.randint(options.vocab_size, (1, options.tokens), device=DEVICE)

    mask: dict[str, Any] = {"attention_mask": {"full_attention": None}} if options.prepared_mask else {}

    def step() -> None:
        hidden = model.model(input_ids=tokens, use_cache=False, **mask).last_hidden_state
        loss_of(model.lm_head, hidden, tokens).backward()
        model.zero_grad(set_to_none=False)
        swapped.step()

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
    rows: dict[str, Callable[[], dict[str, Any]]] = {
        "fingerprint": of_fingerprint,
        "transformers": lambda: of_transformers(arguments),
        "megatron": lambda: of_megatron(arguments),
    }
    print(json.dumps({"kind": kind, **machine.facts(), **rows[kind]()}), flush=True)


if __name__ == "__main__":
    main()
