"""The tables of docs/benchmarks.md: one a claim, each beside the best other methods."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import names
from benchmarks.flags import is_guarded, is_ours, value
from benchmarks.report import compare, guard, planner, tables
from benchmarks.report.profiles import Group
from benchmarks.report.results import Example, Results
from benchmarks.report.text import ABSENT, Table, cell_number, cell_share
from benchmarks.rows import Row, outcome, peak_gib
from benchmarks.suites.losses import REPEAT, comparable
from benchmarks.sweeps import table as sweep_table

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
NUM_WORST = 3


@dataclass(frozen=True)
class Brief:
    """Computed tables and figures of the brief page; a part without results is ``None`` or empty."""

    results: Results

    def case(self, suite: str, case: str) -> list[Row]:
        return [row for row in self.results.suites.get(suite, []) if row["case"] == case]

    # ------------------------------------------------------------------------------------------ equality

    @property
    def equality(self) -> Table | None:
        """Count the runs that were compared bit for bit with a run without Megatron Swap, and those that are equal."""
        found = {
            "one GPU": self._equal("prove-equality"),
            "two and four GPUs: tensor, pipeline, context, expert, data parallel": self._equal("prove-ranks"),
            "MoE, changing lengths, optimizer state (losses only)": self._equal("h200-planner", "h200-optimizer"),
        }
        lines = [[where, str(len(equal)), str(sum(equal))] for where, equal in found.items() if equal]
        return Table(["where", "runs compared", "equal"], lines) if lines else None

    def _equal(self, *suites: str) -> list[bool]:
        """Return whether each run of ours is equal to the run without Megatron Swap that it was compared with."""
        rows = [self.results.suites.get(suite, []) for suite in suites]
        return [run.is_equal for part in rows for run in tables.equal_to_plain(part)]

    # ------------------------------------------------------------------------------------------ memory and time

    @property
    def planned(self) -> list[tuple[str, Table]]:
        """Return a title and the table of planned runs and the best other methods, model by model."""
        found = []
        for case in PLANNER_MODELS:
            if rows := self.case("h200-planner", case):
                found.append((f"{names.model(rows[0])} [{case}]", methods_table(planned_shown(rows), rows)))
        return found

    @property
    def by_flags(self) -> Table | None:
        return self._side_by_side("h200-dense", ("L16-h4096", "L4-h8192"))

    @property
    def long_context(self) -> Table | None:
        return self._side_by_side("h200-long-context", ("L16-32k", "L6-128k"))

    def _side_by_side(self, suite: str, cases: Sequence[str]) -> Table | None:
        """Build one table of several models, a method a line; peaks are allocated and (reserved) memory."""
        found = {case: rows for case in cases if (rows := self.case(suite, case))}
        ordered = [row for rows in found.values() for row in compare.by_peak(rows) if row["outcome"] == "ok"]
        head = ["method"]
        for case, rows in found.items():
            head += [f"{names.model(rows[0])} [{case}]: GPU GiB", "× step"]
        lines = []
        for label, method in {_label(row): row["method"] for row in ordered if row["method"] in BY_FLAGS}.items():
            line = [label]
            for rows in found.values():
                row = next((row for row in rows if row["method"] == method and row["outcome"] == "ok"), None)
                none = _none(rows)
                line += [ABSENT, ABSENT] if row is None else [
                    f"{_gib(peak_gib(row))} ({_gib(row['device_reserved_gib'])})", _times(row, none)
                ]  # fmt: skip
            lines.append(line)
        return Table(head, lines) if lines else None

    @property
    def other_models(self) -> Table | None:
        """Build the table of runs of a mixture of experts and of changing lengths that plan themselves."""
        lines = []
        for case in OTHER_MODELS:
            rows = self.case("h200-planner", case)
            none = _none(rows)
            lines += [
                [f"{names.model(row)} [{case}]", names.gib(row["budget_gib"]), _gib(peak_gib(row)),
                 _gib(None if none is None else peak_gib(none)), _times(row, none)]
                for row in compare.by_peak(rows)
                if row["outcome"] == "ok" and row["budget_gib"] is not None and not names.is_plan_file(row)
            ]  # fmt: skip
        head = ["model", "**auto**: budget GiB", "GPU GiB", "without offload", "× step"]
        return Table(head, lines) if lines else None

    @property
    def prediction(self) -> dict[str, str] | None:
        """Return how many planned runs kept their budget, and the largest errors of peak and step time."""
        rows = [*self.results.suites.get("h200-planner", []), *self.results.suites.get("h200-optimizer", [])]
        points = [point for found in compare.cases(rows).values() for point in planner.points(found)]
        if not points:
            return None
        return {
            "num": str(len(points)), "num_within": str(sum(bool(point.is_within) for point in points)),
            "peak": cell_share(planner.largest([point.peak_error for point in points])),
            "step": cell_share(planner.largest([point.step_error for point in points])),
        }  # fmt: skip

    # ------------------------------------------------------------------------------------------ optimizer, size

    @property
    def optimizer(self) -> tuple[str, Table] | None:
        rows = self.case("h200-optimizer", "8b")
        if not rows:
            return None
        lines = [
            [_label(row), _gib(peak_gib(row)), _gib(row["host_peak_gib"]), cell_number(row["tokens_per_s"])]
            if row["outcome"] == "ok" else [_label(row), outcome(row), ABSENT, ABSENT]
            for row in compare.by_peak(rows)
        ]  # fmt: skip
        done = next(row for row in rows if row["num_params"])
        return f"{names.model(done)} [8b]", Table(["method", "GPU GiB", "host GiB", "tokens/s"], lines)

    @property
    def sweep(self) -> Table | None:
        """Build the table of the largest model by method."""
        rows = [row for row in self.results.sweeps.get("h200-depth", []) if row["method"] in SWEPT]
        lines = []
        for found in sweep_table.largest_by_method(rows):
            row = found.best
            if row is not None:
                size = f"{names.billions(sweep_table.params_of(row))}, {row['value']}"
                disk = f" + {row['disk_peak_gib']:.0f} disk" if row["disk_peak_gib"] else ""
                host = f"{row['host_peak_gib']:.0f}{disk}"
                lines.append([_label(row), size, cell_number(row["tokens_per_s"]), host])
        return Table(["method", "parameters, layers", "tokens/s", "host GiB"], lines) if lines else None

    @property
    def sequences(self) -> str | None:
        """Return the longest sequence that each method trains, in a line."""
        found = sweep_table.largest_by_method(self.results.sweeps.get("h200-sequence", []))
        best = [row for one in found if (row := one.best) is not None]
        parts = [f"{'**ours**' if row['is_ours'] else names.method(row)} {names.tokens(row['value'])}" for row in best]
        return f"{names.billions(sweep_table.params_of(best[0]))}: {', '.join(parts)}" if best else None

    @property
    def sweep_model(self) -> str:
        """Return width and sequence length of the models that the sweep trains."""
        row = self.results.sweeps["h200-depth"][0]
        length = names.model({**row, "num_params": None, "params": None})
        return f"hidden size {int(value(row, '--hidden-size') or 0):,}, {length}"

    # ------------------------------------------------------------------------------------------ guard, traces

    @property
    def guard(self) -> Table | None:
        """Build the table of runs on one GPU, undisturbed, that do not fit without the guard or a plan."""
        rows = guard.guarded(self.results.suites.get("prove-equality", []))
        lines = []
        for row in rows:
            if row.get("held_gib") or row["command"] != rows[0]["command"]:
                continue
            saved = _gib(row.get("saved_peak_gib") or None)
            step = ABSENT if row["step_ms_median"] is None else f"{row['step_ms_median'] / 1e3:.1f}"
            rescues = ABSENT if row["outcome"] != "ok" else cell_number(row["num_rescues"])
            what = _guard_label(row)
            lines.append([what, "trains" if row["outcome"] == "ok" else outcome(row), saved, rescues, step])
        head = ["run", "outcome", "saved tensors GiB", "rescues", "s/step"]
        return Table(head, lines) if lines else None

    @property
    def guard_is_equal(self) -> bool:
        """Return whether all guarded runs that train have the losses, norms and weights of their reference."""
        rows = guard.guarded(self.results.suites.get("prove-equality", []))
        return all(line[-1].startswith(("yes", "reference", ABSENT)) for line in guard.table(rows).rows)

    @property
    def guard_model(self) -> str:
        rows = guard.guarded(self.results.suites.get("prove-equality", []))
        done = next((row for row in rows if row["outcome"] == "ok"), None)
        return "" if done is None else f"{names.model(done)} [{_case_of(done)}]"

    @property
    def traces(self) -> Table | None:
        lines = [
            [group.subject, profile.profiler, cell_number(_num_checks(profile.findings)),
             cell_number(len(profile.findings["violations"])), cell_share(profile.findings["hidden_share"])]
            for group in self._groups for profile in group.profiles
        ]  # fmt: skip
        return Table(["traced run", "profiler", "checks", "violations", "copy time hidden"], lines) if lines else None

    @property
    def _groups(self) -> list[Group]:
        return self.results.profiles

    @property
    def examples(self) -> Table | None:
        """Build the table of the models that are not Megatron's."""
        lines = [_example(one) for one in self.results.examples]
        return Table(["script", "GPU GiB: plain", "swapped", "ms a step: plain", "swapped"], lines) if lines else None

    # ------------------------------------------------------------------------------------------ where others win

    @property
    def better(self) -> Table | None:
        """Build the table of the other methods that beat all of our points within the same memory: one a model."""
        found = []
        for _, rows in self._benchmarks():
            lost = [(loss.ratio, loss) for loss in compare.losses(rows) if loss.ours is not None and loss.ratio]
            found += [max(lost, key=lambda pair: pair[0])] if lost else []
        lines = []
        for ratio, loss in sorted(found, key=lambda pair: -pair[0])[:NUM_WORST]:
            assert loss.ours is not None
            other, ours = loss.baseline, loss.ours
            lines.append([
                names.model(other), _gib(peak_gib(other)), names.method(other), _label(ours), f"{ratio:.2f}",
            ])  # fmt: skip
        head = ["model", "GPU GiB", "faster", "our fastest", "by ×"]
        return Table(head, lines) if lines else None

    @property
    def worst(self) -> dict[str, str] | None:
        """Return our point that another method beats by most within the same memory."""
        lost = [
            duel for _, rows in self._benchmarks() for duel in compare.duels(rows)
            if duel.faster is compare.Faster.BASELINE
        ]  # fmt: skip
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
        """Count our points by which side is faster within the same memory; ``alone``: no other method fits."""
        found = {"points": 0, "ours": 0, "baseline": 0, "neither": 0, "alone": 0}
        for _, rows in self._benchmarks():
            for duel in compare.duels(rows):
                found["points"] += 1
                found[duel.faster.value if duel.faster else "alone"] += 1
        return found if found["points"] else None

    @property
    def below(self) -> list[str]:
        """Return, model by model, the other methods that need less memory than all of ours."""
        found = []
        for _, rows in self._benchmarks():
            mine = min((compare.peak(row) for row in compare.points(rows) if is_ours(row)), default=None)
            under = [loss.baseline for loss in compare.losses(rows) if loss.ours is None]
            if mine is not None and under:
                others = ", ".join(f"{names.method(row)} {_gib(peak_gib(row))}" for row in under)
                found.append(f"{names.model(rows[0])}: {others}; ours {_gib(mine)} GiB")
        return found

    def _benchmarks(self) -> list[tuple[str, list[Row]]]:
        """Return the cases with other methods beside ours, by suite."""
        wanted = ("h200-dense", "h200-long-context", "h200-planner", "h200-optimizer")
        return [
            (case, rows) for suite in wanted for case, rows in compare.cases(self.results.suites.get(suite, [])).items()
            if any(not is_ours(row) and row["method"] not in (NONE, REPEAT) for row in rows)
        ]  # fmt: skip

    @property
    def machine(self) -> str:
        """Return the GPUs of runs on one GPU: runs on several prove equality alone."""
        alone = [row for _, rows in self.results.files for row in rows if (row.get("num_ranks") or 1) == 1]
        return ", ".join(sorted({row["machine"]["gpu"] for row in alone}))


def planned_shown(rows: Sequence[Row]) -> list[Row]:
    """Return the planned runs found in training, the unswapped run, and the other methods that none of them beats.

    The fastest run that offloads with Megatron's own means is shown as well.
    """
    rows = comparable(rows)
    others = [row for row in rows if not is_ours(row) and row["method"] != REPEAT]
    best = compare.on_frontier(others)
    offloads = [row for row in compare.points(others) if "offload" in row["method"] and "recompute" in row["method"]]
    nearest = min(offloads, key=compare.peak, default=None)
    return [
        row for row in rows
        if row in best or row is nearest or (row.get("budget_gib") is not None and not names.is_plan_file(row))
    ]  # fmt: skip


def methods_table(shown: Sequence[Row], rows: Sequence[Row]) -> Table:
    """Build the table of some runs of one case: method, memory, step time."""
    none = _none(rows)
    lines = [
        [_label(row), _gib(peak_gib(row)), cell_number(row["step_ms_median"]), _times(row, none)]
        for row in compare.by_peak(shown) if row["outcome"] == "ok"
    ]  # fmt: skip
    return Table(["method", "GPU GiB", "step ms", "× step"], lines)


def _none(rows: Sequence[Row]) -> Row | None:
    return next((row for row in rows if row["method"] == NONE and row["outcome"] == "ok"), None)


def _label(row: Row) -> str:
    return f"**{names.method(row)}**" if is_ours(row) else names.method(row)


def _times(row: Row, none: Row | None) -> str:
    return ABSENT if none is None else f"{row['step_ms_median'] / none['step_ms_median']:.2f}"


def _gib(found: float | None) -> str:
    return ABSENT if found is None else f"{found:.1f}"


def _guard_label(row: Row) -> str:
    if (budget := value(row, "--swap-memory-gib")) is not None:
        return f"**auto, {names.gib(float(budget))} GiB + guard**"
    return "**guard alone**" if is_guarded(row) else "no offload"


def _case_of(row: Row) -> str:
    found = re.search(r"--case (\S+)", row["command"])
    return found[1] if found else str(row["case"])


def _num_checks(findings: dict[str, object]) -> int:
    checks = findings["checks"]
    assert isinstance(checks, dict)
    return sum(check["num_checked"] for check in checks.values())


def _example(one: Example) -> list[str]:
    plain, swapped = one.plain, one.swapped
    return [f"`{one.script}`", f"{plain[1]:.1f}", f"{swapped[1]:.1f}", f"{plain[0]:.0f}", f"{swapped[0]:.0f}"]
