"""The table of a sweep: the largest value of each method, and what stopped the next."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.rows import GIB, MIB, PRUNED, Row, outcome
from benchmarks.suites.table import heading
from benchmarks.sweeps.axes import AXES
from benchmarks.sweeps.forecast import Tiers, room_of
from benchmarks.sweeps.rows import TIERS

ABSENT = "–"
STATIC_SHARE = 0.9
"""Fraction of a run's device memory from which weights, gradients and optimizer state limit the run."""
FULL_SHARE = 0.9
"""Used fraction from which host memory or disk counts as full."""


@dataclass(frozen=True)
class LargestValue:
    """The largest value that one method trains.

    Attributes:
        best: the row of that value; `None`: no value trains.
        stop: the row of the next value; `None`: there is none, or it has not been tried yet.
        is_apart: values between `best` and `stop` were not tried.
    """

    method: str
    is_ours: bool
    best: Row | None
    stop: Row | None
    is_apart: bool = False

    @property
    def stopped_by(self) -> str:
        """Return the outcome of the next value, in words."""
        if self.stop is None:
            return "nothing larger was tried" if self.best is not None else "nothing was tried"
        if self.stop["outcome"] == PRUNED:
            return f"not tried: {self.stop['why']}"
        text = f"{self.stop['case']}: {outcome(self.stop)}"
        return f"{text}; nothing between was tried" if self.is_apart else text

    @property
    def stopped_short(self) -> str:
        """Return the outcome of the next value in fewer words, for a picture."""
        if self.stop is not None and self.stop["outcome"] == PRUNED:
            return f"{self.stop['case']}: predicted not to fit"
        return self.stopped_by

    @property
    def is_open(self) -> bool:
        """Return whether a value trains and it is not known whether a larger one does."""
        return self.best is not None and (self.stop is None or self.is_apart)

    @property
    def lacks(self) -> str | None:
        """Return the tier that the next value does not fit in; `None`: another reason, or not known."""
        if self.stop is None:
            return None
        stated = re.search(r" of (device|host|disk) memory, ", self.stop["why"] or "")
        return stated[1] if stated else {f"oom_{tier}": tier for tier in TIERS}.get(self.stop["outcome"])

    @property
    def lacks_too(self) -> list[str]:
        """Return the other tiers that the next value is predicted to exceed."""
        if self.stop is None or self.lacks is None:
            return []
        predicted, room = self.stop["predicted"], _room(self.stop)
        return [tier for tier in TIERS if tier != self.lacks and (predicted[f"{tier}_gib"] or 0.0) > room[tier]]

    @property
    def limit(self) -> str:
        """Return what fills memory at the largest value; empty without a device or without figures for it."""
        row = self.best or self.stop
        if row is None or row["predicted"]["device_gib"] is None:
            return ""
        predicted, device, source = row["predicted"], row["predicted"]["device_gib"], "predicted"
        if predicted.get("is_bound"):  # the memory model does not know the activations there
            device, source = row["device_peak_gib"], "measured"
        if device is None:
            return ""
        static, room = predicted["static_gib"], _room(row)
        text = (
            f"at {row['case']} weights, gradients and the kept optimizer state take {static:.1f} of the "
            f"{device:.1f} GiB that are {source} of the device's {room['device']:.1f}"
        )
        used = {
            tier: (gib, room[tier]) for tier in ("host", "disk") if (gib := predicted[f"{tier}_gib"])
        }
        elsewhere = " and ".join(f"{gib:.1f} of {limit:.1f} GiB of {tier}" for tier, (gib, limit) in used.items())
        text += f"; {elsewhere} memory beside it" if used else ""
        if self.lacks is None:
            text += "."
        elif self.lacks != "device":
            text += f". The next value lacks {' and '.join([self.lacks, *self.lacks_too])} memory."
        elif static >= STATIC_SHARE * device:
            text += ". Activations hardly count: only offloading more state makes room for a larger model"
            is_full = bool(used) and all(gib >= FULL_SHARE * limit for gib, limit in used.values())
            text += ", and the other tiers are nearly full." if is_full else "."
        else:
            text += "; the rest is activations and kernel workspaces."
        if not self.is_open:
            return text
        return f"{text} Nothing {'between' if self.is_apart else 'larger'} was tried: this is not its limit."


@dataclass(frozen=True)
class MachineLimit:
    """All memory of a machine, and the parameters whose weight, gradient and optimizer state fill it."""

    device_gib: float
    host_gib: float
    disk_gib: float
    param_bytes: int

    @property
    def params(self) -> float:
        return (self.device_gib + self.host_gib + self.disk_gib) * GIB / self.param_bytes

    @property
    def sum(self) -> str:
        """Return the sizes of the tiers that there are, as a sum."""
        tiers = [("device", self.device_gib), ("host", self.host_gib), ("disk", self.disk_gib)]
        return " + ".join(f"{gib:.1f} GiB of {tier}" for tier, gib in tiers if gib >= 0.05)

    @property
    def text(self) -> str:
        return (
            f"The physical limit of this machine: {short(self.params)} parameters, {self.sum} memory, as much as the "
            f"sweep lets a run have, at {self.param_bytes} bytes a parameter."
        )


def largest_by_method(rows: Sequence[Row]) -> list[LargestValue]:
    """Return the largest value of each method, in rising order; of equal values the fastest method is last."""
    found, values = [], {row["value"] for row in rows}
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        best = max((row for row in mine if row["outcome"] == "ok"), key=lambda row: row["value"], default=None)
        above = [row for row in mine if row["outcome"] != "ok" and (best is None or row["value"] > best["value"])]
        # A failed run says more than a pruned row; among pruned rows the one of the best run's commit counts.
        last = best["commit"] if best is not None else None
        stop = min(
            above, key=lambda row: (row["value"], row["outcome"] == PRUNED, row["commit"] != last), default=None
        )
        known = {row["value"] for row in mine}
        between = [
            value for value in values
            if best and stop and best["value"] < value < stop["value"] and value not in known
        ]  # fmt: skip
        found.append(LargestValue(method, mine[0]["is_ours"], best, stop, bool(between)))
    return sorted(found, key=lambda one: _rank(one.best))


def champions(rows: Sequence[Row]) -> list[Row]:
    """Return the row with the largest value among ours and among the baselines; of equal values the fastest."""
    best = [one.best for one in largest_by_method(rows) if one.best is not None]
    sides = ([row for row in best if row["is_ours"] == is_ours] for is_ours in (True, False))
    return [max(side, key=_rank) for side in sides if side]


def _room(row: Row) -> dict[str, float]:
    """Return the GiB of each tier that the run of a row may use; without a device 0."""
    room = room_of(shlex.split(row["flags"]), Tiers(**row["tiers_gib"]))
    return {"device": room.device or 0.0, "host": room.host, "disk": room.disk}


def _rank(row: Row | None) -> tuple[float, float]:
    return (row["value"], row["tokens_per_s"] or 0.0) if row is not None else (0.0, 0.0)


def machine_limit(rows: Sequence[Row]) -> MachineLimit:
    """Return the limit of the machine that the rows come from.

    Host memory is the most that any run could use; disk is the least that was free, which all runs had.
    """
    tiers = [row["tiers_gib"] for row in rows]
    host_gib, disk_gib = max(one["host"] for one in tiers), min(one["disk"] for one in tiers)
    return MachineLimit(tiers[0]["device"] or 0.0, host_gib, disk_gib, rows[0]["param_bytes"])


CPU_HEAD = (
    "method", "largest", "parameters", "device MiB", "offloaded MiB a step", "disk MiB", "loss",
    "what stopped the next",
)  # fmt: skip
HEAD = (
    "method", "largest", "parameters", "tokens/s", "MFU", "step ms", "device GiB (reserved)", "host GiB",
    "disk GiB", "loss", "what stopped the next",
)  # fmt: skip


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Return one line of cells per method, in the columns of `HEAD`."""
    lines = []
    for found in largest_by_method(rows):
        name = f"**{found.method}**" if found.is_ours else found.method
        row = found.best
        if row is None:
            lines.append([name, "none that was tried", *[ABSENT] * 8, found.stopped_by])
            continue
        device = _cell(row["device_peak_gib"], ".2f")
        if row["device_reserved_gib"] is not None:
            device += f" ({row['device_reserved_gib']:.2f})"
        lines.append([
            name,
            row["case"],
            short(params_of(row)),
            _cell(row["tokens_per_s"], ",.0f"),
            _cell(row["mfu"], ".1%"),
            _cell(row["step_ms_median"], ",.0f"),
            device,
            _cell(row["host_peak_gib"], ".2f"),
            _cell(row["disk_peak_gib"], ".2f"),
            f"{row['loss_first']:.3f} → {row['loss_last']:.3f}",
            found.stopped_by,
        ])  # fmt: skip
    return lines


def cpu_table(rows: Sequence[Row]) -> list[list[str]]:
    """Return one line of cells per method, in the columns of `CPU_HEAD`: without times."""
    lines = []
    for found in largest_by_method(rows):
        name = f"**{found.method}**" if found.is_ours else found.method
        row = found.best
        if row is None:
            lines.append([name, "none that was tried", *[ABSENT] * 5, found.stopped_by])
            continue
        out_bytes = (row["swapped_out_bytes"] or 0) + (row["optimizer_out_bytes"] or 0)
        lines.append([
            name,
            row["case"],
            short(params_of(row)),
            _mib(row["device_peak_gib"]),
            f"{out_bytes / MIB:.1f}" if found.is_ours else ABSENT,
            _mib(row["disk_peak_gib"]),
            f"{row['loss_first']:.3f} → {row['loss_last']:.3f}",
            found.stopped_by,
        ])  # fmt: skip
    return lines


def is_on_cpu(rows: Sequence[Row]) -> bool:
    """Return whether the sweep ran without a GPU, where times say nothing."""
    return rows[0]["tiers_gib"]["device"] is None


def _mib(gib: float | None) -> str:
    return ABSENT if gib is None else f"{gib * GIB / MIB:.1f}"


def params_of(row: Row) -> int:
    """Return the number of parameters: counted, or by arithmetic if the run ended before counting."""
    return int(row["num_params"] or row["params"])


def short(params: float) -> str:
    """Format a number of parameters with three digits."""
    value, unit = (params / 1e9, "B") if params >= 999.5e6 else (params / 1e6, "M")
    return f"{format(value, '#.3g').rstrip('.')} {unit}"


def _cell(value: float | None, form: str) -> str:
    return ABSENT if value is None else format(value, form)


CPU_LEGEND = (
    "Largest: all steps were run, in a separate process, and the loss fell (mean of the last quarter of the steps "
    "below that of the first). Device: peak memory of the emulated device, beside the model as it was built; "
    "`--swap-cpu-memory-gib` limits it. Times are in the rows alone: without a GPU threads emulate the copies, and the "
    "times say nothing about a GPU."
)
LEGEND = (
    "Largest: all steps were run, in a separate process, and the loss fell (mean of the last quarter of the steps "
    "below that of the first). Device: peak of PyTorch's allocator, allocated and (reserved). Host: growth of the "
    "process or pinned memory, whichever is larger. Step: median after warm-up. MFU: the model's FLOP/s ÷ those of the "
    "GPU's data sheet."
)


def markdown(rows: Sequence[Row]) -> str:
    """Return the Markdown page that is written beside the rows."""
    first = rows[0]
    title = f"{first['suite']}: the largest {first['axis']}"
    if is_on_cpu(rows):
        lines = heading(title, first, CPU_LEGEND)
        lines += [f"| {' | '.join(cells)} |" for cells in [CPU_HEAD, ["---"] * len(CPU_HEAD), *cpu_table(rows)]]
        return "\n".join([*lines, ""])
    lines = heading(title, first, LEGEND)
    lines += [f"| {' | '.join(cells)} |" for cells in [HEAD, ["---"] * len(HEAD), *table(rows)]]
    limits = [f"- {found.method}: {found.limit}" for found in largest_by_method(rows) if found.limit]
    lines += ["", *limits, *([""] if limits else [])]
    if AXES[first["axis"]].grows:
        lines += [machine_limit(rows).text, ""]
    return "\n".join(lines)
