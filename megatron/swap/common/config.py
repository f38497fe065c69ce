"""The settings of one run: checked once, then immutable."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.swap.common.layer_ranges import parse_ranges
from megatron.swap.common.plan import Plan
from megatron.swap.common.types import GIB, MOST, PRODUCERS, UsageError, is_within

LAYER_SYNTAX = "0-23 | 0,4-7 | every:2 | all | none"
LOG_LEVELS = ("quiet", "info", "debug")
POLICIES = ("manual", "auto")
MOST_CANDIDATES = 10
MOST_LOSS_CHUNKS = 1024
MOST_DELAY_MS = 1000
"""Each copy is delayed by up to that long, and a step makes hundreds."""
USUAL_FRACTION = 0.95
"""Budget of ``--swap-policy auto`` without other flags, as a fraction of the device's memory."""


@dataclass(frozen=True)
class SwapConfig:
    """The user's settings. ``None`` leaves the choice to the package.

    Raises:
        UsageError: a value is out of its range; the message names the flag.
    """

    layers: frozenset[int]
    """Layers (0-based, over the whole model) whose activations are swapped."""
    modules: tuple[str, ...] = ()
    """Submodules to swap; empty: everything that a chosen layer saves."""
    recompute: tuple[str, ...] = ()
    """Producers whose outputs are recomputed in backward, in all layers; some of ``PRODUCERS``."""
    plan: Plan | None = None
    """Plan with an action for each site; replaces ``layers``, ``modules`` and ``recompute``."""
    plan_file: str | None = None
    """File that ``plan`` was read from."""
    auto: bool = False
    """Find the plan while training."""
    memory_gib: float | None = None
    """Most device memory that a step may take, in GiB."""
    memory_fraction: float | None = None
    """Most device memory that a step may take, as a fraction of the device's memory."""
    max_candidates: int = 3
    """Most plans that are tried in training steps."""
    save_plan: str | None = None
    """File for the plan that was carried out."""
    save_profile: str | None = None
    """File for the profile that the plan was made from."""
    optimizer: float = 0.0
    """Fraction of the optimizer's state that is offloaded between steps."""
    optimizer_auto: bool = False
    """Let the planner choose the fraction; ``optimizer`` is its upper bound."""
    disk_dir: str | None = None
    """Folder for bytes that do not fit into host memory."""
    disk_gib: float | None = None
    """Most disk space that this rank takes, in GiB; ``None``: an equal share of what is free but 1 GiB."""
    min_mib: float = 1.0
    """Smaller storages are kept on the device."""
    host_gib: float | None = None
    """Most pinned host memory that this rank may reserve, in GiB."""
    host_unchecked: bool = False
    """Accept a ``host_gib`` above what the machine reports."""
    prefetch_gib: float | None = None
    """Prefetch window: most GiB reloaded ahead of use; ``None``: the size of the largest group."""
    verify: bool = False
    """Compare checksums of every storage before offload and after reload."""
    summary: str | None = None
    """File for the JSON summary."""
    profile: str | None = None
    """Folder for traces, or ``nsys``."""
    profile_steps: tuple[int, int] = (4, 5)
    """First and last traced step, counted from 1."""
    deterministic: bool = False
    """Make runs on a GPU reproducible to the bit."""
    log_level: str = "info"
    """One of ``LOG_LEVELS``."""
    cpu_delay_ms: float = 0.0
    """Longest random delay of an emulated copy, in ms. Only without a GPU."""
    cpu_memory_gib: float | None = None
    """Memory of the emulated device for tensors that are created after the model, in GiB. Only without a GPU."""
    oom_guard: bool = False
    """Evict saved tensors when an allocation on the device fails."""
    loss_chunks: int | Literal["auto"] | None = None
    """Chunks of the sequence in which output layer and loss run; ``None``: as Megatron runs them."""
    recomputes_fp8_weights: bool = False
    """Quantize the weights of linear layers in forward and again in backward; keep no 8-bit copies."""

    @property
    def acts(self) -> bool:
        """Whether saved tensors are handled at all: offloaded, recomputed or guarded."""
        return bool(self.layers or self.recompute or self.plan is not None or self.auto or self.oom_guard)

    @property
    def does_anything(self) -> bool:
        """Whether training differs from a run without this package."""
        asked = self.summary, self.profile, self.cpu_memory_gib
        return self.attaches or any(one is not None for one in asked)

    @property
    def attaches(self) -> bool:
        """Whether the model itself is changed: its layers, its optimizer or its loss."""
        return self.acts or bool(self.optimizer) or self.loss_chunks is not None or self.recomputes_fp8_weights

    def window_bytes(self, plan: Plan | None) -> int | None:
        """Return the prefetch window in bytes: the user's, else that of ``plan``; ``None``: the engine chooses.

        It is 0 in a run that plans itself and has no plan yet: memory is measured then, not time.
        """
        gib = self.prefetch_gib
        if gib is None and plan is not None:
            gib = plan.prefetch_gib
        elif gib is None and self.auto:
            gib = 0.0
        return None if gib is None else int(gib * GIB)

    def budget_gib(self, device_gib: float) -> float:
        """Return the most device memory that a step may take, in GiB, on a device with ``device_gib``.

        Raises:
            UsageError: the device has less memory than ``memory_gib``.
        """
        if self.memory_gib is None:
            return device_gib * (USUAL_FRACTION if self.memory_fraction is None else self.memory_fraction)
        _require(self.memory_gib <= device_gib, "--swap-memory-gib", f"{self.memory_gib:g}",
                 f"at most what the device has, {device_gib:.2f} GiB")  # fmt: skip
        return self.memory_gib

    def __post_init__(self) -> None:
        self._check_numbers()
        files = {"--swap-save-plan": self.save_plan, "--swap-save-profile": self.save_profile}
        check_files(files | {"--swap-summary": self.summary}, {"--swap-plan": self.plan_file})
        for kind in self.recompute:
            _require(kind in PRODUCERS, "--swap-recompute", kind, f"{' or '.join(PRODUCERS)} (several: with spaces)")
        fraction = "a fraction of the state, 0 to 1, or auto"
        _require(0 <= self.optimizer <= 1, "--swap-optimizer", self.optimizer, fraction)
        self._check_disk()
        if self.profile is not None:
            _require(not Path(self.profile).is_file(), "--swap-profile", self.profile, "a folder or 'nsys', not a file")
        first, last = self.profile_steps
        _require(3 <= first <= last, "--swap-profile-steps", f"{first}-{last}",
                 "two steps, first and last, from 3 on (those before warm up)")  # fmt: skip
        _require(self.log_level in LOG_LEVELS, "--swap-log-level", self.log_level, " or ".join(LOG_LEVELS))

    def _check_disk(self) -> None:
        if self.disk_gib is not None:
            _require(self.disk_dir is not None, "--swap-disk-gib", self.disk_gib, "given with --swap-disk-dir DIR")
        if self.disk_dir is not None:
            folder = Path(self.disk_dir)
            _require(folder.is_dir(), "--swap-disk-dir", folder, "a folder that is there")
            _require(os.access(folder, os.W_OK | os.X_OK), "--swap-disk-dir", folder, "a folder that may be written to")
            swaps = bool(self.layers or self.auto or self.plan is not None)
            _require(self.optimizer > 0 or swaps, "--swap-disk-dir", folder,
                     "given with --swap-optimizer or what swaps activations: nothing else goes to disk")  # fmt: skip

    def _check_numbers(self) -> None:
        for flag, gib in (
            ("--swap-memory-gib", self.memory_gib),
            ("--swap-host-gib", self.host_gib),
            ("--swap-disk-gib", self.disk_gib),
            ("--swap-prefetch-gib", self.prefetch_gib),
            ("--swap-cpu-memory-gib", self.cpu_memory_gib),
        ):
            _require(gib is None or (is_within(0, gib, MOST) and gib > 0), flag, gib,
                     f"a number of GiB above 0, at most {MOST:g}")  # fmt: skip
        for flag, given, what, most in (
            ("--swap-min-mib", self.min_mib, "a number of MiB", MOST),
            ("--swap-cpu-delay-ms", self.cpu_delay_ms, "milliseconds", MOST_DELAY_MS),
        ):
            _require(is_within(0, given, most), flag, given, f"{what}, 0 or more, at most {most:g}")
        if self.memory_fraction is not None:
            given = self.memory_fraction
            _require(0 < given <= 1, "--swap-memory-fraction", given, "above 0 and at most 1, a part of the device's "
                     "memory")  # fmt: skip
        _require(1 <= self.max_candidates <= MOST_CANDIDATES, "--swap-max-candidates", self.max_candidates,
                 f"1 to {MOST_CANDIDATES}")  # fmt: skip


def parse_steps(text: str) -> tuple[int, int]:
    """Return first and last step of ``4-5`` or ``4``.

    Raises:
        UsageError: the text is malformed.
    """
    match = re.fullmatch(r"(\d{1,20})(?:-(\d{1,20}))?", text)
    if match is None:
        raise UsageError(f"--swap-profile-steps {text!r}: must be a step or a range of steps, such as 4-5.")
    return int(match[1]), int(match[2] or match[1])


def parse_loss_chunks(text: str) -> int | Literal["auto"]:
    """Return the value of ``--swap-loss-chunks``.

    Raises:
        UsageError: the text is neither ``auto`` nor a number that is allowed.
    """
    if text == "auto":
        return "auto"
    number = int(text) if re.fullmatch(r"\d{1,20}", text) else 0
    _require(1 <= number <= MOST_LOSS_CHUNKS, "--swap-loss-chunks", text, f"1 to {MOST_LOSS_CHUNKS}, or auto")
    return number


def parse_layers(text: str, num_layers: int) -> frozenset[int]:
    """Return the layers that ``text`` names (syntax: ``LAYER_SYNTAX``) in a model of ``num_layers``.

    Raises:
        UsageError: the text is malformed, or a layer is outside 0 … num_layers - 1.
    """
    if text == "none":
        return frozenset()
    if text == "all":
        return frozenset(range(num_layers))
    if match := re.fullmatch(r"every:(\d{1,20})", text):
        stride = int(match[1])
        _require(stride > 0, "--swap-layers", text, "every:N with N of at least 1")
        return frozenset(range(0, num_layers, stride))
    return parse_ranges(text, f"--swap-layers {text!r}", LAYER_SYNTAX, num_layers)


def check_files(written: Mapping[str, str | Path | None], read: Mapping[str, str | Path | None]) -> None:
    """Check before training that each file of ``written`` can be written and is no other file of both.

    Args:
        written: flag → file that the run writes.
        read: flag → file that the run reads.

    Raises:
        UsageError: a check fails; the message names the flag.
    """
    flags = {os.path.realpath(path): flag for flag, path in read.items() if path is not None}
    for flag, path in written.items():
        if path is not None:
            _check_writable(flag, Path(path))
            first = flags.setdefault(os.path.realpath(path), flag)
            _require(first == flag, flag, path, f"another file than that of {first}, which it would overwrite")


def _check_writable(flag: str, path: Path) -> None:
    """Check that ``path`` can be written. Missing folders are allowed: writing creates them."""
    try:
        _require(not path.is_dir(), flag, path, "a file, not a folder")
        if path.exists():
            _require(os.access(path, os.W_OK), flag, path, "a file that may be written to")
        if path.exists() and not path.is_file():
            return  # such as /dev/stdout, which is written in place
        folder = next(folder for folder in Path(os.path.realpath(path)).parents if folder.exists())
        _require(folder.is_dir(), flag, path, f"a file in a folder; {folder} is none")
        with tempfile.TemporaryFile(dir=folder):
            pass  # permissions are not enough: root has them in /proc, where no file can be created
    except OSError as error:
        raise UsageError(f"{flag} {path}: must be a file that can be written; {error.strerror}.") from error


def _require(holds: bool, flag: str, given: object, allowed: str) -> None:
    if not holds:
        raise UsageError(f"{flag} {given}: must be {allowed}.")
