"""Gives cases to ranks that live on from case to case, and merges what they answer."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tests.integration.harness import Zygote

WORST = ("different", "failed", "died", "hung", "skipped", "refused", "equal")
"""Outcomes of ranks; that of a case is the first of these that any rank has."""
BAD = frozenset(WORST[:4])


class Pool:
    """The ranks of one world. After a bad case they are started anew.

    Args:
        kind: one of ``report.KINDS``.
        num_ranks: of each case.
        timeout_s: seconds after which a case hangs.
        fault: a defect of ``faults`` to plant; empty: none.
    """

    def __init__(
        self, zygote: Zygote, kind: str, num_ranks: int = 1, timeout_s: float = 120.0, fault: str = ""
    ) -> None:
        self._zygote, self._kind, self._num_ranks, self._timeout_s = zygote, kind, num_ranks, timeout_s
        options = {"kind": kind, "fault": fault}
        self._world = {"main": "tests.fuzz.worker:answering", "options": options, "num_ranks": num_ranks}
        self._folder = tempfile.TemporaryDirectory()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._zygote.end(self._world)
        self._folder.cleanup()

    def run(self, seed: int) -> dict[str, Any]:
        """Return the row of a case, with the figures of all ranks added up."""
        log = Path(self._folder.name) / "log"
        log.write_text("")
        rows = self._zygote.ask(self._world, {"seed": seed, "log": str(log)}, timeout_s=self._timeout_s)
        worst = min(rows, key=lambda row: ("restart" not in row, WORST.index(row["outcome"])))
        if worst["outcome"] in ("died", "hung"):
            worst["error"] += f"\n{log.read_text(errors='replace')[-6000:]}"
        figures: dict[str, float] = {}
        for row in rows:
            for name, value in row.get("figures", {}).items():
                figures[name] = figures.get(name, 0) + value
        return {"kind": self._kind, "ranks": self._num_ranks, "seed": seed, **worst, "figures": figures}
