"""Suites: declarative files that say which cases are run with which methods, how often."""

from __future__ import annotations

import itertools
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proof.bench.methods import Method, MethodError, parse_method
from proof.run.request import Request

SUITES = Path(__file__).with_name("suites")
DEVICES = ("cpu", "gpu")
TIMING = {"warm_up": 2, "timed": 1, "rounds": 1}
"""Keys of a suite that a case may override, and the least value of each."""
_MISSING: Any = object()


class SuiteError(ValueError):
    """A suite, or a choice from it, that cannot be run; the message names file and key."""


@dataclass(frozen=True)
class Case:
    """One model and batch, and the methods that it is run with."""

    name: str
    flags: tuple[str, ...]
    rounds: int
    num_warm_up: int
    timed_limit_s: float | None
    methods: tuple[Method, ...]

    def request(self, method: Method) -> Request:
        return Request(
            flags=(*self.flags, *method.piece.flags),
            num_warm_up=self.num_warm_up,
            timed_limit_s=self.timed_limit_s,
            env=method.piece.env,
            wrap=method.piece.wrap,
            requires=method.piece.requires,
            has_phases=method.runs_layers_once,
        )


@dataclass(frozen=True)
class Suite:
    """A checked suite file."""

    name: str
    description: str
    on_gpu: bool
    time_limit_s: float
    """For one run, from its first step's preparation to its end."""
    host_limit_gib: float | None
    """A run is stopped when this much of the machine's memory is in use."""
    cases: tuple[Case, ...]

    def chosen(self, cases: Sequence[str], methods: Sequence[str], rounds: int | None) -> Suite:
        """The same with only these cases and methods (empty: all), and this number of rounds.

        Raises:
            SuiteError: a name that the suite does not have, or no round at all.
        """
        if rounds is not None and rounds < 1:
            raise SuiteError(f"--rounds {rounds}: at least 1")
        _check_names("--case", cases, [case.name for case in self.cases])
        kept = [case for case in self.cases if not cases or case.name in cases]
        _check_names("--method", methods, list(dict.fromkeys(m.name for case in kept for m in case.methods)))
        chosen = tuple(
            Case(
                case.name, case.flags, rounds or case.rounds, case.num_warm_up, case.timed_limit_s,
                tuple(method for method in case.methods if not methods or method.name in methods),
            )
            for case in kept
        )  # fmt: skip
        return Suite(
            self.name, self.description, self.on_gpu, self.time_limit_s, self.host_limit_gib,
            tuple(case for case in chosen if case.methods),
        )  # fmt: skip


def suite_names() -> list[str]:
    return sorted(path.stem for path in SUITES.glob("*.toml"))


def find_suite(name: str) -> Path:
    """The file of a suite: one of ours by name, or any by its path."""
    path = Path(name) if name.endswith(".toml") else SUITES / f"{name}.toml"
    if not path.is_file():
        raise SuiteError(f"--suite {name}: no such suite; there are {', '.join(suite_names())}, or give a .toml file")
    return path


def load_suite(path: Path) -> Suite:
    """Read and check a suite.

    Raises:
        SuiteError: not TOML, a missing or unknown key, a value of another type, a method that cannot be built.
    """
    try:
        content = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SuiteError(f"{path.name}: not TOML: {error}") from error
    top = _Table(path.name, content)
    device = top.take("device", str)
    if device not in DEVICES:
        raise SuiteError(f"{path.name}: device = {device!r}; allowed: {' or '.join(DEVICES)}")
    flags, methods = top.take("flags", str), top.table("methods")
    timing = {key: top.take(key, int, least=least) for key, least in TIMING.items()}
    timed_limit_s = top.take("timed_limit_s", int, default=None, least=1)
    on_gpu = device == "gpu"
    cases = [
        _case(name, top.table("cases").table(name), flags, dict(methods.content), timing, timed_limit_s, on_gpu)
        for name in top.table("cases").content
    ]
    if not cases:
        raise SuiteError(f"{path.name}: no [cases.NAME]")
    suite = Suite(
        name=path.stem,
        description=top.take("description", str),
        on_gpu=on_gpu,
        time_limit_s=top.take("time_limit_s", int, least=1),
        host_limit_gib=top.take("host_limit_gib", int, default=None, least=1),
        cases=tuple(cases),
    )
    top.refuse_rest("cases", "methods")
    return suite


def _case(
    name: str, table: _Table, common: str, methods: dict[str, Any], timing: dict[str, int],
    timed_limit_s: float | None, on_gpu: bool,
) -> Case:  # fmt: skip
    words = shlex.split(f"{common} {table.take('flags', str)}")
    micro_batches = table.take("micro_batches", int, least=1)
    timing = {key: table.take(key, int, default=value, least=TIMING[key]) for key, value in timing.items()}
    own = table.table("methods").content if "methods" in table.content else {}
    left_out = table.take("without", list, default=[])
    _check_names(f"{table.path}: without", left_out, list(methods))
    table.refuse_rest("methods")
    num_layers = _number(table.path, words, "--num-layers")
    batch = micro_batches * _number(table.path, words, "--micro-batch-size")
    num_steps = timing["warm_up"] + timing["timed"]
    words += ["--global-batch-size", str(batch), "--train-iters", str(num_steps)]
    has_te = _value(table.path, words, "--transformer-impl") == "transformer_engine"
    built = []
    for method, text in {**{key: text for key, text in methods.items() if key not in left_out}, **own}.items():
        if not isinstance(text, str):
            raise SuiteError(f"{table.path}: method {method!r} is {text!r}, not a string")
        try:
            built.append(parse_method(method, text, num_layers=num_layers, has_te=has_te, on_gpu=on_gpu))
        except MethodError as error:
            raise SuiteError(f"{table.path}: {error}") from error
    if not built:
        raise SuiteError(f"{table.path}: no methods, neither in [methods] nor its own")
    return Case(name, tuple(words), timing["rounds"], timing["warm_up"], timed_limit_s, tuple(built))


class _Table:
    """A table of the file that knows where it stands, and which keys were asked for."""

    def __init__(self, path: str, content: dict[str, Any]) -> None:
        self.path = path
        self.content = content
        self._taken: set[str] = set()

    def take(self, key: str, kind: type[Any], default: Any = _MISSING, least: int | None = None) -> Any:
        self._taken.add(key)
        value = self.content.get(key, default)
        if value is _MISSING:
            raise SuiteError(f"{self.path}: key {key!r} is missing")
        if value is default:
            return value
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise SuiteError(f"{self.path}: {key} = {value!r}; expected: {kind.__name__}")
        if least is not None and value < least:
            raise SuiteError(f"{self.path}: {key} = {value!r}; at least {least}")
        return value

    def table(self, key: str) -> _Table:
        return _Table(f"{self.path}: [{key}]", self.take(key, dict))

    def refuse_rest(self, *tables: str) -> None:
        unknown = sorted(set(self.content) - self._taken - set(tables))
        if unknown:
            allowed = ", ".join(sorted(self._taken | set(tables)))
            raise SuiteError(f"{self.path}: unknown key {unknown[0]!r}; allowed: {allowed}")


def _value(where: str, words: Sequence[str], flag: str) -> str:
    """The last value of a flag, as Megatron's parser takes it."""
    values = [value for name, value in itertools.pairwise(words) if name == flag]
    if not values:
        raise SuiteError(f"{where}: the flags have no {flag}")
    return values[-1]


def _number(where: str, words: Sequence[str], flag: str) -> int:
    value = _value(where, words, flag)
    if not value.isdecimal() or int(value) < 1:
        raise SuiteError(f"{where}: {flag} {value}: a whole number from 1 on is expected")
    return int(value)


def _check_names(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise SuiteError(f"{what} {unknown[0]}: not in this suite; there are {', '.join(known)}")
