"""Check that predictions were committed before their run and have not changed since."""

import hashlib
import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.flags import value
from benchmarks.machine import ROOT
from benchmarks.rows import Row
from benchmarks.runner.planning import NUMBERS, PLAN_FLAG, read_prediction
from megatron.swap.common.types import UsageError
from megatron.swap.forecast.profiles import load_profile
from megatron.swap.planner.profile import sha256

FOLDER = "predictions"
"""Folder below docs/results with plan files and the profiles that they were made from (``profile-*.json``)."""
TAKEN = re.compile(r"\b(?:budget (?P<gib>\d+(?:\.\d+)?) GiB|no budget)\b")
"""Matches the budget of the profiled run in a profile's ``source``."""
SAME_GIB = 0.1


def broken(folder: Path, rows: Sequence[Row], root: Path = ROOT) -> list[str]:
    found = []
    for row in rows:
        path = value(row, PLAN_FLAG)
        if path is None or Path(path).parent.name != FOLDER:
            continue
        where = f"{row['suite']}, {row['case']}, {row['method']}: {path}"
        plan = folder / FOLDER / Path(path).name
        if not plan.is_file():
            found.append(f"{where} is missing")
            continue
        prediction = read_prediction(plan)
        found += [
            f"{where} has {field} {prediction[field]!r}, the row {row[field]!r}"
            for field in NUMBERS
            if row["outcome"] == "ok" and prediction[field] != row[field]
        ]
        found += [f"{where} {problem}" for problem in _of_profile(folder / FOLDER, prediction)]
        before = _at(row["commit"], path, root)
        if before is not None and before != plan.read_bytes():
            found.append(f"{where} is not what the row's commit {row['commit'][:7]} has: it was not committed before")
    return found


def _of_profile(folder: Path, prediction: dict[str, object]) -> list[str]:
    budget, digest = prediction["budget_gib"], prediction["profile_sha256"]
    paths = [path for path in folder.glob("profile-*.json") if digest in _names(path)]
    if not paths:
        return [f"was made from the profile {digest}, and no profile-*.json beside it has this hash"]
    source = json.loads(paths[0].read_text())["source"]
    taken = TAKEN.search(source)
    if taken is None:
        return [f"was made from {paths[0].name}, whose source does not say 'budget N GiB' or 'no budget': {source!r}"]
    if not isinstance(budget, int | float) or (taken["gib"] and abs(float(taken["gib"]) - budget) < SAME_GIB):
        return [f"is for a budget of {budget} GiB, under which its profile {paths[0].name} was taken: {source!r}"]
    return []


def _names(path: Path) -> list[str]:
    """Return the hashes by which a plan may name a profile: of the file, and of what was known before the plan."""
    names = [hashlib.sha256(path.read_bytes()).hexdigest()]
    try:
        return [*names, sha256(load_profile(path))]
    except UsageError:  # not a whole profile
        return names


def _at(commit: str, path: str, root: Path) -> bytes | None:
    """Return a file's content in a commit, empty if the commit lacks the file; ``None``: git lacks the commit."""
    git = ["git", "-C", str(root)]
    try:
        known = subprocess.run([*git, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True, check=False)
    except FileNotFoundError:
        return None
    if not commit or known.returncode != 0:
        return None
    return subprocess.run([*git, "show", f"{commit}:{path}"], capture_output=True, check=False).stdout
