"""Sweeps: TOML files that declare an axis, its values and the methods to search with."""

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
from benchmarks.suites.methods import Method, parse_method
from benchmarks.suites.suite import DEVICES
from benchmarks.suites.toml_file import SuiteError, Table, check_names, environment, file_names, number, read_table
from benchmarks.sweeps.axes import AXES, Axis, Value, num_params, read_values
from benchmarks.sweeps.forecast import Forecast, Tiers, disk_folder, disk_limit_gib, forecast
from megatron.swap.common.types import UsageError
from megatron.swap.forecast.flags import read_flags
from megatron.swap.forecast.gpus import Gpu
from megatron.swap.memory.disk_file import SPARE_BYTES

SWEEPS = Path(__file__).with_name("definitions")
FIT = re.compile(r"--swap-optimizer fit\b")  # The memory model chooses the offload fraction
STEP_PERCENT = 5
FRACTIONS_PERCENT = range(STEP_PERCENT, 101, STEP_PERCENT)
LEAST_STEPS = 4  # The first quarter of the steps is compared with the last to see whether the loss falls


@dataclass(frozen=True)
class Trial:
    method: Method
    value: Value
    flags: tuple[str, ...]
    forecast: Forecast
    params: int  # Parameters of the model, by arithmetic
    param_bytes: int  # Bytes of weight, gradient and optimizer state per parameter, on all tiers together

    @property
    def label(self) -> str:
        return f"{self.method.name} {self.value.label}"

    @property
    def requires(self) -> tuple[str, ...]:
        return self.method.piece.requires


@dataclass(frozen=True)
class Sweep:
    name: str
    description: str
    axis_name: str
    on_gpu: bool
    values: tuple[Value, ...]  # Values in rising order; their flags are complete except for the method's
    methods: dict[str, str]
    num_warm_up: int
    time_limit_s: float  # Time limit of one run
    host_limit_gib: float | None
    """A run is stopped when this much of the machine's host memory is in use; ``None``: no limit."""
    env: dict[str, str]

    @property
    def axis(self) -> Axis:
        return AXES[self.axis_name]

    def chosen(self, methods: Sequence[str]) -> Sweep:
        check_names("--method", methods, list(self.methods))
        kept = {name: text for name, text in self.methods.items() if not methods or name in methods}
        return replace(self, methods=kept)

    def trial(self, name: str, place: int, tiers: Tiers, gpu: Gpu | None) -> Trial:
        text = self.methods[name]
        if FIT.search(text) is None:
            return self._trial(name, text, place, tiers, gpu)

        def with_fraction(percent: int) -> Trial:
            filled = FIT.sub(f"--swap-optimizer {percent / 100:g}", text)
            return self._trial(name, filled, place, tiers, gpu)

        found = {}
        for percent in FRACTIONS_PERCENT:
            found[percent] = trial = with_fraction(percent)
            if trial.forecast.is_bound or tiers.device is None:
                raise SuiteError(
                    f"{self.name}: method {name!r}: 'fit' needs a prediction, which exists only for dense bf16 models "
                    "of transformer_engine layers on a GPU. Give a fraction, 0 to 1, instead."
                )
            if trial.forecast.fits:
                finer = map(with_fraction, range(percent - STEP_PERCENT + 1, percent))
                return next((less for less in finer if less.forecast.fits), trial)
        near = min(found, key=lambda percent: found[percent].forecast.fullness)
        finer_percent = range(near - STEP_PERCENT + 1, min(near + STEP_PERCENT, 101))
        found.update({percent: with_fraction(percent) for percent in finer_percent if percent != near})
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
        piece = trial.method.piece
        return Request(
            flags=trial.flags, num_warm_up=self.num_warm_up, env={**self.env, **piece.env}, wrap=piece.wrap,
            requires=piece.requires,
        )  # fmt: skip

    def disk_gib(self, *, assumed: bool = False) -> float:
        most = 0.0
        for name, text in self.methods.items():
            whole = FIT.sub("--swap-optimizer 1", text)
            flags = _method(self.name, name, whole, self.values[0], self.on_gpu).piece.flags
            folder, limit_gib = disk_folder(flags), disk_limit_gib(flags)
            if folder is not None:
                free = max(0, shutil.disk_usage(folder).free - SPARE_BYTES) / GIB if folder.is_dir() else 0.0
                most = max(most, limit_gib if assumed and limit_gib < math.inf else min(limit_gib, free))
        return most


def sweep_names() -> list[str]:
    return file_names(SWEEPS)


def load_sweep(given: str) -> Sweep:
    name, top = read_table("sweep", given, SWEEPS)
    on_gpu, axis = top.choose("device", DEVICES) == "gpu", top.choose("axis", AXES)
    warm_up = top.take("warm_up", int, default=2, least=2)
    num_steps = top.take("num_steps", int, default=20, least=max(LEAST_STEPS, warm_up + 1))
    flags = (*shlex.split(top.take("flags", str)), "--train-iters", str(num_steps))
    values = read_values(axis, top, flags, top.take("micro_batches", int, least=1))
    sweep = Sweep(
        name=name, description=top.take("description", str), axis_name=axis, on_gpu=on_gpu, values=tuple(values),
        methods=_methods(top, values[0], on_gpu=on_gpu), num_warm_up=warm_up,
        time_limit_s=top.take("time_limit_s", int, least=1),
        host_limit_gib=top.take("host_limit_gib", int, default=None, least=1), env=environment(top),
    )  # fmt: skip
    top.refuse_rest("env")
    return sweep


def _methods(top: Table, value: Value, *, on_gpu: bool) -> dict[str, str]:
    """Return names and texts. Each method is built once, for the first value, so that errors show at once."""
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
    """Build a method; ``{value}`` in its text is the value's number, ``{layers}`` the number of layers."""
    num_layers = number(where, value.flags, "--num-layers")
    for word, known in (("{value}", value.number), ("{layers}", num_layers)):
        text = text.replace(word, str(known))
    if "{" in text:
        raise SuiteError(f"{where}: method {name!r}: {text!r}: only {{value}} and {{layers}} are filled in")
    return parse_method(where, name, text, value.flags, on_gpu=on_gpu)
