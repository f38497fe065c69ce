"""The script that plants faults: shown a toy tree with one test; its lists against this tree."""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.faults import command
from benchmarks.faults.catalog import Fault, Room, load_rooms
from benchmarks.faults.command import main
from benchmarks.faults.trial import CAUGHT, MISSED, judge, run_trial

ROOT = Path(__file__).resolve().parents[3]
TOY = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"
TEST = """
import toy


def test_add():
    assert toy.add(2, 1) == 3
"""
TEXT_TEST = """
import inspect

import toy


def test_text():
    assert "a + b" in inspect.getsource(toy), "plant it anew"
"""
WRONG = Fault("wrong", "toy.py", "return a + b", "return a - b - 0", "The sum is wrong.")
UNSEEN = Fault("unseen", "toy.py", "return a - b", "return b - a", "The difference is wrong.")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    (root / "toy.py").write_text(TOY)
    (root / "test_toy.py").write_text(TEST)
    return root


def test_a_fault_is_caught_in_a_copy_and_names_its_test(tree: Path) -> None:
    outcome = run_trial(tree, WRONG, ["test_toy.py"], 60)
    assert (outcome.outcome, outcome.test) == (CAUGHT, "test_toy.py::test_add")
    assert "assert 1 == 3" in outcome.error
    assert (tree / "toy.py").read_text() == TOY
    assert {path.name for path in tree.iterdir()} == {"toy.py", "test_toy.py"}


def test_a_test_that_only_misses_the_text_catches_nothing(tree: Path) -> None:
    other_words = Fault("words", "toy.py", "return a + b", "return b + a", "No fault at all.")
    (tree / "test_text.py").write_text(TEXT_TEST)
    assert run_trial(tree, other_words, ["test_text.py", "test_toy.py"], 60).outcome == MISSED


def test_a_crash_of_the_interpreter_is_caught() -> None:
    assert judge(-11, "", 1.0).outcome == CAUGHT


def plant_here(monkeypatch: pytest.MonkeyPatch, tree: Path, *faults: Fault) -> None:
    room = Room("toys", ("test_toy.py",), (), faults)
    monkeypatch.setattr(command, "ROOT", tree)
    monkeypatch.setattr(command, "load_rooms", lambda: [room])
    monkeypatch.setattr(command, "facts", lambda: {"versions": {}, "machine": {}, "commit": "c", "link": None})


def test_a_control_run_that_fails_ends_it(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "toy.py").write_text(TOY.replace("a + b", "a * b"))
    plant_here(monkeypatch, tree, UNSEEN)
    assert main([]) == 2
    assert "toys: without a fault its tests fail" in capsys.readouterr().err


ROOMS = load_rooms()


@pytest.mark.parametrize("fault", [fault for room in ROOMS for fault in room.faults], ids=lambda fault: fault.id)
def test_every_fault_of_the_list_applies_to_this_tree(fault: Fault) -> None:
    text = fault.planted(ROOT)
    if fault.file.endswith(".py"):
        compile(text, fault.file, "exec")


def test_the_list_covers_the_rooms_and_its_tests_are_there() -> None:
    files = Counter(fault.file for room in ROOMS for fault in room.faults)
    assert sum(files.values()) >= 60
    for room in ("engine", "memory", "optimizer", "planner", "devices"):
        assert any(file.startswith(f"megatron/swap/{room}/") for file in files), room
    for test in {test for room in ROOMS for test in room.all_tests()}:
        assert (ROOT / test.split("::")[0]).is_file(), test
