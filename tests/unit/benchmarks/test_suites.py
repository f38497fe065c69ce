"""Suites and methods: the committed files are valid to the last flag, wrong ones are refused; budgets, output."""

from pathlib import Path

import pytest

from benchmarks.runner.request import NotReady, Request
from benchmarks.suites import suite as suites
from benchmarks.suites.budgets import Memory, resolved
from benchmarks.suites.methods import KINDS, Method, parse_method
from benchmarks.suites.suite import Case, Suite, SuiteError, load_suite, suite_names

SUITE = """
description = "x"
device = "gpu"
peak = "reserved"
warm_up = 2
warm_up_auto = 12
timed = 3
timed_limit_s = 9
rounds = 2
time_limit_s = 60
flags = "--transformer-impl local --micro-batch-size 1 --seq-length 64"
[env]
MINE = "yes"
[cases.one]
flags = "--num-layers 4"
micro_batches = 3
[cases.two]
flags = "--num-layers 8"
micro_batches = 1
rounds = 5
without = ["auto", "planned"]
[cases.two.methods]
first = "ours --swap-layers 0"
[methods]
none = "none"
full = "full-recompute"
auto = "ours --swap-memory-gib static+2"
planned = "ours --swap-plan plans/one.json"
"""
@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with plans; ``planned`` has one."""
    monkeypatch.setattr(suites, "ROOT", tmp_path)
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "one.json").write_text("{}")
    return tmp_path


def load(folder: Path, text: str = SUITE) -> Suite:
    path = folder / "small.toml"
    path.write_text(text)
    return load_suite(str(path))


def request_of(case: Case, name: str, memory: Memory | None = None) -> Request:
    return case.request(next(method for method in case.methods if method.name == name), memory)


def test_every_kind_of_method_is_in_a_committed_suite_and_the_reference_runs_first() -> None:
    cases = [case for name in suite_names() for case in load_suite(name).cases]
    parts = {part.split()[0] for case in cases for method in case.methods for part in method.text.split(" + ")}
    assert parts == set(KINDS)
    assert {case.methods[0].name for case in cases} == {"none"}
    for case in load_suite("h200-planner").cases:
        assert case.peak == "reserved"
        for method in case.methods:
            if method.plan_file is None:
                env = case.request(method, Memory(10.0, 10.0)).env
                assert env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True", "everybody gets one allocator"


def test_a_suite_is_its_cases_and_methods(folder: Path) -> None:
    one, two = load(folder).cases
    assert [method.name for method in two.methods] == ["none", "full", "first"]
    assert (one.rounds, two.rounds) == (2, 5)
    assert " ".join(request_of(two, "first").flags) == (
        "--transformer-impl local --micro-batch-size 1 --seq-length 64 --num-layers 8 --global-batch-size 1 "
        "--train-iters 5 --swap-layers 0"
    )
    none, full = request_of(one, "none"), request_of(one, "full")
    auto, planned = request_of(one, "auto", Memory(2.0, 4.0)), request_of(one, "planned")
    assert all("--global-batch-size 3 --train-iters 15" in " ".join(each.flags) for each in (none, full, auto, planned))
    timing = {name: (each.num_warm_up, each.num_timed, each.timed_limit_s) for name, each in
              {"none": none, "full": full, "auto": auto, "planned": planned}.items()}  # fmt: skip
    assert timing == {"none": (2, None, None), "full": (2, 3, 9), "auto": (12, None, 9), "planned": (2, 3, 9)}
    assert (none.has_phases, full.has_phases, full.observes, full.env) == (True, False, False, {"MINE": "yes"})
    assert request_of(load(folder, SUITE.replace('"reserved"', '"saved"')).cases[0], "full").observes


def test_a_choice(folder: Path) -> None:
    suite = load(folder)
    chosen = suite.chosen(["two"], ["first"], 1)
    assert [(case.name, case.rounds) for case in chosen.cases] == [("two", 1)]
    assert [method.name for method in chosen.cases[0].methods] == ["first"]
    assert [case.name for case in suite.chosen([], ["auto"], None).cases] == ["one"], "one without methods is left out"
    with pytest.raises(SuiteError, match="--method first: there is none of that name; there are none, full"):
        suite.chosen(["one"], ["first"], None)
    with pytest.raises(SuiteError, match=r"no such suite; there are h200-dense, .*quick"):
        load_suite("slow")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("warm_up = 2\n", "", "small.toml: key 'warm_up' is missing"),
        ("warm_up = 2", "warm_up = 1", "warm_up = 1; at least 2"),
        ("rounds = 5", "round = 5", r"\[cases\]: \[two\]: unknown key 'round'; allowed: .*rounds"),
        ("timed = 3", "timed = '3'", "timed = '3'; expected: int"),
        ("--num-layers 4", "", r"\[one\]: the flags have no --num-layers"),
        ('device = "gpu"', 'device = "gpu', "not TOML"),
        ('device = "gpu"', 'device = "cpu"', "peak = 'reserved' needs a GPU"),
        ('none = "none"', 'none = "nothing"', "method 'none': nothing is no kind of method; known: none, full-rec"),
        ("micro_batches", "sequence_schedule = [[9, 65]]\nmicro_batches", r"length up to the --seq-length, 64"),
        ("micro_batches", "sequence_schedule = [[10, 64], [20, 32]]\nmicro_batches", "steps 3 to 15 are timed"),
    ],
)
def test_a_wrong_suite_is_told(folder: Path, before: str, after: str, said: str) -> None:
    assert before in SUITE
    with pytest.raises(SuiteError, match=said):
        load(folder, SUITE.replace(before, after, 1))


def parsed(text: str, spec: str = "transformer_engine", on_gpu: bool = True) -> Method:
    return parse_method("here", "m", text, ["--transformer-impl", spec, "--num-layers", "6"], on_gpu=on_gpu)


STATE = "--optimizer-cpu-offload --optimizer-offload-fraction"


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("none", ""),
        ("selective-recompute mlp", "--recompute-granularity selective --recompute-modules mlp"),
        ("layer-offload all-but-one", "--cpu-offloading-num-layers 5"),
        ("layer-offload half", "--cpu-offloading-num-layers 3"),
        ("optimizer-cpu-offload 1 overlap", f"{STATE} 1 --overlap-cpu-optimizer-d2h-h2d --num-workers 0"),
        (
            "ours --swap-layers 0-3 --swap-modules mlp + selective-recompute mlp",
            "--swap-layers 0-3 --swap-modules mlp --recompute-granularity selective --recompute-modules mlp",
        ),
    ],
)
def test_methods(text: str, flags: str) -> None:
    assert " ".join(parsed(text).piece.flags) == flags
    assert parsed(text).is_ours == text.startswith("ours")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("selective-recompute", "takes arguments; given: "),
        ("unfused-gradients all", "takes no arguments; given: all"),
        ("ours --swap-layers all --recompute-granularity full", "Add recomputation as a separate part"),
        ("none + ours --swap-layers all", "none \\+ ours cannot be combined"),
        ("save-on-cpu + torchtune-offload", "cannot be combined"),
        ("", "is no kind of method"),
        ("ours --swap-memory-gib static+6O%", r"a number of GiB is expected, or 'static\+24'"),
    ],
)
def test_wrong_methods_are_told(text: str, said: str) -> None:
    with pytest.raises(SuiteError, match=f"here: method 'm': .*{said}"):
        parsed(text)


def test_a_budget_is_rounded_down_to_a_number() -> None:
    memory, flag = Memory(static_gib=58.77375555, activations_gib=35.3390119), "--swap-memory-gib"
    for word, gib in (("static+9.5", "68.273755"), ("static+60%", "79.977162"), ("80", "80")):
        assert resolved((flag, word), memory, "none") == (flag, gib)
    with pytest.raises(NotReady, match=r"is relative to the method 'none' .* not measured: run it first"):
        resolved((flag, "static+0"), None, "none")


