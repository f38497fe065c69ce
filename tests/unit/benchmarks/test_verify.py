"""The rows and the options of tools/verify.py."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from benchmarks import verify
from benchmarks.rows import Row, read_rows
from tests.unit.benchmarks.made_report import a_row

FACTS = {"versions": {}, "machine": {"gpu": "H200", "num_gpus": 2}, "commit": "c0ffee", "link": None}


@pytest.fixture
def holds(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Memory that another program takes during each run. The runs are made up."""
    seen: list[list[float]] = []
    now: list[float] = []

    @contextmanager
    def memory_hog(gib: Sequence[float]) -> Iterator[None]:
        now.extend(gib)
        yield
        now.clear()

    def run(verifier: verify.Verifier, name: str, flags: str, num_ranks: int = 1, **_: object) -> Row:
        seen.append([*now])
        losses = {"losses": ["0x1p+0"], "grad_norms": ["0x1p+0"], "weights_sha256": "x"}
        gib = 2.0 if name == "swap-layers none" else 1.0
        return {**a_row(name, 10.0, gib), "flags": flags, "num_ranks": num_ranks, **losses}

    monkeypatch.setattr(verify.machine, "facts", lambda: FACTS)
    monkeypatch.setattr(verify, "memory_hog", memory_hog)
    monkeypatch.setattr(verify.Verifier, "run", run)
    return seen


def status(*words: object) -> int:
    return verify.main([*map(str, words)])


def test_what_another_program_holds_is_held_in_every_run_and_told(
    tmp_path: Path, holds: list[list[float]]
) -> None:
    output = tmp_path / "new" / "rows.jsonl"
    words = ("equality", "--settings", "--swap-layers all", "--output", output)
    assert status(*words, "--held-gib", 0, 1.5) == 0
    assert status(*words) == 0
    assert holds == [[0, 1.5], [0, 1.5], [], []]
    assert [row["held_gib"] for row in read_rows(output)] == [[0, 1.5], [0, 1.5], [], []]
    assert [path.name for path in output.parent.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("equality --held-gib nan", "--held-gib nan: must be numbers of GiB, 0 or more"),
        ("equality --held-gib 1 1 1", "--held-gib has 3 figures, there are 2 GPUs"),
        ("ranks --budget-share 1.5", "--budget-share 1.5: must be above 0 and at most 1"),
    ],
)
def test_what_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], holds: list[list[float]], words: str, said: str
) -> None:
    with suppress(SystemExit):  # argparse ends the program itself
        assert status(*words.split(), "--output", tmp_path / "rows.jsonl") == 1
    assert said in capsys.readouterr().err
    assert holds == []


def test_a_budget_is_a_share_of_what_the_unswapped_run_reserved(tmp_path: Path, holds: list[list[float]]) -> None:
    output = tmp_path / "rows.jsonl"
    words = ("ranks", "--case", "tp2-sp-pp2", "cp2", "--steps", 30, "--output", output)
    assert status(*words, "--budget-share", 0.75) == 0
    rows = read_rows(output)
    methods = ["swap-layers none", "swap-layers all", "swap-optimizer auto --swap-memory-gib 1.500000"]
    assert [(row["case"], row["method"]) for row in rows] == [
        (case, method) for case in ("tp2-sp-pp2", "cp2") for method in methods
    ]
    assert [row["num_ranks"] for row in rows] == [4] * 3 + [2] * 3
    assert "--context-parallel-size 2" in rows[-1]["flags"]


@pytest.mark.parametrize(("what", "expected"), [("equality", 1), ("overhead", 0)])
def test_runs_that_differ_fail(what: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{**a_row("none", 10.0, 1.0), "losses_equal": equal} for equal in (True, False)]
    monkeypatch.setattr(verify.machine, "facts", lambda: FACTS)
    monkeypatch.setattr(verify, what, lambda _: iter(rows))
    assert status(what, "--output", tmp_path / "rows.jsonl") == expected
