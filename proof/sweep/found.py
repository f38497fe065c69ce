"""What a sweep has found, out of its rows: the largest value of each method, and what stopped the next."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from proof.bench.table import heading
from proof.rows import GIB, PRUNED, Row, outcome
from proof.sweep.axes import AXES
from proof.sweep.forecast import Tiers, room_of
from proof.sweep.rows import TIERS

ABSENT = "–"
STATIC_SHARE = 0.9
"""Of what a run takes of the device: from there on weights, gradients and optimizer state are what limits it."""
FULL_SHARE = 0.9
"""Of what a run may have of host memory or disk: with so much in use nobody would look for room there."""


@dataclass(frozen=True)
class Found:
    """Of one method.

    Attributes:
        best: the row of the largest value that trains; ``None``: none does.
        stop: the row of the next value; ``None``: there is none, or nobody has tried it yet.
        is_apart: between the two are values that nobody has tried.
    """

    method: str
    is_ours: bool
    best: Row | None
    stop: Row | None
    is_apart: bool = False

    @property
    def stopped_by(self) -> str:
        """What became of the next value, in words."""
        if self.stop is None:
            return "nothing larger was tried" if self.best is not None else "nothing was tried"
        if self.stop["outcome"] == PRUNED:
            return f"not tried: {self.stop['why']}"
        text = f"{self.stop['case']}: {outcome(self.stop)}"
        return f"{text}; nothing between was tried" if self.is_apart else text

    @property
    def stopped_short(self) -> str:
        """The same for a picture."""
        if self.stop is not None and self.stop["outcome"] == PRUNED:
            return f"{self.stop['case']}: predicted not to fit"
        return self.stopped_by

    @property
    def is_open(self) -> bool:
        """Something trains, and nobody knows whether anything larger does."""
        return self.best is not None and (self.stop is None or self.is_apart)

    @property
    def lacks(self) -> str | None:
        """The tier that the next value does not fit in; ``None``: something else ended it, or nobody knows."""
        if self.stop is None:
            return None
        told = re.search(r" of (device|host|disk) memory, ", self.stop["why"] or "")
        return told[1] if told else {f"oom_{tier}": tier for tier in TIERS}.get(self.stop["outcome"])

    @property
    def lacks_too(self) -> list[str]:
        """Other tiers of which the next value is predicted to take more than there is."""
        if self.stop is None or self.lacks is None:
            return []
        told, room = self.stop["predicted"], _room(self.stop)
        return [tier for tier in TIERS if tier != self.lacks and (told[f"{tier}_gib"] or 0.0) > room[tier]]

    @property
    def limit(self) -> str:
        """What fills memory at the largest value; empty where no device is, or nothing is known of it."""
        row = self.best or self.stop
        if row is None or row["predicted"]["device_gib"] is None:
            return ""
        told, device, source = row["predicted"], row["predicted"]["device_gib"], "predicted"
        if told.get("is_bound"):  # of activations the memory model knows nothing there
            device, source = row["device_peak_gib"], "measured"
        if device is None:
            return ""
        static, room = told["static_gib"], _room(row)
        text = (
            f"at {row['case']} weights, gradients and the optimizer state that stays take {static:.1f} of the "
            f"{device:.1f} GiB that are {source} of the device's {room['device']:.1f}"
        )
        used = {tier: (told[f"{tier}_gib"], room[tier]) for tier in ("host", "disk") if told[f"{tier}_gib"]}
        elsewhere = " and ".join(f"{gib:.1f} of {limit:.1f} GiB of {tier}" for tier, (gib, limit) in used.items())
        text += f"; {elsewhere} memory beside it" if used else ""
        if self.lacks is None:
            text += "."
        elif self.lacks != "device":
            text += f". It is {' and '.join([self.lacks, *self.lacks_too])} memory that the next one lacks."
        elif static >= STATIC_SHARE * device:
            text += ". Activations hardly count: only more of the state elsewhere makes room for a larger model"
            is_full = bool(used) and all(gib >= FULL_SHARE * limit for gib, limit in used.values())
            text += ", and little is left there." if is_full else "."
        else:
            text += "; the rest are activations and what kernels need."
        if not self.is_open:
            return text
        return f"{text} Nothing {'between' if self.is_apart else 'larger'} was tried: this is not its limit."


@dataclass(frozen=True)
class Limit:
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
        """The tiers that there are."""
        tiers = [("device", self.device_gib), ("host", self.host_gib), ("disk", self.disk_gib)]
        return " + ".join(f"{gib:.1f} GiB of {tier}" for tier, gib in tiers if gib >= 0.05)

    @property
    def text(self) -> str:
        return (
            f"The physical limit of this machine: {short(self.params)} parameters, {self.sum} memory, as much as the "
            f"sweep lets a run have, at {self.param_bytes} bytes a parameter."
        )


def found_in(rows: Sequence[Row]) -> list[Found]:
    """One a method; those that get furthest stand last, of equal ones the fastest."""
    found, values = [], {row["value"] for row in rows}
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        best = max((row for row in mine if row["outcome"] == "ok"), key=lambda row: row["value"], default=None)
        above = [row for row in mine if row["outcome"] != "ok" and (best is None or row["value"] > best["value"])]
        # A run that failed says more than one that was not begun; of those what was said when the largest ran.
        last = best["commit"] if best is not None else None
        stop = min(
            above, key=lambda row: (row["value"], row["outcome"] == PRUNED, row["commit"] != last), default=None
        )
        known = {row["value"] for row in mine}
        between = [
            value for value in values
            if best and stop and best["value"] < value < stop["value"] and value not in known
        ]  # fmt: skip
        found.append(Found(method, mine[0]["is_ours"], best, stop, bool(between)))
    return sorted(found, key=lambda one: _rank(one.best))


def champions(rows: Sequence[Row]) -> list[Row]:
    """The row of ours that got furthest, and that of the others; of equal ones the fastest."""
    best = [one.best for one in found_in(rows) if one.best is not None]
    sides = ([row for row in best if row["is_ours"] == is_ours] for is_ours in (True, False))
    return [max(side, key=_rank) for side in sides if side]


def _room(row: Row) -> dict[str, float]:
    """GiB of each tier that the run of a row may have; of a device that is not there, none."""
    room = room_of(shlex.split(row["flags"]), Tiers(**row["tiers_gib"]))
    return {"device": room.device or 0.0, "host": room.host, "disk": room.disk}


def _rank(row: Row | None) -> tuple[float, float]:
    return (row["value"], row["tokens_per_s"] or 0.0) if row is not None else (0.0, 0.0)


def limit_of(rows: Sequence[Row]) -> Limit:
    """Of the machine that the rows come from: of host memory the most that a run could have, of what disks had free
    the least, which all runs had."""
    tiers = [row["tiers_gib"] for row in rows]
    host_gib, disk_gib = max(one["host"] for one in tiers), min(one["disk"] for one in tiers)
    return Limit(tiers[0]["device"] or 0.0, host_gib, disk_gib, rows[0]["param_bytes"])


HEAD = (
    "method", "largest", "parameters", "tokens/s", "MFU", "step ms", "device GiB (reserved)", "host GiB",
    "disk GiB", "loss", "what stopped the next",
)  # fmt: skip


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Cells of ``HEAD``, a line a method."""
    lines = []
    for found in found_in(rows):
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


def params_of(row: Row) -> int:
    """Counted, or by arithmetic where the run ended before."""
    return int(row["num_params"] or row["params"])


def short(params: float) -> str:
    """Three digits of a number of parameters."""
    value, unit = (params / 1e9, "B") if params >= 999.5e6 else (params / 1e6, "M")
    return f"{format(value, '#.3g').rstrip('.')} {unit}"


def _cell(value: float | None, form: str) -> str:
    return ABSENT if value is None else format(value, form)


LEGEND = (
    "Largest: every step of it was run, in a process of its own, and its loss fell (mean of the first and of the last "
    "quarter of its steps). Device: the most that PyTorch's allocator had given out, and held. Host: growth of the "
    "process, or pinned memory, whichever is more. Step: median after warm-up. MFU: the model's FLOP/s over the data "
    "sheet's of the GPU."
)


def markdown(rows: Sequence[Row]) -> str:
    """What stands beside the rows."""
    first = rows[0]
    lines = heading(f"{first['suite']}: the largest {first['axis']}", first, LEGEND)
    lines += [f"| {' | '.join(cells)} |" for cells in [HEAD, ["---"] * len(HEAD), *table(rows)]]
    told = [f"- {found.method}: {found.limit}" for found in found_in(rows) if found.limit]
    lines += ["", *told, *([""] if told else [])]
    if AXES[first["axis"]].grows:
        lines += [limit_of(rows).text, ""]
    return "\n".join(lines)
