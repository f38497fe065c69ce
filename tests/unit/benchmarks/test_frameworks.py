"""The benchmark of the framework examples: what it reads from them, and what it calls equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import frameworks

LINE = 'f"step {step}: loss {loss}, gradient norm {grad_norm}, {ms:.0f} ms, {reserved:.1f} GiB"'


def printed(losses: list[float], reserved: float = 20.0) -> str:
    lines = ["iteration 1/2 | lm loss: 1.0E+01"]  # of the framework itself
    for step, loss in enumerate(losses, 1):
        names = {"step": step, "loss": loss, "grad_norm": 2.5, "ms": 100.0, "reserved": reserved}
        lines.append(eval(LINE, names))
    return "\n".join([*lines, "2 steps: 3 GiB out, 3 GiB in, 0 late, 1.0 ms waited, 4 GiB of host memory"])


def rows_from(monkeypatch: pytest.MonkeyPatch, folder: Path, outputs: list[tuple[str, int]]) -> list[dict[str, Any]]:
    answers = iter(outputs)
    monkeypatch.setattr(frameworks, "facts", lambda: {"commit": "abc"})
    monkeypatch.setattr(frameworks, "run", lambda words, time_limit_s: next(answers))
    path = folder / "rows.json"
    status = frameworks.main(["swap_mcore_bridge", "--steps", "2", "--output", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert status == (0 if all(row["is_equal"] for row in rows) else 1)
    return list(rows)


@pytest.mark.parametrize("example", frameworks.EXAMPLES)
def test_it_reads_what_the_examples_print(example: str) -> None:
    assert f"print({LINE}" in (frameworks.ROOT / "examples" / f"{example}.py").read_text()


def test_equal_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = rows_from(monkeypatch, tmp_path, [(printed([3.25, 3.0], 27.0), 0), *[(printed([3.25, 3.0]), 0)] * 2])
    assert [row["reserved_gib"] for row in rows] == [27.0, 20.0, 20.0]
    assert [row["budget_gib"] for row in rows] == [None, 22.0, None]
    assert all(row["outcome"] == "ok" and row["is_equal"] and row["step_ms"] == 100 for row in rows)
    assert "--deterministic" in rows[0]["command"]
    assert rows[1]["stats"].startswith("2 steps: ")


def test_a_digit_that_differs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain, other = (printed([3.25, 3.0]), 0), (printed([3.25, 3.0000002384185791]), 0)
    assert [row["is_equal"] for row in rows_from(monkeypatch, tmp_path, [plain, other, plain])] == [True, False, True]


def test_a_run_that_ends_early(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = (printed([3.25, 3.0]), 0)
    for bad in ((printed([3.25]), 0), (printed([3.25, 3.0]), 1)):
        rows = rows_from(monkeypatch, tmp_path, [plain, bad, plain])
        assert [row["outcome"] for row in rows] == ["ok", "failed", "ok"]
        assert rows[1]["is_equal"] is None
        assert "3.25" in rows[1]["output_tail"]
