"""The tables of docs/benchmarks.md: one a claim, each beside the best other methods."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks import names
from benchmarks.flags import is_guarded, is_ours, value
from benchmarks.report import compare, guard, planner, tables
from benchmarks.report.results import Results
from benchmarks.rows import Row, by_case, outcome, peak_gib
from benchmarks.suites.losses import REPEAT, comparable
from benchmarks.suites.ranking import by_peak, on_frontier, peak, points
from benchmarks.sweeps import table as sweep_table
from benchmarks.table import ABSENT, Table, cell, cell_ms, cell_number, cell_share
from benchmarks.traces.tables import num_checks

NONE = "none"
BY_FLAGS = (
    NONE, "ours-0-3", "ours-0-6-sites", "ours-all-sites", "ours-all-recompute-mlp", "ours-all",
    "full-recompute", "recompute-layernorm-mlp", "offload-attention", "offload-attention-recompute-mlp",
    "deepspeed-checkpoint", "torchtune-offload-one-stream",
)  # fmt: skip
"""Methods that the tables of runs by flags show, where they were measured."""
SWEPT = (
    NONE, "full-recompute", "fine-grained-offload", "megatron-optimizer-0.55-unpinned-full-recompute",
    "ours-planned", "ours-auto", "ours-fit-full-recompute", "ours-fit-disk-full-recompute",
)  # fmt: skip
PLANNER_MODELS = ("L16-h4096", "L4-h8192")
OTHER_MODELS = ("L4-moe", "L6-lengths")
BENCHMARKS = ("h200-dense", "h200-long-context", "h200-planner", "h200-optimizer")
NUM_WORST = 3


@dataclass(frozen=True)
class Brief:
    results: Results

    def rows(self, *suites: str) -> list[Row]:
        return [row for suite in suites for row in self.results.suites.get(suite, [])]

    def case(self, suite: str, case: str) -> list[Row]:
        return [row for row in self.rows(suite) if row["case"] == case]

    @property
    def equality(self) -> Table | None:
        places = {
            "one GPU": ["prove-equality"],
            "two and four GPUs: tensor, pipeline, context, expert, data parallel": ["prove-ranks"],
            "MoE, changing lengths, optimizer state (losses only)": ["h200-planner", "h200-optimizer"],
        }
        found = {
            place: [run.is_equal for suite in suites for run in tables.equal_to_plain(self.rows(suite))]
            for place, suites in places.items()
        }
        return _table([pair for pair in found.items() if pair[1]], {
            "where": lambda pair: pair[0],
            "runs compared": lambda pair: len(pair[1]),
            "equal": lambda pair: sum(pair[1]),
        })  # fmt: skip

    @property
    def planned(self) -> list[tuple[str, Table]]:
        cases = {case: rows for case in PLANNER_MODELS if (rows := self.case("h200-planner", case))}
        return [
            (f"{names.model(rows[0])} [{case}]", methods_table(planned_shown(rows), rows))
            for case, rows in cases.items()
        ]

    @property
    def by_flags(self) -> Table | None:
        return self._side_by_side("h200-dense", ("L16-h4096", "L4-h8192"))

    @property
    def long_context(self) -> Table | None:
        return self._side_by_side("h200-long-context", ("L16-32k", "L6-128k"))

    def _side_by_side(self, suite: str, cases: Sequence[str]) -> Table | None:
        found = {case: rows for case in cases if (rows := self.case(suite, case))}
        ordered = [row for rows in found.values() for row in by_peak(rows) if row["outcome"] == "ok"]
        head = ["method"]
        for case, rows in found.items():
            head += [f"{names.model(rows[0])} [{case}]: GPU GiB", "× step"]
        lines = []
        for label, method in {_label(row): row["method"] for row in ordered if row["method"] in BY_FLAGS}.items():
            line = [label]
            for rows in found.values():
                row = next((row for row in rows if row["method"] == method and row["outcome"] == "ok"), None)
                line += [ABSENT, ABSENT] if row is None else [
                    f"{_gib(peak_gib(row))} ({_gib(row['device_reserved_gib'])})", _times(row, _none(rows))
                ]  # fmt: skip
            lines.append(line)
        return Table(head, lines) if lines else None

    @property
    def other_models(self) -> Table | None:
        cases = {case: self.case("h200-planner", case) for case in OTHER_MODELS}
        found = [
            (row, _none(rows)) for rows in cases.values() for row in by_peak(rows)
            if row["outcome"] == "ok" and row["budget_gib"] is not None and not names.is_plan_file(row)
        ]  # fmt: skip
        return _table(found, {
            "model": lambda pair: f"{names.model(pair[0])} [{pair[0]['case']}]",
            "**auto**: budget GiB": lambda pair: names.gib(pair[0]["budget_gib"]),
            "GPU GiB": lambda pair: _gib(peak_gib(pair[0])),
            "without offload": lambda pair: _gib(None if pair[1] is None else peak_gib(pair[1])),
            "× step": lambda pair: _times(*pair),
        })  # fmt: skip

    @property
    def prediction(self) -> dict[str, str] | None:
        cases = by_case(self.rows("h200-planner", "h200-optimizer"))
        points = [point for rows in cases.values() for point in planner.points(rows)]
        return {
            "num": str(len(points)), "num_within": str(sum(bool(point.is_within) for point in points)),
            "peak": cell_share(planner.largest([point.peak_error for point in points])),
            "step": cell_share(planner.largest([point.step_error for point in points])),
        } if points else None  # fmt: skip

    @property
    def optimizer(self) -> tuple[str, Table] | None:
        rows = self.case("h200-optimizer", "8b")
        if not rows:
            return None
        table = Table.of(by_peak(rows), {
            "method": _label,
            "GPU GiB": lambda row: _gib(peak_gib(row)) if row["outcome"] == "ok" else outcome(row),
            "host GiB": lambda row: _gib(row["host_peak_gib"]) if row["outcome"] == "ok" else None,
            "tokens/s": lambda row: cell_number(row["tokens_per_s"]) if row["outcome"] == "ok" else None,
        })  # fmt: skip
        return f"{names.model(next(row for row in rows if row['num_params']))} [8b]", table

    @property
    def sweep(self) -> Table | None:
        rows = [row for row in self.results.sweeps.get("h200-depth", []) if row["method"] in SWEPT]
        best = [one.best for one in sweep_table.largest_by_method(rows) if one.best is not None]

        def host(row: Row) -> str:
            disk = f" + {row['disk_peak_gib']:.0f} disk" if row["disk_peak_gib"] else ""
            return f"{row['host_peak_gib']:.0f}{disk}"

        return _table(best, {
            "method": _label,
            "parameters, layers": lambda row: f"{names.billions(sweep_table.params_of(row))}, {row['value']}",
            "tokens/s": lambda row: cell_number(row["tokens_per_s"]),
            "host GiB": host,
        })  # fmt: skip

    @property
    def sequences(self) -> str | None:
        found = sweep_table.largest_by_method(self.results.sweeps.get("h200-sequence", []))
        best = [row for one in found if (row := one.best) is not None]
        parts = [f"{'**ours**' if row['is_ours'] else names.method(row)} {names.tokens(row['value'])}" for row in best]
        return f"{names.billions(sweep_table.params_of(best[0]))}: {', '.join(parts)}" if best else None

    @property
    def sweep_model(self) -> str:
        row = self.results.sweeps["h200-depth"][0]
        length = names.model({**row, "num_params": None, "params": None})
        return f"hidden size {int(value(row, '--hidden-size') or 0):,}, {length}"

    @property
    def guard(self) -> Table | None:
        rows = guard.guarded(self.rows("prove-equality"))
        alone = [row for row in rows if not row.get("held_gib") and row["command"] == rows[0]["command"]]
        return _table(alone, {
            "run": _guard_label,
            "outcome": lambda row: "trains" if row["outcome"] == "ok" else outcome(row),
            "saved tensors GiB": lambda row: _gib(row.get("saved_peak_gib") or None),
            "rescues": lambda row: cell_number(row["num_rescues"]) if row["outcome"] == "ok" else None,
            "s/step": lambda row: None if row["step_ms_median"] is None else cell_ms(row["step_ms_median"] / 1e3),
        })  # fmt: skip

    @property
    def guard_is_equal(self) -> bool:
        rows = guard.guarded(self.rows("prove-equality"))
        return all(line[-1].startswith(("yes", "reference", ABSENT)) for line in guard.table(rows).rows)

    @property
    def guard_model(self) -> str:
        done = next((row for row in guard.guarded(self.rows("prove-equality")) if row["outcome"] == "ok"), None)
        return "" if done is None else f"{names.model(done)} [{_case_of(done)}]"

    @property
    def traces(self) -> Table | None:
        return _table([profile for group in self.results.profiles for profile in group.profiles], {
            "traced run": lambda profile: profile.subject,
            "profiler": lambda profile: profile.profiler,
            "checks": lambda profile: cell_number(num_checks(profile.findings)),
            "violations": lambda profile: cell_number(len(profile.findings["violations"])),
            "copy time hidden": lambda profile: cell_share(profile.findings["hidden_share"]),
        })  # fmt: skip

    @property
    def examples(self) -> Table | None:
        table = _table(self.results.examples, {
            "script": lambda one: f"`{one.script}`",
            "GPU GiB: plain": lambda one: _gib(one.plain[1]),
            "swapped": lambda one: _gib(one.swapped[1]),
            "ms a step: plain": lambda one: cell_number(one.plain[0]),
            "swapped ": lambda one: cell_number(one.swapped[0]),
        })  # fmt: skip
        return None if table is None else Table([title.strip() for title in table.head], table.rows)

    @property
    def better(self) -> Table | None:
        found = []
        for rows in self._benchmarks():
            lost = [loss for loss in compare.losses(rows) if loss.ours is not None]
            found += [max(lost, key=lambda loss: loss.ratio)] if lost else []
        return _table(sorted(found, key=lambda loss: -loss.ratio)[:NUM_WORST], {
            "model": lambda loss: names.model(loss.baseline),
            "GPU GiB": lambda loss: _gib(peak_gib(loss.baseline)),
            "faster": lambda loss: names.method(loss.baseline),
            "our fastest": lambda loss: _label(loss.ours or {}),
            "by ×": lambda loss: f"{loss.ratio:.2f}",
        })  # fmt: skip

    @property
    def worst(self) -> dict[str, str] | None:
        lost = [duel for duel in self._duels() if duel.faster is compare.Faster.BASELINE]
        if not lost:
            return None
        duel = max(lost, key=lambda duel: duel.ratio or 1.0)
        assert duel.baseline is not None
        return {
            "model": names.model(duel.ours), "ours": names.method(duel.ours), "other": names.method(duel.baseline),
            "ratio": f"{duel.ratio:.2f}",
        }  # fmt: skip

    @property
    def tally(self) -> dict[str, int] | None:
        found = {"points": 0, "ours": 0, "baseline": 0, "neither": 0, "alone": 0}
        for duel in self._duels():
            found["points"] += 1
            found[duel.faster.value if duel.faster else "alone"] += 1
        return found if found["points"] else None

    @property
    def below(self) -> list[str]:
        found = []
        for rows in self._benchmarks():
            mine = min((peak(row) for row in points(rows) if is_ours(row)), default=None)
            under = [loss.baseline for loss in compare.losses(rows) if loss.ours is None]
            if mine is not None and under:
                others = ", ".join(f"{names.method(row)} {_gib(peak_gib(row))}" for row in under)
                found.append(f"{names.model(rows[0])}: {others}; ours {_gib(mine)} GiB")
        return found

    def _benchmarks(self) -> list[list[Row]]:
        cases = [rows for suite in BENCHMARKS for rows in by_case(self.rows(suite)).values()]
        is_other = lambda row: not is_ours(row) and row["method"] not in (NONE, REPEAT)  # noqa: E731
        return [rows for rows in cases if any(map(is_other, rows))]

    def _duels(self) -> Iterator[compare.Duel]:
        for rows in self._benchmarks():
            yield from compare.duels(rows)

    @property
    def machine(self) -> str:
        """Return the GPUs of runs on one GPU: runs on several prove equality alone."""
        alone = [row for _, rows in self.results.files for row in rows if (row.get("num_ranks") or 1) == 1]
        return ", ".join(sorted({row["machine"]["gpu"] for row in alone}))


def planned_shown(rows: Sequence[Row]) -> list[Row]:
    """Return the runs that planned themselves, `none`, others that none beats, and the nearest that offloads."""
    rows = comparable(rows)
    others = [row for row in rows if not is_ours(row) and row["method"] != REPEAT]
    best = on_frontier(others)
    offloads = [row for row in points(others) if "offload" in row["method"] and "recompute" in row["method"]]
    nearest = min(offloads, key=peak, default=None)
    return [
        row for row in rows
        if row in best or row is nearest or (row.get("budget_gib") is not None and not names.is_plan_file(row))
    ]  # fmt: skip


def methods_table(shown: Sequence[Row], rows: Sequence[Row]) -> Table:
    none = _none(rows)
    return Table.of([row for row in by_peak(shown) if row["outcome"] == "ok"], {
        "method": _label,
        "GPU GiB": lambda row: _gib(peak_gib(row)),
        "step ms": lambda row: cell_number(row["step_ms_median"]),
        "× step": lambda row: _times(row, none),
    })  # fmt: skip


def _table[Item](items: Sequence[Item], columns: dict[str, Callable[[Item], object]]) -> Table | None:
    return Table.of(items, columns) if items else None


def _none(rows: Sequence[Row]) -> Row | None:
    return next((row for row in rows if row["method"] == NONE and row["outcome"] == "ok"), None)


def _label(row: Row) -> str:
    return f"**{names.method(row)}**" if is_ours(row) else names.method(row)


def _times(row: Row, none: Row | None) -> str:
    return cell(None if none is None else row["step_ms_median"] / none["step_ms_median"], ".2f")


def _gib(found: float | None) -> str:
    return cell(found, ".1f")


def _guard_label(row: Row) -> str:
    if (budget := value(row, "--swap-memory-gib")) is not None:
        return f"**auto, {names.gib(float(budget))} GiB + guard**"
    return "**guard alone**" if is_guarded(row) else "no offload"


def _case_of(row: Row) -> str:
    found = re.search(r"--case (\S+)", row["command"])
    return found[1] if found else str(row["case"])
