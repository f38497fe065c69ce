"""Build the pages from docs/results: read rows, fill the templates, write Markdown, check for changes."""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2

from benchmarks import table
from benchmarks.pictures import Picture
from benchmarks.report import brief, guard, planner, profiles, soak, tables
from benchmarks.report.cases import Case, Suite, SweepSection
from benchmarks.report.predictions import broken
from benchmarks.report.results import VERIFIED, Results, read_results
from benchmarks.rows import Row, by_case, outcome
from benchmarks.suites.picture import draw
from benchmarks.suites.ranking import points
from benchmarks.suites.table import methods_table

HERE = Path(__file__).parent
BRIEF, APPENDIX = "benchmarks.md", "appendix.md"
FOLDER = "benchmarks"  # Folder of the appendix and the pictures, below the folder of the brief page
MOST_TELLING = "h200-planner-l16-h4096.png"  # The picture that the brief page shows
FIRST = ("h200-dense", "h200-long-context", "h200-planner", "h200-optimizer")
"""The suites that come first, in this order."""
PROVED = {"One GPU": "prove-equality", "Several GPUs": "prove-ranks"}  # The suites of runs that are compared to the bit
FEWEST_POINTS = 4  # A case with fewer measured methods has a table and no picture
SHOWN = (
    "suite", "case", "method", "outcome", "step_ms_median", "step_ms_min", "step_ms_max", "device_peak_gib", "is_ours",
    "losses_equal", "loss_max_rel_diff", "reference", "flags", "num_params",
)  # fmt: skip
"""Fields that the picture of a case depends on."""
SHOWN_WITH_PEAK = ("budget_gib", "peak", "device_reserved_gib")
"""The same where a row says which peak counts; older rows do not."""


def build_suites(results: Results, pictures: Path) -> list[Suite]:
    names = [*(name for name in FIRST if name in results.suites), *results.suites]
    return [
        Suite(name, [Case(case, rows, _picture(pictures, name, rows)) for case, rows in cases.items()])
        for name in dict.fromkeys(names) if name not in PROVED.values()
        for cases in [by_case(results.suites[name])]
    ]  # fmt: skip


def _picture(folder: Path, suite: str, rows: list[Row]) -> Picture | None:
    if len(points(rows)) < FEWEST_POINTS or suite.startswith(VERIFIED) or not all("is_ours" in row for row in rows):
        return None
    shown = [
        {field: row.get(field) for field in (*SHOWN, *(SHOWN_WITH_PEAK if row.get("peak") is not None else ()))}
        for row in rows
    ]
    return Picture(folder / f"{profiles.anchor(f'{suite} {rows[0]["case"]}')}.png", shown, lambda: draw(rows))


def context(results: Results, output: Path) -> tuple[dict[str, Any], list[Picture]]:
    folder = output / FOLDER
    suites = build_suites(results, folder)
    swept = [SweepSection(name, rows, folder) for name, rows in results.sweeps.items()]
    soaked = soak.read_soaks(results.folder)
    pictures = [sweep.picture for sweep in swept]
    pictures += [soak.picture(folder, device, one) for device, one in soaked.items()]
    pictures += [case.picture for suite in suites for case in suite.cases if case.picture is not None]
    proved = {title: results.suites.get(name, []) for title, name in PROVED.items()}
    named = {
        "brief": brief.Brief(results),
        "suites": suites,
        "sweeps": swept,
        "soak": soak,
        "soaked": soaked,
        "groups": results.profiles,
        "equality": {title: tables.equality_table(tables.equal_runs(rows)) for title, rows in proved.items() if rows},
        "guard": guard,
        "guarded": [row for rows in proved.values() for row in guard.guarded(rows)],
        "literature": results.literature,
        "files": results.files,
        "versions": _versions(results),
        "diagram": _relative(HERE / "streams.svg", folder),
        "results": _relative(results.folder, folder),
        "link_to": lambda path: _relative(path, folder),
        "picture": next((_relative(one.path, output) for one in pictures if one.path.name == MOST_TELLING), None),
        "t": table,
        "tables": tables,
        "methods_table": methods_table,
        "planner": planner,
        "profiles": profiles,
        "outcome": outcome,
    }
    return named, pictures


def _versions(results: Results) -> dict[str, list[str]]:
    rows = [row for _, rows in results.files for row in rows]
    packages = sorted({package for row in rows for package, version in row["versions"].items() if version})
    return {
        package: sorted({row["versions"][package] for row in rows if row["versions"].get(package)})
        for package in packages
    }


def _relative(path: Path, start: Path) -> str:
    return path.resolve().relative_to(start.resolve(), walk_up=True).as_posix()


def render(named: dict[str, Any], template: str = APPENDIX) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    lines = environment.get_template(f"{template}.j2").render(named)
    return re.sub(r"\n{3,}", "\n\n", lines).strip() + "\n"


def pages(named: dict[str, Any], output: Path) -> dict[Path, str]:
    return {output / BRIEF: render(named, BRIEF), output / FOLDER / APPENDIX: render(named)}


def build(results: Path, output: Path) -> list[Path]:
    named, pictures = context(read_results(results), output)
    (output / FOLDER).mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        picture.save()
    texts = pages(named, output)
    for path, text in texts.items():
        path.write_text(text)
    return [*texts, *(picture.path for picture in pictures)]


def check(results: Path, output: Path) -> list[str]:
    read = read_results(results)
    named, pictures = context(read, output)
    found = [line for path, text in pages(named, output).items() for line in _differences(path, text)]
    found += [f"{picture.path} is missing or shows other figures" for picture in pictures if not picture.is_current]
    return [*found, *broken(results, [row for _, rows in read.files for row in rows])]


def _differences(path: Path, expected: str) -> Iterator[str]:
    if not path.exists():
        yield f"{path} is missing"
        return
    there = path.read_text().splitlines()
    yield from difflib.unified_diff(there, expected.splitlines(), path.name, "results", n=0, lineterm="")
