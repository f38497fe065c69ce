"""The report's sections on traces, from the findings of tools/analyze_trace.py in docs/results/*-profile-*."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.table import Table, cell_number
from benchmarks.traces import tables
from benchmarks.traces.tables import PROFILERS, Findings
from megatron.swap.common.layer_ranges import format_ranges

NUM_LISTED = 10  # At most this many violations and mismatches are listed; the tables count all


@dataclass(frozen=True)
class Profile:
    folder: Path
    findings: Findings
    summary: dict[str, Any] | None  # `run.json`, the run's own summary; `None`: it was not kept

    @property
    def profiler(self) -> str:
        return tables.profiler(self.findings)

    @property
    def worst_violations(self) -> list[dict[str, Any]]:
        return list(self.findings["violations"][:NUM_LISTED])

    @property
    def first_mismatches(self) -> list[str]:
        return list(self.findings["mismatches"][:NUM_LISTED])

    @property
    def subject(self) -> str:
        words = self.folder.name.split("-profile-", 1)[1].split("-")
        return "-".join(word for word in words if word not in ("nsys", "torch", "kineto")) or "run"

    @property
    def pictures(self) -> list[Path]:
        return sorted(self.folder.glob("step*.png"))

    @property
    def about(self) -> str | None:
        parts = []
        if self.summary is not None:
            swapped = format_ranges(self.summary["swapped_layers"], ", ") or "none"
            parts.append(f"{self.summary['device']}, {self.summary['num_layers']} layers, swapped: {swapped}")
        if (made_by := self.findings.get("about")) is not None:
            versions = ", ".join(f"{name} {version}" for name, version in made_by["versions"].items() if version)
            parts.append(f"`{made_by['command']}` at commit {made_by['commit'][:7]}; {versions}")
        return "; ".join(parts) or None


@dataclass(frozen=True)
class Group:
    subject: str
    profiles: list[Profile]

    @property
    def findings(self) -> list[Findings]:
        return [profile.findings for profile in self.profiles]

    @property
    def is_paired(self) -> bool:
        return len(self.profiles) > 1

    @property
    def differences(self) -> list[str]:
        counted = [_counted(profile.findings) for profile in self.profiles]
        return [name for name in counted[0] if any(other[name] != counted[0][name] for other in counted[1:])]

    @property
    def findings_table(self) -> Table:
        return tables.findings_table(self.findings)


def read_profiles(results: Path) -> list[Group]:
    groups: dict[str, list[Profile]] = {}
    for path in sorted(results.glob("*-profile-*/findings.json")):
        summary = path.with_name("run.json")
        kept = json.loads(summary.read_text()) if summary.exists() else None
        profile = Profile(path.parent, json.loads(path.read_text()), kept)
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


def steps_traced(groups: Sequence[Group]) -> list[int]:
    return sorted({len(profile.findings["steps"]) for group in groups for profile in group.profiles})


def sources_table(groups: Sequence[Group], folder: str) -> Table:
    def about(profile: Profile) -> dict[str, Any]:
        return profile.findings.get("about") or {}

    return Table.of([profile for group in groups for profile in group.profiles], {
        "trace": lambda profile: f"[{profile.folder.name}]({folder}/{profile.folder.name})",
        "profiler": lambda profile: profile.profiler,
        "steps": lambda profile: cell_number(len(profile.findings["steps"])),
        "machine": lambda profile: (about(profile).get("machine") or {}).get("gpu", "unknown"),
        "commit": lambda profile: (about(profile).get("commit") or "")[:7] or "unknown",
    })  # fmt: skip


def anchor(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
