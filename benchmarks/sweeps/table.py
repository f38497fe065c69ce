"""The table of a sweep: the largest value of each method, and what stopped the next."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.rows import GIB, MIB, PRUNED, Row, outcome
from benchmarks.suites.table import heading
from benchmarks.sweeps.axes import AXES
from benchmarks.table import ABSENT, Table, cell_gib, cell_ms, cell_number


@dataclass(frozen=True)
class LargestValue:
    """The largest value that one method trains, and the next, ``is_apart`` if values between were not tried."""

    method: str
    is_ours: bool
    best: Row | None
    stop: Row | None
    is_apart: bool = False

    @property
    def stopped_by(self) -> str:
        if self.stop is None:
            return "nothing larger was tried" if self.best is not None else "nothing was tried"
        if self.stop["outcome"] == PRUNED:
            return f"not tried: {self.stop['why']}"
        text = f"{self.stop['case']}: {outcome(self.stop)}"
        return f"{text}; nothing between was tried" if self.is_apart else text

    @property
    def stopped_short(self) -> str:
        if self.stop is not None and self.stop["outcome"] == PRUNED:
            return f"{self.stop['case']}: predicted not to fit"
        return self.stopped_by


@dataclass(frozen=True)
class MachineLimit:
    device_gib: float
    host_gib: float
    disk_gib: float
    param_bytes: int

    @property
    def params(self) -> float:
        return (self.device_gib + self.host_gib + self.disk_gib) * GIB / self.param_bytes

    @property
    def sum(self) -> str:
        tiers = [("device", self.device_gib), ("host", self.host_gib), ("disk", self.disk_gib)]
        return " + ".join(f"{gib:.1f} GiB of {tier}" for tier, gib in tiers if gib >= 0.05)

    @property
    def text(self) -> str:
        return (
            f"The physical limit of this machine: {short(self.params)} parameters, {self.sum} memory, as much as the "
            f"sweep lets a run have, at {self.param_bytes} bytes a parameter."
        )


def largest_by_method(rows: Sequence[Row]) -> list[LargestValue]:
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
    return sorted(found, key=lambda one: (one.best["value"], one.best["tokens_per_s"] or 0.0) if one.best else (0, 0.0))


def machine_limit(rows: Sequence[Row]) -> MachineLimit:
    """Return the limit of the machine: the most host memory of any run, and the disk that all had."""
    tiers = [row["tiers_gib"] for row in rows]
    host_gib, disk_gib = max(one["host"] for one in tiers), min(one["disk"] for one in tiers)
    return MachineLimit(tiers[0]["device"] or 0.0, host_gib, disk_gib, rows[0]["param_bytes"])


def table(rows: Sequence[Row]) -> Table:
    return (_cpu_table if is_on_cpu(rows) else _gpu_table)(largest_by_method(rows))


def _gpu_table(found: Sequence[LargestValue]) -> Table:
    def device(row: Row) -> str:
        reserved = "" if row["device_reserved_gib"] is None else f" ({row['device_reserved_gib']:.2f})"
        return cell_gib(row["device_peak_gib"]) + reserved

    return _of_methods(found, {
        "tokens/s": lambda row: cell_number(row["tokens_per_s"]),
        "MFU": lambda row: ABSENT if row["mfu"] is None else f"{row['mfu']:.1%}",
        "step ms": lambda row: cell_number(row["step_ms_median"]),
        "device GiB (reserved)": device,
        "host GiB": lambda row: cell_gib(row["host_peak_gib"]),
        "disk GiB": lambda row: cell_gib(row["disk_peak_gib"]),
    })  # fmt: skip


def _cpu_table(found: Sequence[LargestValue]) -> Table:
    def offloaded(row: Row) -> str:
        out_bytes = (row["swapped_out_bytes"] or 0) + (row["optimizer_out_bytes"] or 0)
        return cell_ms(out_bytes / MIB) if row["is_ours"] else ABSENT

    def mib(gib: float | None) -> str:
        return cell_ms(None if gib is None else gib * GIB / MIB)

    return _of_methods(found, {
        "device MiB": lambda row: mib(row["device_peak_gib"]),
        "offloaded MiB a step": offloaded,
        "disk MiB": lambda row: mib(row["disk_peak_gib"]),
    })  # fmt: skip


def _of_methods(found: Sequence[LargestValue], columns: dict[str, Callable[[Row], str]]) -> Table:
    columns = {
        "parameters": lambda row: short(params_of(row)),
        **columns,
        "loss": lambda row: f"{row['loss_first']:.3f} → {row['loss_last']:.3f}",
    }
    return Table.of(found, {
        "method": lambda one: f"**{one.method}**" if one.is_ours else one.method,
        "largest": lambda one: "none that was tried" if one.best is None else one.best["case"],
        **{
            name: lambda one, value=value: ABSENT if one.best is None else value(one.best)  # type: ignore[misc]
            for name, value in columns.items()
        },
        "what stopped the next": lambda one: one.stopped_by,
    })  # fmt: skip


def is_on_cpu(rows: Sequence[Row]) -> bool:
    return rows[0]["tiers_gib"]["device"] is None


def params_of(row: Row) -> int:
    return int(row["num_params"] or row["params"])


def short(params: float) -> str:
    value, unit = (params / 1e9, "B") if params >= 999.5e6 else (params / 1e6, "M")
    return f"{format(value, '#.3g').rstrip('.')} {unit}"


LARGEST = (
    "Largest: all steps were run, in a separate process, and the loss fell (mean of the last quarter of the steps "
    "below that of the first)."
)
CPU_LEGEND = (
    f"{LARGEST} Device: peak memory of the emulated device, beside the model as it was built; "
    "`--swap-cpu-memory-gib` limits it. Times are in the rows alone: without a GPU threads emulate the copies, and the "
    "times say nothing about a GPU."
)
LEGEND = (
    f"{LARGEST} Device: peak of PyTorch's allocator, allocated and (reserved). Host: growth of the "
    "process or pinned memory, whichever is larger. Step: median after warm-up. MFU: the model's FLOP/s ÷ those of the "
    "GPU's data sheet."
)


def markdown(rows: Sequence[Row]) -> str:
    first, on_cpu = rows[0], is_on_cpu(rows)
    lines = heading(f"{first['suite']}: the largest {first['axis']}", first, CPU_LEGEND if on_cpu else LEGEND)
    lines += [str(table(rows)), ""]
    if not on_cpu and AXES[first["axis"]].grows:
        lines += [machine_limit(rows).text, ""]
    return "\n".join(lines)
