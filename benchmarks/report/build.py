"""Build the report from docs/results: read rows, fill the template, write Markdown and HTML, check for changes."""

from __future__ import annotations

import base64
import difflib
import mimetypes
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import markdown  # type: ignore[import-untyped]

from benchmarks.report import compare, guard, optimizer, overhead, planner, profiles, sweeps, tables, text
from benchmarks.report.flags import (
    KEEPS,
    OFFLOADS,
    RECOMPUTES,
    added,
    is_ours,
    is_planned,
    means,
    shape,
    swapped_layers,
)
from benchmarks.report.pictures import Picture, frontier_picture, load_picture
from benchmarks.report.predictions import broken
from benchmarks.rows import Row, outcome, read_rows
from benchmarks.suites import losses
from benchmarks.suites.suite import SuiteError, find_suite, load_suite

HERE = Path(__file__).parent
DIAGRAM = HERE / "streams.svg"
PLANNER_SUITE = "h200-planner"
SUITES = ("h200-dense", "h200-long-context", "h200-moe", PLANNER_SUITE, optimizer.SUITE)
COMMANDS = {
    **{name: f"python tools/bench.py --suite {name} --output docs/results/{name}.jsonl" for name in SUITES},
    "prove-overhead": "python tools/verify.py overhead --output docs/results/h200-overhead.jsonl",
    "prove-equality": "python tools/verify.py equality --spec transformer_engine local --output equality.jsonl",
    "prove-ranks": "python tools/verify.py ranks --case tp2-sp pp2-vpp dp2-distopt --output ranks.jsonl",
    "sweep": sweeps.COMMAND,
    "profile": "bash tools/profile.sh --swap-layers …",
}
ASIDE = ("earlier", "again")
"""A result file with one of these words in its name is quoted by other documents and left out of the report."""


@dataclass
class Results:
    """The content of docs/results."""

    folder: Path
    files: list[tuple[str, list[Row]]]
    profiles: list[profiles.Group]
    literature: list[dict[str, Any]]
    suites: dict[str, list[Row]] = field(init=False)
    """Rows by suite; ``SUITE, FILE`` for a benchmark whose file is not named after its suite."""
    sweeps: dict[str, list[Row]] = field(init=False)

    def __post_init__(self) -> None:
        others, self.sweeps = sweeps.split(self.files)
        self.suites = {}
        for name, row in others:
            # Times are compared within one file only: on another day the machine may be another one.
            suite, has_own = row["suite"], row["suite"].startswith("prove-") or Path(name).stem == row["suite"]
            self.suites.setdefault(suite if has_own else f"{suite}, {name}", []).append(row)


def read_results(folder: Path) -> Results:
    """Read docs/results.

    Raises:
        FileNotFoundError: there is no such folder.
        RowError: a row does not match the schema.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: the report is made from the results in it")
    paths = sorted(folder.glob("*.jsonl"), key=lambda path: path.stem)
    paths = [path for path in paths if not any(word in path.stem for word in ASIDE)]
    literature = folder / "literature.toml"
    return Results(
        folder,
        [(path.name, read_rows(path)) for path in paths],
        profiles.read_profiles(folder),
        tomllib.loads(literature.read_text())["works"] if literature.exists() else [],
    )


@dataclass
class Case:
    """One case of a benchmark suite, as the template shows it."""

    name: str
    rows: list[Row]
    picture: Picture | None
    unmeasured: list[str]
    """Methods of the suite that have no row in this case."""

    @property
    def shape(self) -> Any:
        return shape(self.rows[0])

    @property
    def num_rounds(self) -> int:
        return max((row.get("num_rounds") or 1 for row in self.rows), default=1)

    @property
    def has_rounds(self) -> bool:
        return self.num_rounds > 1

    @property
    def conditions(self) -> list[str]:
        """Return sentences about what is special in this case's runs."""
        found = []
        if self.rows[0].get("peak") == "reserved":
            found.append("The peak is the allocator's reserved memory.")
        if schedule := self.rows[0].get("sequence_schedule"):
            parts = [f"{num_steps} steps of {length} tokens" for num_steps, length in schedule]
            found.append(f"The sequence length changes: {text.listed(parts)}, repeatedly.")
        if "--swap-deterministic" in self.rows[0]["flags"].split():
            found.append("All kernels are deterministic, so that losses can be bit-identical.")
        return found

    @property
    def unswapped(self) -> Row | None:
        return next((row for row in self.rows if row["method"] == "none"), None)

    @property
    def num_params_billion(self) -> float | None:
        found = [row["num_params"] for row in self.rows if row["num_params"]]
        return found[0] / 1e9 if found else None

    @property
    def frontier_names(self) -> list[str]:
        return [tables.name(row) for row in compare.on_frontier(self.rows)]

    @property
    def tally(self) -> dict[str, int]:
        """Count our points by which side is faster; ``alone``: no baseline fits at their peak."""
        found = {"alone": 0, **{side.value: 0 for side in compare.Faster}}
        for duel in self.duels:
            found[duel.faster.value if duel.faster else "alone"] += 1
        return found

    @property
    def flagged(self) -> list[Row]:
        """Return the methods whose losses differ by more than noise."""
        noise = losses.loss_noise(self.rows)
        return [row for row in self.rows if losses.is_beyond_noise(row, noise)]

    @property
    def refused(self) -> list[Row]:
        return [row for row in self.rows if row["outcome"] == "refused"]

    @property
    def loss_noise(self) -> str:
        """Return where the noise estimate for the losses comes from."""
        if losses.loss_noise(self.rows) is None:
            return "too few methods ran to estimate the noise"
        own = [row for row in self.rows if row["method"] in (row.get("reference"), losses.REPEAT)]
        if any(row.get("loss_max_rel_diff") for row in own):
            return "the noise is the difference between repeated runs of the reference"
        return "the reference ran once, so the noise is the median of these differences"

    repeats = property(lambda self: compare.repeats(self.rows))
    methods_table = property(lambda self: tables.methods_table(self.rows))
    has_peers = property(lambda self: any(not is_ours(row) and KEEPS not in means(row) for row in self.rows))
    duels = property(lambda self: compare.duels(self.rows) if self.has_peers else [])
    duels_table = property(lambda self: tables.duels_table(self.duels))
    reserved_duels_table = property(
        lambda self: tables.duels_table(compare.duels(self.rows, compare.RESERVED), compare.RESERVED)
    )
    counts_reserved = property(lambda self: self.rows[0].get("peak") == "reserved")
    planned = property(lambda self: planner.points(self.rows))
    planned_table = property(lambda self: planner.points_table(self.planned, self.rows))
    planned_failed = property(lambda self: planner.failed(self.rows))
    losses = property(lambda self: compare.losses(self.rows))
    ladder = property(lambda self: overhead.ladder(self.rows))


@dataclass
class Suite:
    """A benchmark suite; without cases it has not been measured yet."""

    name: str
    command: str
    cases: list[Case]
    unmeasured: list[str]
    """Cases of the suite's file that have no row."""

    def legend(self) -> list[tuple[str, str, str, str]]:
        """Return name, description, added flags and case of each method.

        The case is empty, and the method listed once, where the flags are the same in every case.
        """
        found: dict[str, dict[str, tuple[str, str]]] = {}
        for case in self.cases:
            others = [case.unswapped] if case.unswapped else case.rows
            for row in case.rows:
                more = added(row, others) if len(case.rows) > 1 else row["flags"]
                found.setdefault(row["method"], {}).setdefault(more, (row.get("what") or "", case.name))
        return [
            (method, what, more, case if len(by_flags) > 1 else "")
            for method, by_flags in found.items()
            for more, (what, case) in by_flags.items()
        ]


def build_suites(results: Results, pictures: Path) -> list[Suite]:
    """Return the suites of the report, measured or not, then any other benchmark in the results."""
    measured = [row for rows in results.suites.values() for row in rows]
    missing = {*SUITES} - {row["suite"] for row in measured}
    others = [name for name in results.suites if name not in SUITES and not name.startswith("prove-")]
    suites = []
    for name in (*(name for name in SUITES if name in results.suites or name in missing), *others):
        cases = []
        measured_here = results.suites.get(name, [])
        suite = measured_here[0]["suite"] if measured_here else name
        planned = _planned(suite)
        ran = {(row["case"], row["method"]) for row in measured if row["suite"] == suite}
        for case, rows in compare.cases(measured_here).items():
            path = pictures / f"{profiles.anchor(f'{name} {case}')}.png"
            has_points = bool(compare.points(rows)) and all("is_ours" in row for row in rows)
            unmeasured = [method for method in planned.get(case, ()) if (case, method) not in ran]
            cases.append(Case(case, rows, frontier_picture(path, rows) if has_points else None, unmeasured))
        command = COMMANDS.get(name, f"python tools/bench.py --suite {name}")
        left = [case for case in planned if case not in {case for case, _ in ran}]
        suites.append(Suite(name, command, cases, left))
    return suites


def _planned(suite: str) -> dict[str, list[str]]:
    """Return the methods of each case of a suite; empty where the suite's file is not in the repository."""
    try:
        found = load_suite(find_suite(suite))
    except SuiteError:
        return {}
    return {case.name: [method.name for method in case.methods] for case in found.cases}


def reason(loss: compare.Loss) -> dict[str, Any]:
    """Return what the rows say about why the baseline is better; ``None`` or false where they do not say it."""
    baseline = loss.baseline
    recompute_only = loss.rung.unswapped if loss.rung and loss.rung.unswapped["method"] != "none" else None
    return {
        "is_link_bound": loss.rung.is_link_bound if loss.rung else None,
        "baseline_recomputes": RECOMPUTES in means(baseline),
        "baseline_offloads": OFFLOADS in means(baseline),
        "recompute_only": recompute_only,
        "is_recompute_slower": recompute_only is not None
        and recompute_only["step_ms_median"] >= baseline["step_ms_median"],
    }


def context(results: Results, output: Path) -> tuple[dict[str, Any], list[Picture]]:
    """Return the template's variables and the pictures that the report shows."""
    folder = output / "report"
    suites = build_suites(results, folder)
    swept = sweeps.build_sweeps(results.sweeps, folder)
    overhead_cases = compare.cases(results.suites.get("prove-overhead", []))
    measured = {f"{case} (prove-overhead)": rows for case, rows in overhead_cases.items()}
    for suite in suites:
        measured.update({f"{case.name} ({suite.name})": case.rows for case in suite.cases})
    ladders = {name: steps for name, rows in measured.items() if (steps := overhead.ladder(rows))}
    plain = {name: [step for step in steps if overhead.is_plain(step)] for name, steps in ladders.items()}
    plain = {name: steps for name, steps in plain.items() if any(step.load is not None for step in steps)}
    curve = load_picture(folder / "overhead.png", plain) if plain else None
    pictures = [sweep.picture for sweep in swept]
    pictures += [case.picture for suite in suites for case in suite.cases if case.picture is not None]
    equality = {name: tables.equal_runs(results.suites.get(name, [])) for name in ("prove-equality", "prove-ranks")}
    named = {
        "suites": suites,
        "sweeps": swept,
        "ladders": ladders,
        "without_unswapped": {
            name: [row for row in rows if row["method"] == "none"]
            for name, rows in measured.items()
            if name not in ladders
            and any(swapped_layers(row) is not None and not is_planned(row) for row in rows)
        },
        "optimizer": optimizer,
        "state_moved": {name: points for name, rows in measured.items() if (points := optimizer.moved(rows))},
        "costs": [cost for rows in measured.values() if (cost := overhead.case_cost(rows)) is not None],
        "plain": plain,
        "curve": curve,
        "groups": results.profiles,
        "equality": equality,
        "guard": guard,
        "guarded": [row for name in equality for row in guard.guarded(results.suites.get(name, []))],
        "guard_costs": guard.costs([case for suite in suites for case in suite.cases]),
        "literature": results.literature,
        "files": results.files,
        "versions": _versions(results),
        "commands": COMMANDS,
        "free_share": overhead.FREE_RATIO - 1.0,
        "noise_share": compare.LEAST_RATIO - 1.0,
        "same_reserved_gib": compare.SAME_GIB[compare.RESERVED],
        "has_rounds": any(case.has_rounds for suite in suites for case in suite.cases),
        "unexplained": {
            name: [step for step in steps if step.is_unexplained(compare.LEAST_RATIO)] for name, steps in plain.items()
        },
        "diagram": _relative(DIAGRAM, output),
        "results": _relative(results.folder, output),
        "link_to": lambda path: _relative(path, output),
        "t": text,
        "tables": tables,
        "planner": planner,
        "planner_suite": PLANNER_SUITE,
        "num_planned": sum(len(case.planned) + len(case.planned_failed) for suite in suites for case in suite.cases),
        "peak_of": compare.peak,
        "profiles": profiles,
        "reason": reason,
        "is_ours": is_ours,
        "outcome": outcome,
    }
    return named, [*pictures, *([curve] if curve else [])]


def _versions(results: Results) -> dict[str, list[str]]:
    """Return every version of every package in the rows."""
    found: dict[str, set[str]] = {}
    for _, rows in results.files:
        for row in rows:
            for package, version in row["versions"].items():
                if version:
                    found.setdefault(package, set()).add(version)
    return {package: sorted(versions) for package, versions in sorted(found.items())}


def _relative(path: Path, start: Path) -> str:
    """Return the link to ``path`` from a page in ``start``."""
    return path.resolve().relative_to(start.resolve(), walk_up=True).as_posix()


def render(named: dict[str, Any]) -> str:
    """Return the report in Markdown."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    lines = environment.get_template("report.md.j2").render(named)
    return re.sub(r"\n{3,}", "\n\n", lines).strip() + "\n"


def to_html(report: str, folder: Path) -> str:
    """Return one self-contained page: pictures become data URIs. ``folder``: where their relative paths start."""
    body = markdown.markdown(report, extensions=["tables", "toc", "sane_lists"])
    body = re.sub(r'src="([^":]+)"', lambda found: f'src="{data_uri(folder / found[1])}"', body)
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    title = re.search(r"^# (.+)$", report, flags=re.MULTILINE)
    page = jinja2.Template((HERE / "page.html.j2").read_text())
    return page.render(title=title[1] if title else "", body=body)


def data_uri(path: Path) -> str:
    kind, _ = mimetypes.guess_type(path.name)
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def build(results: Path, output: Path) -> list[Path]:
    """Write report.md, report.html and the pictures, and return their paths."""
    named, pictures = context(read_results(results), output)
    output.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        picture.draw()
    report = render(named)
    pages = output / "report.md", output / "report.html"
    pages[0].write_text(report)
    pages[1].write_text(to_html(report, output))
    return [*pages, *(picture.path for picture in pictures)]


def check(results: Path, output: Path) -> list[str]:
    """Return where the existing report and the results disagree, and which predictions were changed; empty: none."""
    read = read_results(results)
    named, pictures = context(read, output)
    path, page = output / "report.md", output / "report.html"
    if not path.exists():
        return [f"{path} is missing"]
    report = render(named)
    stale = [f"{picture.path} is missing or shows other figures" for picture in pictures if not picture.is_current]
    for group in named["groups"]:
        for profile in group.profiles:
            stale += [f"{path} was not drawn from findings.json beside it" for path in profiles.stale_pictures(profile)]
    # report.html is not committed: a missing page is not stale.
    if not stale and page.exists() and page.read_text() != to_html(report, output):
        stale.append(f"{page} is stale")
    predictions = broken(results, [row for _, rows in read.files for row in rows])
    return [*_differences(path.read_text(), report), *stale, *predictions]


def _differences(there: str, expected: str) -> Sequence[str]:
    lines = difflib.unified_diff(there.splitlines(), expected.splitlines(), "report.md", "results", n=0, lineterm="")
    return list(lines)
