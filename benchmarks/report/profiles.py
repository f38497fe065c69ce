"""The report's sections on traces, from the findings of tools/analyze_trace.py in docs/results/*-profile-*."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.report.text import Table, cell_gib, cell_ms, cell_number, cell_share
from benchmarks.rows import GIB
from benchmarks.stamp import stamp_of
from benchmarks.traces.checks import UNJUDGED

Findings = dict[str, Any]
PROFILERS = {"nsys": "Nsight Systems", "kineto": "torch.profiler"}
NUM_GAPS = 5
NUM_LISTED = 10
"""At most this many violations and mismatches are listed; the tables count all."""
WAYS = {"out": "copies out", "in": "copies in"}


@dataclass(frozen=True)
class Profile:
    """One traced run."""

    folder: Path
    findings: Findings
    summary: dict[str, Any] | None
    """``run.json``, the run's own summary; ``None``: it was not kept."""

    @property
    def profiler(self) -> str:
        emulation = ", emulated device" if self.findings["emulated"] else ""
        return f"{PROFILERS[self.findings['format']]}{emulation}"

    @property
    def worst_violations(self) -> list[dict[str, Any]]:
        return list(self.findings["violations"][:NUM_LISTED])

    @property
    def first_mismatches(self) -> list[str]:
        return list(self.findings["mismatches"][:NUM_LISTED])

    @property
    def subject(self) -> str:
        """Return what was profiled: the folder's name without suite and profiler."""
        words = self.folder.name.split("-profile-", 1)[1].split("-")
        return "-".join(word for word in words if word not in ("nsys", "torch", "kineto")) or "run"


@dataclass(frozen=True)
class Group:
    """The same run under different profilers."""

    subject: str
    profiles: list[Profile]

    @property
    def is_paired(self) -> bool:
        return len(self.profiles) > 1

    @property
    def differences(self) -> list[str]:
        """Return the counts that differ between profilers; times may differ, since each profiler traced its own run."""
        counted = [_counted(profile.findings) for profile in self.profiles]
        return [name for name in counted[0] if any(other[name] != counted[0][name] for other in counted[1:])]


def read_profiles(results: Path) -> list[Group]:
    """Read every folder with findings, grouped by subject, Nsight Systems first."""
    groups: dict[str, list[Profile]] = {}
    for path in sorted(results.glob("*-profile-*/findings.json")):
        summary = path.with_name("run.json")
        profile = Profile(
            path.parent,
            json.loads(path.read_text()),
            json.loads(summary.read_text()) if summary.exists() else None,
        )
        groups.setdefault(profile.subject, []).append(profile)
    for profiles in groups.values():
        profiles.sort(key=lambda profile: list(PROFILERS).index(profile.findings["format"]))
    return [Group(subject, profiles) for subject, profiles in groups.items()]


def _counted(findings: Findings) -> dict[str, Any]:
    """Return what does not depend on time: copies and bytes per step, checks, verdicts."""
    steps = [step["copies"] for step in findings["steps"]]
    return {
        **{name: sorted({step[name] for step in steps}) for name in steps[0]},
        "violations": len(findings["violations"]),
        "mismatches": len(findings["mismatches"]),
        "rules checked": sorted(rule for rule, check in findings["checks"].items() if check["num_checked"]),
    }


def findings_table(group: Group) -> Table:
    """Build the table of findings, one column per profiler."""
    columns = [profile.findings for profile in group.profiles]
    rows = [
        ["steps traced", *(cell_number(len(found["steps"])) for found in columns)],
        ["ordering checks made", *(cell_number(_num_checks(found)) for found in columns)],
        ["violations", *(cell_number(len(found["violations"])) for found in columns)],
        ["counts and bytes equal to the run's summary", *(_matches(found) for found in columns)],
        ["storages copied out", *(cell_number(found["storages"]["num_copied_out"]) for found in columns)],
        ["of them overtaken by backward", *(cell_number(found["storages"]["num_overtaken"]) for found in columns)],
        [
            "of them kept: memory still referenced elsewhere",
            *(cell_number(found["storages"]["num_stayed"]) for found in columns),
        ],
        *(
            [f"reuse not judged: {text}", *(cell_number(found["reuse_not_judged"][why]) for found in columns)]
            for why, text in UNJUDGED.items()
        ),
        ["reloaded late", *(cell_number(found["storages"]["num_late"]) for found in columns)],
    ]
    for way, name in WAYS.items():
        links = [found["link"][way] for found in columns]
        rows += [
            [f"{name}: number", *(cell_number(link["num_copies"]) for link in links)],
            [f"{name}: GiB", *(cell_gib(link["num_bytes"] / GIB) for link in links)],
            [f"{name}: GB/s while copying", *(cell_ms(link["gb_per_s"]) for link in links)],
            [f"{name}: share of the steps' time", *(cell_share(link["busy_share"]) for link in links)],
            [f"{name}: hidden under compute", *(cell_share(link["hidden_share"]) for link in links)],
            [
                f"{name}: hidden, predicted",
                *(cell_share(found["predicted_hidden_share"][way]) for found in columns),
            ],
        ]
    rows += [
        ["all copies: hidden under compute", *(cell_share(found["hidden_share"]) for found in columns)],
        ["compute stalled by copies, ms a step", *(cell_ms(_a_step(found, "stalled_ms")) for found in columns)],
    ]
    return Table(["", *(profile.profiler for profile in group.profiles)], rows)


def time_table(group: Group) -> Table:
    """Build the table of where an average traced step's time goes."""
    columns = [profile.findings for profile in group.profiles]
    peaks = [max((step["peak_memory_bytes"] or 0 for step in found["steps"]), default=0) for found in columns]
    rows = [
        ["step", *(cell_ms(_a_step(found, "duration_ms")) for found in columns)],
        ["compute busy", *(cell_ms(_a_step(found, "compute_busy_ms")) for found in columns)],
        ["compute stalled by copies", *(cell_ms(_a_step(found, "stalled_ms")) for found in columns)],
        ["compute idle otherwise (host, launch gaps)", *(cell_ms(_rest_ms(found)) for found in columns)],
        ["copies out running", *(cell_ms(_a_step(found, "d2h_ms")) for found in columns)],
        ["copies in running", *(cell_ms(_a_step(found, "h2d_ms")) for found in columns)],
        ["peak memory in the traced steps, GiB", *(cell_gib(peak / GIB if peak else None) for peak in peaks)],
    ]
    return Table(["ms a step", *(profile.profiler for profile in group.profiles)], rows)


def gaps_table(profile: Profile) -> Table:
    """Build the table of the largest gaps of compute and their causes."""
    rows = [
        [cell_number(gap["step"]), cell_ms(gap["ms"]), cell_ms(gap["stalled_ms"]), f"`{gap['owner']}`"]
        for gap in profile.findings["gaps"][:NUM_GAPS]
    ]
    return Table(["step", "gap, ms", "of it waiting for copies, ms", "cause"], rows)


def about(profile: Profile) -> str | None:
    """Return device, layers, command, commit and versions of the run, as far as they are known."""
    parts = []
    if profile.summary is not None:
        swapped = _ranges(profile.summary["swapped_layers"])
        parts.append(f"{profile.summary['device']}, {profile.summary['num_layers']} layers, swapped: {swapped}")
    if (made_by := profile.findings.get("about")) is not None:
        versions = ", ".join(f"{name} {version}" for name, version in made_by["versions"].items() if version)
        parts.append(f"`{made_by['command']}` at commit {made_by['commit'][:7]}; {versions}")
    return "; ".join(parts) or None


def pictures(profile: Profile) -> list[Path]:
    """Return the pictures of a step beside the findings, the whole step first."""
    return sorted(profile.folder.glob("step*.png"))


def stale_pictures(profile: Profile) -> list[Path]:
    """Return pictures that were drawn from other findings; one without a digest cannot be checked."""
    digest = hashlib.sha256((profile.folder / "findings.json").read_bytes()).hexdigest()
    return [path for path in pictures(profile) if stamp_of(path) not in (None, digest)]


def steps_traced(groups: list[Group]) -> list[int]:
    """Return the distinct numbers of traced steps."""
    return sorted({len(profile.findings["steps"]) for group in groups for profile in group.profiles})


def sources_table(groups: list[Group], folder: str) -> Table:
    """Build the table of traces: folder, profiler, machine, commit."""
    lines = []
    for group in groups:
        for profile in group.profiles:
            made_by = profile.findings.get("about") or {}
            name = profile.folder.name
            gpu = (made_by.get("machine") or {}).get("gpu", "unknown")
            lines.append([
                f"[{name}]({folder}/{name})", profile.profiler, cell_number(len(profile.findings["steps"])), gpu,
                (made_by.get("commit") or "")[:7] or "unknown",
            ])  # fmt: skip
    return Table(["trace", "profiler", "steps", "machine", "commit"], lines)


def _ranges(numbers: list[int]) -> str:
    """Format layer numbers as in ``0-3, 7``."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found) or "none"


def _num_checks(findings: Findings) -> int:
    return sum(check["num_checked"] for check in findings["checks"].values())


def _matches(findings: Findings) -> str:
    if not findings["compared_with_summary"]:
        return "not compared"
    return "yes" if not findings["mismatches"] else f"mismatches: {len(findings['mismatches'])}"


def _a_step(findings: Findings, name: str) -> float:
    return fmean(step[name] for step in findings["steps"])


def _rest_ms(findings: Findings) -> float:
    rest = _a_step(findings, "duration_ms") - _a_step(findings, "compute_busy_ms") - _a_step(findings, "stalled_ms")
    return max(0.0, rest)


def anchor(text: str) -> str:
    """Return a name for files and links."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
