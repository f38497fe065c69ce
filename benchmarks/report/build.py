"""Build the pages from docs/results: read rows, fill the templates, write Markdown and HTML, check for changes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from benchmarks import names
from benchmarks.flags import OFFLOADS, RECOMPUTES, is_ours, is_planned, means, swapped_layers
from benchmarks.report import brief, compare, guard, optimizer, overhead, planner, profiles, soak, sweeps, tables, text
from benchmarks.report.cases import Case, Suite
from benchmarks.report.page import joined, to_html
from benchmarks.report.pictures import Picture, frontier_picture, load_picture
from benchmarks.report.predictions import broken
from benchmarks.report.results import Results, read_results
from benchmarks.report.selection import VERIFIED
from benchmarks.rows import outcome
from benchmarks.suites.suite import SuiteError, find_suite, load_suite

HERE = Path(__file__).parent
BRIEF, APPENDIX = "benchmarks.md", "appendix.md"
FOLDER = "benchmarks"
"""Folder of the appendix, the HTML report and the pictures, below the folder of the brief page."""
HTML = "report.html"
DIAGRAM = HERE / "streams.svg"
MOST_TELLING = "h200-planner-l16-h4096.png"
"""The picture that the brief page shows."""
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


OVERHEAD = "(prove-overhead)"
"""Ends the names of cases of tools/verify.py; the picture of the load shows benchmarks only."""
FEWEST_POINTS = 4
"""A case with fewer measured methods has a table and no picture."""


def build_suites(results: Results, pictures: Path) -> list[Suite]:
    """Return the suites of the report, measured or not, then any other benchmark in the results."""
    measured = [row for rows in results.suites.values() for row in rows]
    missing = {*SUITES} - {row["suite"] for row in measured}
    others = [name for name in results.suites if name not in SUITES and not name.startswith(VERIFIED)]
    suites = []
    for name in (*(name for name in SUITES if name in results.suites or name in missing), *others):
        cases = []
        measured_here = results.suites.get(name, [])
        suite = measured_here[0]["suite"] if measured_here else name
        planned = _planned(suite)
        ran = {(row["case"], row["method"]) for row in measured if row["suite"] == suite}
        for case, rows in compare.cases(measured_here).items():
            path = pictures / f"{profiles.anchor(f'{name} {case}')}.png"
            has_points = len(compare.points(rows)) >= FEWEST_POINTS and all("is_ours" in row for row in rows)
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
    folder = output / FOLDER
    suites = build_suites(results, folder)
    swept = sweeps.build_sweeps(results.sweeps, folder)
    overhead_cases = compare.cases(results.suites.get("prove-overhead", []))
    measured = {f"{case} {OVERHEAD}": rows for case, rows in overhead_cases.items()}
    for suite in suites:
        measured.update({f"{case.name} ({suite.name})": case.rows for case in suite.cases})
    ladders = {name: steps for name, rows in measured.items() if (steps := overhead.ladder(rows))}
    plain = {name: [step for step in steps if overhead.is_plain(step)] for name, steps in ladders.items()}
    plain = {name: steps for name, steps in plain.items() if any(step.load is not None for step in steps)}
    titled = {
        f"{names.model(steps[0].unswapped)} [{name.split()[0]}]": steps for name, steps in plain.items()
        if not name.endswith(OVERHEAD)
    }  # fmt: skip
    curve = load_picture(folder / "overhead.png", titled) if titled else None
    soaked = soak.read_soaks(results.folder)
    pictures = [sweep.picture for sweep in swept]
    pictures += [soak.picture(folder, device, one) for device, one in soaked.items()]
    pictures += [case.picture for suite in suites for case in suite.cases if case.picture is not None]
    equality = {name: tables.equal_runs(results.suites.get(name, [])) for name in ("prove-equality", "prove-ranks")}
    named = {
        "suites": suites,
        "sweeps": swept,
        "ladders": ladders,
        "without_unswapped": {
            name: [row for row in rows if row["method"] == "none"]
            for name, rows in measured.items()
            if name not in ladders and any(swapped_layers(row) is not None and not is_planned(row) for row in rows)
        },
        "soak": soak,
        "soaked": soaked,
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
        "diagram": _relative(DIAGRAM, folder),
        "results": _relative(results.folder, folder),
        "link_to": lambda path: _relative(path, folder),
        "brief": brief.Brief(results),
        "picture": next((_relative(one.path, output) for one in pictures if one.path.name == MOST_TELLING), None),
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


def render(named: dict[str, Any], template: str = APPENDIX) -> str:
    """Return a page in Markdown."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    lines = environment.get_template(f"{template}.j2").render(named)
    return re.sub(r"\n{3,}", "\n\n", lines).strip() + "\n"


def build(results: Path, output: Path) -> list[Path]:
    """Write both pages, the HTML report and the pictures, and return their paths.

    Args:
        results: the folder docs/results.
        output: the folder docs.
    """
    named, pictures = context(read_results(results), output)
    folder = output / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        picture.draw()
    texts = {output / BRIEF: render(named, BRIEF), folder / APPENDIX: render(named)}
    for path, page in texts.items():
        path.write_text(page)
    html = folder / HTML
    html.write_text(to_html(joined(*texts.values()), folder))
    return [*texts, html, *(picture.path for picture in pictures)]


def check(results: Path, output: Path) -> list[str]:
    """Return where the existing pages and the results disagree, and which predictions were changed; empty: none."""
    read = read_results(results)
    named, pictures = context(read, output)
    folder = output / FOLDER
    html = folder / HTML
    pages = {output / BRIEF: render(named, BRIEF), folder / APPENDIX: render(named)}
    missing = [f"{path} is missing" for path in pages if not path.exists()]
    if missing:
        return missing
    stale = [f"{picture.path} is missing or shows other figures" for picture in pictures if not picture.is_current]
    for group in named["groups"]:
        for profile in group.profiles:
            stale += [f"{path} was not drawn from findings.json beside it" for path in profiles.stale_pictures(profile)]
    # The HTML report is not committed: a missing one is not stale.
    if not stale and html.exists() and html.read_text() != to_html(joined(*pages.values()), folder):
        stale.append(f"{html} is stale")
    predictions = broken(results, [row for _, rows in read.files for row in rows])
    differences = [line for path, page in pages.items() for line in _differences(path, page)]
    return [*differences, *stale, *predictions]


def _differences(path: Path, expected: str) -> Sequence[str]:
    there = path.read_text().splitlines()
    return list(difflib.unified_diff(there, expected.splitlines(), path.name, "results", n=0, lineterm=""))
