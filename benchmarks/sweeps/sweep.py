"""Sweeps: declarative files that say which axis is searched, over which values, with which methods."""

from __future__ import annotations

import math
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.rows import GIB
from benchmarks.runner.request import Request
from benchmarks.suites.budgets import is_relative
from benchmarks.suites.methods import Method, MethodError, parse_method
from benchmarks.suites.suite import DEVICES
from benchmarks.suites.toml_file import (
    SuiteError,
    Table,
    check_names,
    environment,
    file_names,
    find_file,
    number,
    read_table,
    value_of,
)
from benchmarks.sweeps.axes import AXES, Axis, Value, num_params, read_values
from benchmarks.sweeps.forecast import Forecast, Tiers, disk_folder, disk_limit_gib, forecast
from megatron.swap.common.types import UsageError
from megatron.swap.memory.disk_file import SPARE_BYTES
from megatron.swap.planner.flags import read_flags
from megatron.swap.planner.gpus import Gpu

SWEEPS = Path(__file__).with_name("definitions")
FIT = re.compile(r"--swap-optimizer fit\b")
"""The part is chosen by the memory model."""
STEP = 5
PARTS = range(STEP, 101, STEP)
"""Hundredths."""
LEAST_STEPS = 8
"""A quarter of them is compared with another, to see the loss fall."""


@dataclass(frozen=True)
class Trial:
    """A method at one value: a run that can be made."""

    method: Method
    value: Value
    flags: tuple[str, ...]
    forecast: Forecast
    params: int
    """Of the model, by arithmetic."""
    param_bytes: int
    """Of weight, gradient and optimizer state of one parameter, wherever they are."""

    @property
    def label(self) -> str:
        return f"{self.method.name} {self.value.label}"


@dataclass(frozen=True)
class Sweep:
    """A checked sweep file."""

    name: str
    description: str
    axis_name: str
    on_gpu: bool
    values: tuple[Value, ...]
    """From the smallest; their flags are those of a whole run but for the method's."""
    methods: dict[str, str]
    num_warm_up: int
    time_limit_s: float
    """For one run."""
    host_limit_gib: float | None
    """A run is stopped when this much of the machine's memory is in use."""
    env: dict[str, str]

    @property
    def axis(self) -> Axis:
        return AXES[self.axis_name]

    def chosen(self, methods: Sequence[str]) -> Sweep:
        """The same with only these methods (none: all). Raises: ``SuiteError``."""
        check_names("--method", methods, list(self.methods))
        kept = {name: text for name, text in self.methods.items() if not methods or name in methods}
        return replace(self, methods=kept)

    def trial(self, name: str, place: int, tiers: Tiers, gpu: Gpu | None) -> Trial:
        """Method ``name`` at value ``place``.

        Where it leaves open which part of the optimizer's state rests: the smallest that is predicted to fit; where
        none is, the one that leaves most free of the tier that is fullest.

        Raises:
            SuiteError: it leaves it open, and the memory model cannot tell.
        """
        text = self.methods[name]
        if FIT.search(text) is None:
            return self._trial(name, text, place, tiers, gpu)

        def with_part(hundredths: int) -> Trial:
            filled = FIT.sub(f"--swap-optimizer {hundredths / 100:g}", text)
            return self._trial(name, filled, place, tiers, gpu)

        found = {}
        for part in PARTS:
            found[part] = trial = with_part(part)
            if trial.forecast.is_bound or tiers.device is None:
                raise SuiteError(
                    f"{self.name}: method {name!r}: 'fit' needs a prediction, and there is one for dense bf16 models "
                    "of transformer_engine layers on a GPU alone. Give a part, 0 to 1, instead."
                )
            if trial.forecast.fits:
                finer = map(with_part, range(part - STEP + 1, part))
                return next((less for less in finer if less.forecast.fits), trial)
        near = min(found, key=lambda part: found[part].forecast.fullness)
        found.update({part: with_part(part) for part in range(near - STEP + 1, min(near + STEP, 101)) if part != near})
        return min(found.values(), key=lambda trial: trial.forecast.fullness)

    def _trial(self, name: str, text: str, place: int, tiers: Tiers, gpu: Gpu | None) -> Trial:
        value, where = self.values[place], f"{self.name}: {self.values[place].label}"
        method = _method(where, name, text, value, self.on_gpu)
        flags = (*value.flags, *method.piece.flags)
        try:
            predicted = forecast(flags, tiers, gpu, by_flags=method.piece.wrap is None)
            param_bytes = read_flags(flags).states.param_bytes
        except UsageError as error:
            raise SuiteError(f"{where}: method {name!r}: {error}") from error
        return Trial(method, value, flags, predicted, num_params(flags, where), param_bytes)

    def request(self, trial: Trial) -> Request:
        """Return what the process of a run is to do."""
        piece = trial.method.piece
        return Request(
            flags=trial.flags, num_warm_up=self.num_warm_up, env={**self.env, **piece.env}, wrap=piece.wrap,
            requires=piece.requires,
        )  # fmt: skip

    def disk_gib(self, *, assumed: bool = False) -> float:
        """The most that a method may take on disk: what it says, and what is free there; ``assumed``: on some other
        machine, which has what it says."""
        most = 0.0
        for name, text in self.methods.items():
            whole = FIT.sub("--swap-optimizer 1", text)
            flags = _method(self.name, name, whole, self.values[0], self.on_gpu).piece.flags
            folder = disk_folder(flags)
            if folder is not None:
                free = shutil.disk_usage(folder).free - SPARE_BYTES if folder.is_dir() else 0
                limit_gib = disk_limit_gib(flags)
                is_known = assumed and limit_gib < math.inf
                most = max(most, limit_gib if is_known else min(limit_gib, max(0, free) / GIB))
        return most


def sweep_names() -> list[str]:
    return file_names(SWEEPS)


def find_sweep(name: str) -> Path:
    return find_file("sweep", name, SWEEPS)


def load_sweep(path: Path) -> Sweep:
    """Read and check a sweep.

    Raises:
        SuiteError: not TOML, a missing or unknown key, a value of another type, a method that cannot be built.
    """
    top = read_table(path)
    device, axis = top.take("device", str), top.take("axis", str)
    for key, given, allowed in (("device", device, DEVICES), ("axis", axis, tuple(AXES))):
        if given not in allowed:
            raise SuiteError(f"{path.name}: {key} = {given!r}; allowed: {', '.join(allowed)}")
    warm_up = top.take("warm_up", int, default=2, least=2)
    num_steps = top.take("num_steps", int, default=20, least=max(LEAST_STEPS, warm_up + 1))
    flags = (*shlex.split(top.take("flags", str)), "--train-iters", str(num_steps))
    values = read_values(axis, top, flags, top.take("micro_batches", int, least=1))
    sweep = Sweep(
        name=path.stem,
        description=top.take("description", str),
        axis_name=axis,
        on_gpu=device == "gpu",
        values=tuple(values),
        methods=_methods(top, values[0], on_gpu=device == "gpu"),
        num_warm_up=warm_up,
        time_limit_s=top.take("time_limit_s", int, least=1),
        host_limit_gib=top.take("host_limit_gib", int, default=None, least=1),
        env=environment(top.table("env")) if "env" in top.content else {},
    )
    top.refuse_rest()
    return sweep


def _methods(top: Table, value: Value, *, on_gpu: bool) -> dict[str, str]:
    """Names and texts; each is built once, for the first value, so that a wrong one is refused at once."""
    table = top.table("methods")
    found = {name: table.take(name, str) for name in table.content}
    for name, text in found.items():
        method = _method(table.path, name, FIT.sub("--swap-optimizer 1", text), value, on_gpu)
        budgets = [word for word in method.piece.flags if is_relative(word)]
        if budgets:
            raise SuiteError(
                f"{table.path}: method {name!r}: {budgets[0]} is relative to an unswapped run of the same size, which "
                "a sweep need not have: give a number of GiB"
            )
    if not found:
        raise SuiteError(f"{table.path}: no methods")
    return found


def _method(where: str, name: str, text: str, value: Value, on_gpu: bool) -> Method:
    """``{value}`` in its text is the number of the axis, ``{layers}`` the number of layers."""
    num_layers = number(where, value.flags, "--num-layers")
    for word, known in (("{value}", value.number), ("{layers}", num_layers)):
        text = text.replace(word, str(known))
    if "{" in text:
        raise SuiteError(f"{where}: method {name!r}: {text!r}: only {{value}} and {{layers}} are filled in")
    has_te = value_of(where, value.flags, "--transformer-impl") == "transformer_engine"
    try:
        return parse_method(name, text, num_layers=num_layers, has_te=has_te, on_gpu=on_gpu)
    except MethodError as error:
        raise SuiteError(f"{where}: {error}") from error
