"""The rows and the options of tools/verify.py."""

from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks import verify
from benchmarks.rows import Row, read_rows
from tests.unit.benchmarks.made_report import a_row

FACTS = {"versions": {}, "machine": {"gpu": "H200", "num_gpus": 2}, "commit": "c0ffee", "link": None}


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the runs, which are made up."""
    seen: list[str] = []

    def run(verifier: verify.Verifier, name: str, flags: str, num_ranks: int = 1, **_: object) -> Row:
        seen.append(name)
        losses = {"losses": ["0x1p+0"], "grad_norms": ["0x1p+0"], "weights_sha256": "x"}
        gib = 2.0 if name == "swap-layers none" else 1.0
        return {**a_row(name, 10.0, gib), "flags": flags, "num_ranks": num_ranks, **losses}

    monkeypatch.setattr(verify.machine, "facts", lambda: FACTS)
    monkeypatch.setattr(verify.Verifier, "run", run)
    return seen


def status(*words: object) -> int:
    return verify.main([*map(str, words)])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("equality --held-gib nan", "--held-gib nan: must be numbers of GiB, 0 or more"),
        ("equality --held-gib 1 1 1", "--held-gib has 3 figures, there are 2 GPUs"),
        ("ranks --budget-share 1.5", "--budget-share 1.5: must be above 0 and at most 1"),
    ],
)
def test_what_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], made_up: list[str], words: str, said: str
) -> None:
    with suppress(SystemExit):  # argparse ends the program itself
        assert status(*words.split(), "--output", tmp_path / "rows.jsonl") == 1
    assert said in capsys.readouterr().err
    assert made_up == []


def test_a_budget_is_a_share_of_what_the_unswapped_run_reserved(tmp_path: Path, made_up: list[str]) -> None:
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
