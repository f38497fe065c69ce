"""Starts the ranks that run cases, gives them one after the other, and stops ranks that hang or die."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
WORST = ("different", "failed", "died", "hung", "skipped", "refused", "equal")
"""Outcomes of ranks; that of a case is the first of these that any rank has."""
BAD = frozenset(WORST[:4])
MOST_CASES = 50
"""Cases of one process: upstream's caches hold models of the past, and these hold process groups with their threads."""


class Pool:
    """The ranks of one world, in processes that live on from case to case. After a bad one, and after
    ``MOST_CASES``, they are started anew.

    Args:
        kind: one of ``report.KINDS``.
        num_ranks: of each case.
        timeout_s: seconds after which a case hangs.
        fault: a defect of ``faults`` to plant; empty: none.
    """

    def __init__(self, kind: str, num_ranks: int = 1, timeout_s: float = 120.0, fault: str = "") -> None:
        self._kind, self._num_ranks, self._timeout_s, self._fault = kind, num_ranks, timeout_s, fault
        self._ranks: list[_Rank] = []
        self._num_cases = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, seed: int) -> dict[str, Any]:
        """Return the row of a case, with the figures of all ranks added up."""
        if self._num_cases == MOST_CASES:
            self._stop()
        if not self._ranks:
            self._start()
            self._num_cases = 0
        self._num_cases += 1
        request = {"seed": seed, "timeout_s": self._timeout_s}
        for rank in self._ranks:
            rank.ask(request)
        deadline = time.monotonic() + self._timeout_s + 1.0  # the ranks dump their stacks first
        rows = []
        waiting = list(self._ranks)
        while waiting:
            rank = next((rank for rank in waiting if rank.has_answered), waiting[0])
            if not rank.has_answered and time.monotonic() < deadline:
                time.sleep(0.005)
                continue
            waiting.remove(rank)
            row = rank.answer(0.0)
            rows.append(row)
            if row["outcome"] in BAD or "restart" in row:  # the others may wait for it in vain
                deadline = min(deadline, time.monotonic() + 5.0)
        worst = min(rows, key=lambda row: ("restart" not in row, WORST.index(row["outcome"])))
        if worst["outcome"] in BAD or "restart" in worst:
            self._stop()
        figures: dict[str, float] = {}
        for row in rows:
            for name, value in row.get("figures", {}).items():
                figures[name] = figures.get(name, 0) + value
        return {"kind": self._kind, "ranks": self._num_ranks, "seed": seed, **worst, "figures": figures}

    def _start(self) -> None:
        port = str(free_port())
        command = ["--kind", self._kind, "--ranks", str(self._num_ranks), "--port", port, "--fault", self._fault]
        self._ranks = [_Rank([*command, "--rank", str(rank)]) for rank in range(self._num_ranks)]
        for rank in self._ranks:
            if "ready" not in (row := rank.answer(120.0)):
                self._stop()
                raise RuntimeError(f"a rank did not start: {row}")

    def _stop(self) -> None:
        for rank in self._ranks:
            rank.close()
        self._ranks.clear()


class _Rank:
    def __init__(self, flags: list[str]) -> None:
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {
            **os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
            "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", *flags], cwd=ROOT, env=env, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")  # the process has ended

    def ask(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._errors.truncate(0)
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # ``answer`` says that it died

    @property
    def has_answered(self) -> bool:
        return not self._lines.empty()

    def answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return {"outcome": "hung", "error": f"no answer in time\n{self._tail()}"}
        if not line:
            return {"outcome": "died", "error": f"exit status {self._process.wait()}\n{self._tail()}"}
        return dict(json.loads(line))

    def _tail(self) -> str:
        self._errors.seek(0)
        return self._errors.read().lstrip("\0")[-6000:]

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()
