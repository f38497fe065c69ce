"""Suites: TOML files that declare cases, the methods to run them with, and the number of rounds."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.rows import PEAKS
from benchmarks.runner.request import NotReady, Request
from benchmarks.runner.schedule import length_at
from benchmarks.suites.budgets import Memory, resolved
from benchmarks.suites.losses import REPEAT
from benchmarks.suites.methods import Method, parse_method
from benchmarks.suites.toml_file import SuiteError, Table, check_names, environment, file_names, number, read_table

SUITES = Path(__file__).with_name("definitions")
DEVICES = ("cpu", "gpu")
TIMING = {"warm_up": 2, "timed": 1, "rounds": 1}
"""Keys of a suite that a case may override, and the least value of each. ``warm_up_auto``, for methods that search for
their plan, is another; its default is ``warm_up``."""
REFERENCE = "none"  # The reference of losses and of relative budgets


@dataclass(frozen=True)
class Case:
    name: str
    flags: tuple[str, ...]
    num_steps: int  # `--train-iters`: the steps of the longest method
    rounds: int
    num_warm_up: int
    num_warm_up_auto: int
    num_timed: int
    timed_limit_s: float | None
    env: dict[str, str]
    peak: str  # The peak that counts, a key of `PEAKS`
    sequence_schedule: tuple[tuple[int, int], ...]
    methods: tuple[Method, ...]

    def flags_of(self, method: Method, memory: Memory | None) -> tuple[str, ...]:
        path = method.plan_file
        if path is not None and not (ROOT / path).is_file():
            raise NotReady(
                f"{path} is not there. A prediction is committed before its run: "
                f"python tools/plan.py --profile PROFILE --memory-gib N --save {path}"
            )
        return (*self.flags, *resolved(method.piece.flags, memory, REFERENCE))

    def request(self, method: Method, memory: Memory | None = None) -> Request:
        num_warm_up = self.num_warm_up_auto if method.searches else self.num_warm_up
        num_steps = num_warm_up + self.num_timed
        # All losses are compared with the reference, and the noise is taken from its repeat. Noise grows with every
        # step, so these two make as many steps as the longest method.
        goes_on = method.name in (REFERENCE, REPEAT) and num_steps < self.num_steps
        return Request(
            flags=self.flags_of(method, memory), num_warm_up=num_warm_up,
            num_timed=None if goes_on or num_steps == self.num_steps else self.num_timed,
            timed_limit_s=None if goes_on else self.timed_limit_s, env={**self.env, **method.piece.env},
            wrap=method.piece.wrap, requires=method.piece.requires, has_phases=method.runs_layers_once,
            observes=self.peak == "saved", sequence_schedule=self.sequence_schedule,
        )  # fmt: skip


@dataclass(frozen=True)
class Suite:
    name: str
    description: str
    on_gpu: bool
    time_limit_s: float  # Time limit of one run, from the preparation of its first step to its end
    host_limit_gib: float | None
    """A run is stopped when this much of the machine's host memory is in use; `None`: no limit."""
    cases: tuple[Case, ...]

    def chosen(self, cases: Sequence[str], methods: Sequence[str], rounds: int | None) -> Suite:
        if rounds is not None and rounds < 1:
            raise SuiteError(f"--rounds {rounds}: at least 1")
        check_names("--case", cases, [case.name for case in self.cases])
        kept = [case for case in self.cases if not cases or case.name in cases]
        check_names("--method", methods, list(dict.fromkeys(m.name for case in kept for m in case.methods)))
        chosen = []
        for case in kept:
            mine = tuple(method for method in case.methods if not methods or method.name in methods)
            chosen += [replace(case, rounds=rounds or case.rounds, methods=mine)] if mine else []
        return replace(self, cases=tuple(chosen))


def suite_names() -> list[str]:
    return file_names(SUITES)


def load_suite(given: str) -> Suite:
    name, top = read_table("suite", given, SUITES)
    device = top.choose("device", DEVICES)
    peak = top.choose("peak", PEAKS, default="saved" if device == "cpu" else "allocated")
    if device == "cpu" and peak != "saved":
        raise SuiteError(f"{top.path}: peak = {peak!r} needs a GPU; with device = 'cpu' saved tensors are counted")
    timing = {key: top.take(key, int, least=least) for key, least in TIMING.items()}
    common = _Common(
        flags=top.take("flags", str), methods=dict(top.table("methods").content), timing=timing,
        warm_up_auto=top.take("warm_up_auto", int, default=timing["warm_up"], least=TIMING["warm_up"]),
        timed_limit_s=top.take("timed_limit_s", int, default=None, least=1), env=environment(top), peak=peak,
        on_gpu=device == "gpu",
    )  # fmt: skip
    cases = [_case(name, top.table("cases").table(name), common) for name in top.table("cases").content]
    if not cases:
        raise SuiteError(f"{top.path}: no [cases.NAME]")
    suite = Suite(
        name=name, description=top.take("description", str), on_gpu=common.on_gpu,
        time_limit_s=top.take("time_limit_s", int, least=1),
        host_limit_gib=top.take("host_limit_gib", int, default=None, least=1), cases=tuple(cases),
    )  # fmt: skip
    top.refuse_rest("cases", "methods", "env")
    return suite


@dataclass(frozen=True)
class _Common:
    flags: str
    methods: dict[str, Any]
    timing: dict[str, int]
    warm_up_auto: int
    timed_limit_s: float | None
    env: dict[str, str]
    peak: str
    on_gpu: bool


def _case(name: str, table: Table, common: _Common) -> Case:
    words = shlex.split(f"{common.flags} {table.take('flags', str)}")
    micro_batches = table.take("micro_batches", int, least=1)
    timing = {key: table.take(key, int, default=value, least=TIMING[key]) for key, value in common.timing.items()}
    warm_up_auto = table.take("warm_up_auto", int, default=common.warm_up_auto, least=TIMING["warm_up"])
    warm_up_auto = max(warm_up_auto, timing["warm_up"])
    schedule = _schedule(table, words)
    env = common.env | environment(table)
    methods = _methods(table, words, common)
    batch = micro_batches * number(table.path, words, "--micro-batch-size")
    searches = any(method.searches for method in methods)
    num_steps = (warm_up_auto if searches else timing["warm_up"]) + timing["timed"]
    words += ["--global-batch-size", str(batch), "--train-iters", str(num_steps)]
    if schedule and len({length_at(schedule, step) for step in range(timing["warm_up"] + 1, num_steps + 1)}) > 1:
        raise SuiteError(
            f"{table.path}: steps {timing['warm_up'] + 1} to {num_steps} are timed and have sequences of several "
            "lengths: choose warm_up and timed so that they fall into one stretch of sequence_schedule"
        )
    return Case(
        name, tuple(words), num_steps, timing["rounds"], timing["warm_up"], warm_up_auto, timing["timed"],
        common.timed_limit_s, env, common.peak, schedule, methods,
    )  # fmt: skip


def _methods(table: Table, words: Sequence[str], common: _Common) -> tuple[Method, ...]:
    left_out = table.take("without", list, default=[])
    check_names(f"{table.path}: without", left_out, list(common.methods))
    texts = {key: text for key, text in common.methods.items() if key not in left_out}
    texts |= table.table("methods").content if "methods" in table.content else {}
    table.refuse_rest("methods", "env")
    for method, text in texts.items():
        if not isinstance(text, str):
            raise SuiteError(f"{table.path}: method {method!r} is {text!r}, not a string")
    if not texts:
        raise SuiteError(f"{table.path}: no methods, neither in [methods] nor its own")
    return tuple(parse_method(table.path, name, text, words, on_gpu=common.on_gpu) for name, text in texts.items())


def _schedule(table: Table, words: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Read ``sequence_schedule = [[50, 4096], [50, 2048]]``: numbers of steps and their sequence lengths, repeated."""
    given = table.take("sequence_schedule", list, default=[])
    longest = number(table.path, words, "--seq-length") if given else 0
    for part in given:
        is_pair = isinstance(part, list) and len(part) == 2
        if not is_pair or part[0] < 1 or not 1 <= part[1] <= longest:
            raise SuiteError(f"{table.path}: sequence_schedule has {part!r}; steps and a length up to the "
                             f"--seq-length, {longest}, are expected")  # fmt: skip
    return tuple((num_steps, length) for num_steps, length in given)
