"""The settings of a run: each field has its flag, its help and its range. Checked once, then immutable."""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron.swap.common.flag_names import nearest_flag
from megatron.swap.common.layer_ranges import format_ranges, parse_ranges
from megatron.swap.common.plan import DROPPED, FP8_WEIGHTS, Plan, load_plan
from megatron.swap.common.types import GIB, MOST, PRODUCERS, UsageError, is_within

LAYER_SYNTAX = "0-23 | 0,4-7 | every:2 | all | none"
LOG_LEVELS = ("quiet", "info", "debug")
POLICIES = ("manual", "auto")
MOST_CANDIDATES = 10
MOST_LOSS_CHUNKS = 1024
MOST_DELAY_MS = 1000  # delays each copy, and a step makes hundreds
USUAL_FRACTION = 0.95  # budget of ``--swap-policy auto`` without other flags, as a fraction of the device's memory

GROUPS = {
    "activations": "Saved activations: which are offloaded or recomputed.",
    "planner": "Measure the model, then keep, swap or recompute each saved tensor within a memory budget.",
    "optimizer state": "Main parameters and moments: in host memory or on disk between optimizer steps.",
    "host memory and disk": "Where offloaded bytes are kept.",
    "output and checks": "What a run reports and verifies.",
    "without a GPU": "Tests on a machine without a GPU, where host memory emulates the device.",
}
"""Headings of the flags in ``--help``, and the sentence below each."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    group: str  # heading in ``--help``, of ``GROUPS``
    help: str  # 'What the flag does. Default: value. Set it when …'; `python -m tests.pages` makes flags.md of it
    metavar: str | None = None  # name of the value in ``--help``; None: a switch, or one of ``choices``
    choices: tuple[str, ...] = ()  # allowed values; empty: ``allowed`` says them
    takes_several: bool = False  # values with blanks between them
    number: type[int] | type[float] | None = None  # None: the value is no number
    allowed: str = ""  # allowed values in words, behind 'must be'
    is_allowed: Callable[[Any], bool] = lambda _: True  # of a value that was read
    read: Callable[[Any], Any] = lambda given: given  # makes the setting of a value as it was given
    beside: tuple[str, ...] = ()  # settings of Megatron that the flag sets too
    instead: str | None = None  # of the flag without Megatron's trainer; None: the setting is for any model
    written: str | None = None  # the default as a command line gives it; None: that of the field


def parse_layers(text: str, num_layers: int) -> frozenset[int]:
    """Return the layers that ``text`` (``LAYER_SYNTAX``) names in a model, or raise ``UsageError``."""
    if text == "none":
        return frozenset()
    if text == "all":
        return frozenset(range(num_layers))
    if match := re.fullmatch(r"every:(\d{1,20})", text):
        stride = int(match[1])
        _require(stride > 0, "--swap-layers", text, "every:N with N of at least 1")
        return frozenset(range(0, num_layers, stride))
    return parse_ranges(text, f"--swap-layers {text!r}", LAYER_SYNTAX, num_layers)


def _read_layers(given: Any) -> str:
    if isinstance(given, str):
        return given
    numbers: list[Any] = list(given) if isinstance(given, Iterable) else [None]
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise UsageError(f"layers {given!r}: must be text ({LAYER_SYNTAX}) or numbers, such as [0, 1].")
    return format_ranges(sorted(set(numbers))) or "none"


def _read_several(given: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(str, [given] if isinstance(given, str) else given)))


def read_fraction(given: Any) -> float | Literal["auto"]:
    """Return the value of ``--swap-optimizer``, or raise ``UsageError``."""
    try:
        return "auto" if given == "auto" else float(given)
    except (TypeError, ValueError):
        raise UsageError(f"--swap-optimizer {given}: must be {_FRACTION_OF_STATE}.") from None


def read_loss_chunks(given: Any) -> int | Literal["auto"]:
    """Return the value of ``--swap-loss-chunks``, or raise ``UsageError``."""
    if given == "auto":
        return "auto"
    number = int(given) if re.fullmatch(r"\d{1,20}", str(given)) else 0
    _require(1 <= number <= MOST_LOSS_CHUNKS, "--swap-loss-chunks", given, f"1 to {MOST_LOSS_CHUNKS}, or auto")
    return number


def read_steps(given: Any) -> tuple[int, int]:
    """Return first and last step of ``4-5`` or ``4``, or raise ``UsageError``."""
    if isinstance(given, tuple):
        return given
    match = re.fullmatch(r"(\d{1,20})(?:-(\d{1,20}))?", str(given))
    if match is None:
        raise UsageError(f"--swap-profile-steps {given!r}: must be a step or a range of steps, such as 4-5.")
    return int(match[1]), int(match[2] or match[1])


_FRACTION_OF_STATE = "a fraction of the state, 0 to 1, or auto"


def _gib(group: str, help: str) -> Any:
    return field(default=None, metadata={"flag": Flag(
        group=group, help=help, metavar="GIB", number=float, allowed=f"a number of GiB above 0, at most {MOST:g}",
        is_allowed=lambda gib: is_within(0, gib, MOST) and gib > 0,
    )})  # fmt: skip


def _number(group: str, help: str, default: float, metavar: str, unit: str, most: float) -> Any:
    return field(default=default, metadata={"flag": Flag(
        group=group, help=help, metavar=metavar, number=float, allowed=f"{unit}, 0 or more, at most {most:g}",
        is_allowed=lambda given: is_within(0, given, most),
    )})  # fmt: skip


def _setting(default: Any, group: str, help: str, **options: Any) -> Any:
    return field(default=default, metadata={"flag": Flag(group=group, help=help, **options)})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The user's settings; None leaves the choice to the package. Raises a ``UsageError`` that names the flags."""

    layers: str = _setting(
        "none", "activations",
        f"Layers whose saved activations are offloaded in forward and reloaded in backward: {LAYER_SYNTAX}. "
        "Default: none. Set it when you choose layers yourself; --swap-memory-gib chooses for you.",
        metavar="LAYERS", read=_read_layers)  # fmt: skip
    modules: tuple[str, ...] = _setting(
        (), "activations",
        "Swap only what these submodules of the chosen layers save, such as mlp, mlp.linear_fc1 or "
        "core_attention. A name matches a submodule and everything in it; 'layer' is the layer itself, 'checkpoint' "
        "the input of a recomputed segment. Default: every submodule. Set it when forward is too short to hide the "
        "copies of whole layers.",
        metavar="MODULE", takes_several=True, read=_read_several)  # fmt: skip
    recompute: tuple[str, ...] = _setting(
        (), "activations",
        "Recompute the outputs of these kinds of kernels in backward, equal to the bit, in all layers, swapped "
        f"or not. Kinds: {', '.join(PRODUCERS)}. All but the last two, which run linear layers again, are cheap. "
        "Default: no kind. Set it when memory is short and the link is busy.",
        metavar="KIND", takes_several=True, read=_read_several)  # fmt: skip
    min_mib: float = _number(
        "activations",
        "Keep storages that are smaller. Default: 1. Set it when the model is tiny, so that its "
        "storages are all smaller.",
        1.0, "MIB", "a number of MiB", MOST)  # fmt: skip
    prefetch_gib: float | None = _gib(
        "activations",
        "Most memory for reloads ahead of their layer's backward. Memory that backward frees comes on top, up "
        "to the same amount. Default: the plan's value, or what the largest layer swaps. Set it when the "
        "summary shows a high wait_ms and memory is left (raise it), or memory is short (lower it).")
    oom_guard: bool = _setting(
        False, "activations",
        "When an allocation on the GPU fails, evict saved tensors to host memory and retry the allocation. A "
        "step with evictions is slower. The planner guards its first steps without this flag. Default: off. Set it "
        "when a few steps need more memory than the GPU has.")  # fmt: skip
    loss_chunks: int | Literal["auto"] | None = _setting(
        None, "activations",
        "Run the output layer and the loss in N chunks of the sequence, so that the logits of one chunk exist at "
        "a time. Backward computes the logits again. Sums over several chunks differ in their last bits from the "
        "whole's. auto: as few chunks as keep the loss below a layer's own peak. With "
        "--no-gradient-accumulation-fusion chunks hold a sum in fp32 (width x vocabulary). Default: the whole at "
        "once. Set it when the logits set the peak: long sequences, large vocabularies.",
        metavar="N", read=read_loss_chunks)  # fmt: skip
    fp8_weights: str | None = _setting(
        None, "activations",
        "Whether TransformerEngine keeps its 8-bit copies of weights (2 bytes a weight on Hopper), or makes "
        "them in each forward and again in backward, equal to the bit. Experts keep theirs. Default: keep; "
        "with a budget, the planner chooses. Set it when memory is short.",
        choices=FP8_WEIGHTS)  # fmt: skip
    memory_gib: float | None = _gib(
        "planner",
        "Most device memory that a step may take. The planner decides what to keep, swap and recompute. "
        "Default: no budget. Set it when the model does not fit; a few GiB below the GPU's memory is a good value.")
    memory_fraction: float | None = _setting(
        None, "planner",
        "The same budget as a fraction of the device's memory, above 0 and at most 1. Default: no budget. Set "
        "it when one command runs on different GPUs.",
        metavar="FRACTION", number=float, allowed="above 0 and at most 1, a part of the device's memory",
        is_allowed=lambda given: 0 < given <= 1)  # fmt: skip
    policy: str | None = _setting(
        None, "planner",
        "auto: measure a few steps, find the fastest plan within the budget, train by that plan. manual: do "
        "what the other flags say. Default: auto with a budget, else manual. Set it when you want the planner "
        f"without a budget: auto alone takes {USUAL_FRACTION:g} of the device's memory.",
        choices=POLICIES)  # fmt: skip
    max_candidates: int = _setting(
        3, "planner",
        f"Most plans that the planner tries in training steps, 1 to {MOST_CANDIDATES}; above 1, then up to "
        "three that use memory left free. Default: 3. Set it when steps are long (lower it).",
        metavar="N", number=int, allowed=f"1 to {MOST_CANDIDATES}",
        is_allowed=lambda given: 1 <= given <= MOST_CANDIDATES)  # fmt: skip
    plan: Plan | None = _setting(  # noqa: RUF009
        None, "planner",
        "Carry out this plan file, site by site. The plan replaces --swap-layers, --swap-modules and "
        "--swap-recompute. Default: no plan. Set it when you have a plan of tools/plan.py or of an earlier run.",
        metavar="FILE", read=load_plan)  # fmt: skip
    save_plan: str | None = _setting(
        None, "planner",
        "Write a plan file: what was done with each saved tensor, or the planner's plan. Default: not written. "
        "Set it when you want to edit the plan, or to skip the measurement in the next run.",
        metavar="FILE", read=str)  # fmt: skip
    save_profile: str | None = _setting(
        None, "planner",
        "Write the profile that the planner measured, for tools/plan.py. Default: not written. Set it when you "
        "want to plan other budgets without a GPU.",
        metavar="FILE", read=str)  # fmt: skip
    optimizer: float | Literal["auto"] = _setting(
        0.0, "optimizer state",
        "Fraction of the optimizer's state, 0 to 1, that is offloaded to host memory. The state passes through "
        "the GPU in buckets while the optimizer steps. auto: the planner or the plan decides how much. Default: "
        "0. Set it when weights and optimizer state fill the GPU.",
        metavar="FRACTION", allowed=_FRACTION_OF_STATE, read=read_fraction, written="0",
        is_allowed=lambda given: given == "auto" or 0 <= given <= 1)  # fmt: skip
    host_gib: float | None = _gib(
        "host memory and disk",
        "Most pinned host memory that one rank may reserve. Default: what the machine and its cgroup can spare, "
        "divided by the ranks of the host. Set it when other programs need the host's memory.")
    host_unchecked: bool = _setting(
        False, "host memory and disk",
        "Accept --swap-host-gib even if the machine reports less memory. Default: off. Set it when the "
        "machine's memory grows on demand.")  # fmt: skip
    disk_dir: str | None = _setting(
        None, "host memory and disk",
        "Folder on a local disk for optimizer state and activations that host memory has no room for. Nothing "
        "is left in the folder when training ends, however training ends. Default: no disk. Set it when host memory "
        "is full too.",
        metavar="DIR", read=str)  # fmt: skip
    disk_gib: float | None = _gib(
        "host memory and disk",
        "Most disk space that one rank may take. Default: what is free, less 1 GiB, divided by the ranks of the "
        "host. Set it when others need the disk.")
    summary: str | None = _setting(
        None, "output and checks",
        "Write a JSON summary of bytes, waits, peaks and losses when training ends. Default: not written. Set "
        "it when you want figures.",
        metavar="PATH", read=str, instead="stats() has the figures of this rank")  # fmt: skip
    log_level: str = _setting(
        "info", "output and checks",
        "quiet: no tables and no swap line an iteration. debug: whole tracebacks. Default: "
        "info. Set it when logs are long, or you report a problem.",
        choices=LOG_LEVELS)  # fmt: skip
    profile: str | None = _setting(
        None, "output and checks",
        "Trace --swap-profile-steps, with what the engine does in them, by torch.profiler into "
        "FOLDER/rank-N.json.gz. nsys: open the capture range of Nsight Systems for these steps instead. Default: no "
        "trace. Set it when you look for lost time; tools/profile.sh does all steps for you.",
        metavar="FOLDER", read=str, allowed="a folder or 'nsys', not a file",
        is_allowed=lambda folder: not Path(folder).is_file())  # fmt: skip
    profile_steps: tuple[int, int] = _setting(
        (4, 5), "output and checks",
        "First and last step to trace, counted from the start of this run, from 3 on. Default: 4-5. Set "
        "it when a later step is of interest.",
        metavar="STEPS", written="4-5", read=read_steps,
        allowed="two steps, first and last, from 3 on (those before warm up)",
        is_allowed=lambda steps: 3 <= steps[0] <= steps[1])  # fmt: skip
    verify: bool = _setting(
        False, "output and checks",
        "Compare a checksum of every storage before its offload and after its reload, and stop at a difference. "
        "Slow. Default: off. Set it when you suspect wrong results.")  # fmt: skip
    deterministic: bool = _setting(
        False, "output and checks",
        "Make runs on a GPU equal to the bit: set Megatron's --deterministic-mode, and use flash instead of "
        "cuDNN attention for the local spec. Slower. Default: off. Set it when you compare runs to the bit.",
        beside=("deterministic_mode",),  # Megatron then checks and sets the environment before CUDA starts
        instead="choose deterministic kernels where you build the model")  # fmt: skip
    cpu_delay_ms: float = _number(
        "without a GPU",
        f"Longest random delay of an emulated copy, at most {MOST_DELAY_MS}. Default: 0. Set it when "
        "you test the order of copies.",
        0.0, "MS", "milliseconds", MOST_DELAY_MS)  # fmt: skip
    cpu_memory_gib: float | None = _gib(
        "without a GPU",
        "Memory of the emulated device, beside what the model takes when it is built. Default: no limit. Set it "
        "when you test what happens when device memory is short.")

    @classmethod
    def of(cls, given: Mapping[str, Any], *, of_trainer: bool = False) -> Settings:
        """Return the settings in ``given``, by name, or raise ``UsageError``. None and False stand for the default.

        Numbers may be texts. ``of_trainer``: Megatron's trainer runs, so that its own settings are allowed.
        """
        values: dict[str, Any] = {}
        for name, value in given.items():
            flag = cls._flag(name, of_trainer)
            if value is None or value is False:
                continue
            if is_switch(name) != (value is True):
                allowed = "True or False" if is_switch(name) else "a value"
                raise UsageError(f"{name}: {value!r} is given; it must be {allowed}.")
            values[name] = _read(name, flag, value)
        return cls(**values)

    @classmethod
    def _flag(cls, name: Any, of_trainer: bool) -> Flag:
        if not isinstance(name, str):
            raise UsageError(f"{name!r}: is no name of a setting, such as 'min_mib'.")
        if (flag := FLAGS.get(name)) is None:
            near = nearest_flag(name, FLAGS)
            known = ", ".join(one for one, flag in FLAGS.items() if of_trainer or flag.instead is None)
            raise UsageError(f"{name}: there is no such setting. " + (f"The nearest is {near}." if near else
                             f"There are {known}."))  # fmt: skip
        if flag.instead is not None and not of_trainer:
            raise UsageError(f"{name}: is a setting of runs of Megatron's trainer; {flag.instead}. Leave it out.")
        return flag

    @property
    def auto(self) -> bool:
        """Whether the plan is found while training."""
        return self.memory_gib is not None or self.memory_fraction is not None or self.policy == "auto"

    @property
    def swaps_layers(self) -> bool:
        return self.layers != "none"

    @property
    def acts(self) -> bool:
        """Whether saved tensors are handled at all: offloaded, recomputed or guarded."""
        return bool(self.swaps_layers or self.recompute or self.plan is not None or self.auto or self.oom_guard)

    @property
    def attaches(self) -> bool:
        """Whether the model itself is changed: its layers, its optimizer or its loss."""
        return self.acts or bool(self.optimizer) or self.loss_chunks is not None or self.recomputes_fp8_weights

    @property
    def does_anything(self) -> bool:
        """Whether training differs from a run without this package."""
        asked = self.summary, self.profile, self.cpu_memory_gib
        return self.attaches or any(one is not None for one in asked)

    @property
    def offload_fraction(self) -> float:
        """Fraction of the optimizer's state that is offloaded; most of it, where the planner chooses."""
        if self.optimizer != "auto":
            return self.optimizer
        if self.plan is None:
            return 1.0
        return self.plan.offload_fraction or 0.0

    @property
    def plans_optimizer(self) -> bool:
        """Whether the planner chooses the fraction of the optimizer's state."""
        return self.optimizer == "auto" and self.auto

    @property
    def recomputes_fp8_weights(self) -> bool:
        """Whether linear layers quantize their weights in forward and again in backward, and keep no 8-bit copies."""
        return self.chosen_fp8_weights == DROPPED

    @property
    def chosen_fp8_weights(self) -> str | None:
        """``fp8_weights``, or the plan's."""
        if self.fp8_weights is None and self.plan is not None:
            return self.plan.model.swap_fp8_weights
        return self.fp8_weights

    @property
    def budget_flag(self) -> str:
        """The flag that asks for the planner, as it was given."""
        if self.memory_gib is not None:
            return f"--swap-memory-gib {self.memory_gib:g}"
        fraction = self.memory_fraction
        return "--swap-policy auto" if fraction is None else f"--swap-memory-fraction {fraction:g}"

    def window_bytes(self, plan: Plan | None) -> int | None:
        """Return the prefetch window in bytes: the user's, else that of ``plan``; None: the engine chooses."""
        gib = self.prefetch_gib
        if gib is None and plan is not None:
            gib = plan.prefetch_gib
        elif gib is None and self.auto:
            gib = 0.0  # a run that plans itself has no plan yet: it measures memory, not time
        return None if gib is None else int(gib * GIB)

    def budget_gib(self, device_gib: float) -> float:
        """Return the most GiB of the device that a step may take, or raise ``UsageError`` if it has less."""
        if self.memory_gib is None:
            return device_gib * (USUAL_FRACTION if self.memory_fraction is None else self.memory_fraction)
        _require(self.memory_gib <= device_gib, "--swap-memory-gib", f"{self.memory_gib:g}",
                 f"at most what the device has, {device_gib:.2f} GiB")  # fmt: skip
        return self.memory_gib

    def __post_init__(self) -> None:
        self._check_decider()
        for name, flag in FLAGS.items():
            given = getattr(self, name)
            if given is not None:
                shown = "-".join(map(str, given)) if name == "profile_steps" else given
                _require(flag.is_allowed(given), flag_of(name), shown, flag.allowed)
                _require(not flag.choices or given in flag.choices, flag_of(name), given, " or ".join(flag.choices))
        files = {"--swap-save-plan": self.save_plan, "--swap-save-profile": self.save_profile}
        read = {"--swap-plan": None if self.plan is None else self.plan.file}
        check_files(files | {"--swap-summary": self.summary}, read)
        for kind in self.recompute:
            _require(kind in PRODUCERS, "--swap-recompute", kind, f"{' or '.join(PRODUCERS)} (several: with spaces)")
        self._check_disk()
        self._check_unused()

    def _check_decider(self) -> None:
        """Refuse more than one of: a plan file, the planner, flags for layers, modules and kinds."""
        if self.memory_gib is not None and self.memory_fraction is not None:
            both = f"--swap-memory-gib {self.memory_gib:g} and --swap-memory-fraction {self.memory_fraction:g}"
            raise UsageError(f"{both} both say how much memory a step may take. Drop one.")
        if self.auto and self.policy == "manual":
            flag = self.budget_flag.split()[0]
            raise UsageError(f"{flag} lets the planner decide; --swap-policy manual says it may not. Drop one.")
        flags = {
            f"--swap-plan {self.plan and self.plan.file}": self.plan is not None,
            self.budget_flag: self.auto,
            f"--swap-layers {self.layers}": self.swaps_layers,
            f"--swap-modules {' '.join(self.modules)}": bool(self.modules),
            f"--swap-recompute {' '.join(self.recompute)}": bool(self.recompute),
        }
        given = [flag for flag, is_given in flags.items() if is_given]
        if len(given) > 1 and (self.auto or self.plan is not None):
            decides = "the plan" if self.plan is not None else "the planner"
            raise UsageError(
                f"{given[0]} cannot be combined with {given[1]}: {decides} decides what happens to every saved tensor. "
                "Drop one of the two."
            )
        has_fraction = self.auto or (self.plan is not None and self.plan.offload_fraction is not None)
        if self.optimizer == "auto" and not has_fraction:
            raise UsageError(
                "--swap-optimizer auto: neither a planner nor a plan says how much to offload. Give --swap-memory-gib, "
                "a --swap-plan that was made with --swap-optimizer auto, or a number."
            )

    def _check_disk(self) -> None:
        if self.disk_gib is not None:
            _require(self.disk_dir is not None, "--swap-disk-gib", self.disk_gib, "given with --swap-disk-dir DIR")
        if self.disk_dir is not None:
            folder = Path(self.disk_dir)
            _require(folder.is_dir(), "--swap-disk-dir", folder, "a folder that is there")
            _require(os.access(folder, os.W_OK | os.X_OK), "--swap-disk-dir", folder, "a folder that may be written to")
            swaps = self.swaps_layers or self.auto or self.plan is not None
            _require(self.offload_fraction > 0 or swaps, "--swap-disk-dir", folder,
                     "given with --swap-optimizer or what swaps activations: nothing else goes to disk")  # fmt: skip

    def _check_unused(self) -> None:
        """Refuse settings that would have no effect."""
        planner = "Add --swap-memory-gib, --swap-memory-fraction or --swap-policy auto"
        if self.modules and not self.swaps_layers:
            raise UsageError(
                f"--swap-modules {' '.join(self.modules)} has no effect without --swap-layers. Add --swap-layers, such "
                "as all, or drop --swap-modules."
            )
        if self.save_plan is not None and not self.acts:
            raise UsageError(
                f"--swap-save-plan {self.save_plan}: nothing is swapped or recomputed, so there is no plan to write. "
                "Add --swap-layers, --swap-recompute, --swap-plan or --swap-memory-gib, or drop --swap-save-plan."
            )
        if self.save_profile is not None and not self.auto:
            raise UsageError(
                f"--swap-save-profile {self.save_profile}: only the planner measures a profile. {planner}, or drop "
                "--swap-save-profile."
            )
        if self.max_candidates != Settings.max_candidates and not self.auto:
            raise UsageError(
                f"--swap-max-candidates {self.max_candidates}: only the planner tries plans. {planner}, or drop "
                "--swap-max-candidates."
            )


FLAGS: dict[str, Flag] = {one.name: one.metadata["flag"] for one in dataclasses.fields(Settings)}


def flag_of(name: str) -> str:
    return f"--swap-{name.replace('_', '-')}"


def is_switch(name: str) -> bool:
    """Whether the setting ``name`` is on or off, so that its flag takes no value."""
    return getattr(Settings, name) is False


def _read(name: str, flag: Flag, given: Any) -> Any:
    if flag.number is None:
        return flag.read(given)
    try:
        return flag.number(given)
    except (TypeError, ValueError):
        raise UsageError(f"{flag_of(name)} {given!r}: must be {flag.allowed}.") from None


def check_files(written: Mapping[str, str | Path | None], read: Mapping[str, str | Path | None]) -> None:
    """Raise ``UsageError`` if a file (by flag) cannot be written, or is another file of the run too."""
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
