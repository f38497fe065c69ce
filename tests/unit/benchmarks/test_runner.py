"""Measured processes: how they are started, directed, stopped and judged, what they time; the commands around them."""

import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.machine import ROOT
from benchmarks.runner import launch, stopwatch
from benchmarks.runner.launch import Child
from benchmarks.runner.outcome import classify
from benchmarks.runner.planning import planning, searches, unstable_steps
from benchmarks.runner.request import Request
from benchmarks.runner.schedule import length_at
from benchmarks.runner.stopwatch import EnoughSteps, Stopwatch
from megatron.swap.common.plan import Model, Plan, Predicted, save_plan

# A fake trainer: it follows its first flag and prints the words of the real one.
SCRIPT = """#!{python}
import json, pickle, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from benchmarks.runner.child import Channel, leave
_, _, _, request_path, result_path, descriptor = sys.argv
request = pickle.loads(Path(request_path).read_bytes())
what, channel = request.flags[0], Channel(int(descriptor))
if what == "lacks":
    import a_package_that_nobody_has
channel.report("ready")
channel.await_word("go")
if what == "refuses":
    raise ValueError("this cannot be combined with that")
channel.report("built")
channel.report("stepped")
channel.await_word("time")
if what == "hangs":
    time.sleep(600)
if what == "crashes":
    leave(7)
Path(result_path).write_text(json.dumps({{"env": dict(__import__("os").environ)}}))
print("the last words")
channel.report("done")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "python"
    path.write_text(SCRIPT.format(python=sys.executable, root=str(ROOT)))
    path.chmod(0o755)
    monkeypatch.setattr(launch.sys, "executable", str(path))


def request(what: str, **changed: Any) -> Request:
    return Request(flags=(what,), num_warm_up=2, **changed)


def quiet(child: Child) -> None:
    deadline = time.monotonic() + 60
    while not child.is_quiet():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.usefixtures("script")
@pytest.mark.nightly
def test_it_waits_for_its_words_and_has_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with Child(request("works", env={"MINE": "1"}), on_gpu=False) as child:
        quiet(child)
        assert child._process.poll() is None, "it waits for go"
        child.say("go")
        polls = iter(range(9999))
        finished = child.finish(60, on_poll=lambda: child.say("time") if next(polls) == 5 else None)
    assert finished.outcome == "ok", finished.output_tail
    assert next(polls) > 5, "it ended before `time` was sent"
    assert finished.output_tail == "the last words\n"
    env = finished.result["env"]
    assert (env["MINE"], env["OMP_NUM_THREADS"], env["CUDA_VISIBLE_DEVICES"]) == ("1", "3", "")
    on_gpu = launch.run(request("works"), on_gpu=True, timeout_s=60).result["env"]
    assert on_gpu["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.slow
@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("what", "timeout_s", "host_gib", "outcome", "words"),
    [
        ("refuses", 60, None, "refused", ""), ("crashes", 60, None, "failed (7)", ""),
        pytest.param("lacks", 60, None, "missing: a_package_that_nobody_has", "", marks=pytest.mark.nightly),
        pytest.param("hangs", 2, None, "timeout", "not done after 2 s", marks=pytest.mark.nightly),
        ("hangs", 60, 1e-6, "oom_host", "GiB of host memory are in use, the suite allows 1e-06"),
    ],
)  # fmt: skip
def test_what_goes_wrong(what: str, timeout_s: int, host_gib: float | None, outcome: str, words: str) -> None:
    with Child(request(what, requires=("x",)), on_gpu=False) as child:
        child.say("go")
        child.say("time")
        finished = child.finish(timeout_s, host_gib)
    assert (finished.outcome, finished.result) == (outcome, {}), finished.output_tail
    assert words in finished.output_tail


@pytest.mark.usefixtures("script")
def test_nothing_is_left_behind() -> None:
    with Child(request("works"), on_gpu=False) as child:
        quiet(child)
        assert child._process.stdin is not None
        child._process.stdin.close()
        assert child._process.wait(60) == 1, "it ends with the one who should say its word"
        assert "waited for 'go' on the standard input, heard b''" in child._log.read_text()
        folder = child._log.parent
    assert not folder.exists()


DISK = "megatron.swap.memory.disk_file.DiskError"
FAILED = "torch.AcceleratorError: CUDA error: out of memory"


@pytest.mark.parametrize(
    ("code", "output", "stage", "outcome"),
    [
        (0, "", "done", "ok"),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "built", "oom_device"),
        (1, f"    output = torch.matmul(total_input, weight.t())\n{FAILED}", "built", "oom_device"),
        (1, f"    packed = torch.empty(tensor.size(), pin_memory=pin_memory)\n{FAILED}", "built", "oom_host"),
        (1, "megatron.swap.memory.host_memory.HostMemoryError: --swap-layers all takes at least", "ready", "oom_host"),
        (1, f"{DISK}: optimizer state takes 9 GiB more on disk: the limit is 8 GiB.", "built", "oom_disk"),
        (1, f"{DISK}: --swap-disk-dir /d: reading failed (Input/output error).", "stepped", "failed (1)"),
        (1, f"{DISK}: 9 GiB more: the limit is 8 GiB.\nHostMemoryError while ending", "built", "oom_disk"),
        (-9, "", "stepped", "oom_host"),
        (124, "torch.OutOfMemoryError is what it would have said", "built", "timeout"),
        (1, "AssertionError: fine_grained_activation_offloading cannot be enabled", "ready", "refused"),
        (2, "pretrain_gpt_swap.py: error: unrecognized arguments: --offload", "ready", "refused"),
        (1, "AssertionError: a fault while training", "built", "failed (1)"),
        (0, "ended, but nothing was measured", "stepped", "failed (0)"),
    ],
)
def test_outcomes(code: int, output: str, stage: str, outcome: str) -> None:
    assert classify(code, output, stage) == outcome


AUTO = ("--lr", "1", "--swap-memory-gib", "83")
STAGES = [
    {"stage": "search", "first_step": 1, "last_step": 9, "note": "", "predicted_peak_gib": 82.0},
    {"stage": "stable", "first_step": 10, "last_step": 14, "note": "", "predicted_peak_gib": 81.5},
    {"stage": "profile", "first_step": 15, "last_step": 16, "note": "a shape changed", "predicted_peak_gib": None},
    {"stage": "stable", "first_step": 17, "last_step": None, "note": "", "predicted_peak_gib": 70.0},
]
FOUND = {
    "budget_gib": 83.0, "predicted_peak_gib": 70.0, "predicted_step_ms": 1300.0, "profile_sha256": "f00d",
    "num_replans": 1, "stages": STAGES,
}  # fmt: skip


def a_plan(path: Path, **changed: Any) -> Path:
    model = Model(4, 8, 8, 2, 2, 16, 1, 128, "local", "bf16", gated=False)
    values = {"budget_gib": 80.0, "profile_sha256": "beef", "predicted": Predicted(79.5, 1400.0, 1390.0, 9.0)}
    save_plan(Plan(model, **{**values, **changed}, classes=()), path)  # type: ignore[arg-type]
    return path


def test_the_plan_of_a_run(tmp_path: Path) -> None:
    assert searches(AUTO)
    assert searches(("--swap-policy", "auto"))
    assert not searches(("--swap-policy", "manual", "--swap-layers", "auto"))
    assert planning(AUTO, FOUND) == {**FOUND, "predicted_peak_gib": 82.0}, "that of the highest plan it followed"
    assert planning(("--swap-layers", "all"), None) is None
    prediction = {
        "budget_gib": 80.0, "predicted_peak_gib": 79.5, "predicted_step_ms": 1400.0, "lower_bound_ms": 1390.0,
        "profile_sha256": "beef", "num_replans": 0, "stages": [],
    }  # fmt: skip
    flags = ("--swap-plan", str(a_plan(tmp_path / "plan.json")))
    assert planning(flags, None) == prediction
    assert planning(flags, FOUND) == {**prediction, "num_replans": 1, "stages": STAGES}
    for first, last, unstable in ((10, 14, []), (17, 40, []), (9, 12, [9]), (12, 20, [15, 16]), (1, 3, [1, 2, 3])):
        assert unstable_steps(AUTO, FOUND, first, last) == unstable
        assert unstable_steps(flags, FOUND, first, last) == [], "nothing is tried"


def test_lengths() -> None:
    assert [length_at(((2, 64), (1, 32), (3, 48)), step) for step in range(1, 8)] == [64, 64, 32, 48, 48, 48, 64]


class Nobody:
    def report(self, stage: str) -> None: ...

    def await_word(self, word: str) -> None: ...


def watched(request: Request, num_steps: int, auto: Any = None) -> tuple[Stopwatch, int]:
    """Return a stopwatch that has seen so many training steps, and their number."""
    watch = Stopwatch(request, Nobody(), None)
    watch._args = Namespace(train_iters=num_steps, global_batch_size=4, seq_length=64)
    device = Namespace(is_made=False, observer=None)
    parts = {"parts": None, "planned": Namespace(disk=None), "optimizer_swap": None}
    watch._session = Namespace(auto=auto, run_device=device, **parts)
    for iteration in range(1, num_steps + 1):
        assert watch.step == iteration
        try:
            watch._on_iteration(iteration, {}, None, True, None)
        except EnoughSteps:
            return watch, iteration
    return watch, num_steps


@pytest.mark.parametrize(
    ("limits", "num_steps"),
    [({}, 9), ({"num_timed": 3}, 5), ({"timed_limit_s": 20.0}, 5), ({"timed_limit_s": 1.0}, 4)],
)
def test_a_run_ends_after_its_timed_steps(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any], num_steps: int
) -> None:
    clock = iter(range(0, 1000, 10))  # each step takes 10 s
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(clock))
    assert watched(Request(flags=(), num_warm_up=2, **limits), 9)[1] == num_steps


def test_timed_are_the_steps_after_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import training

    monkeypatch.setattr(training, "num_floating_point_operations", lambda args, batch: args.seq_length * batch)
    monkeypatch.setattr(stopwatch.Phases, "medians", lambda self: {})
    for num_warm_up, unstable in ((9, [15, 16]), (16, [])):
        given = Request(flags=AUTO, num_warm_up=num_warm_up, sequence_schedule=((10, 64), (10, 32)))
        found = watched(given, 20, Namespace(summary=lambda: FOUND))[0].result(tmp_path / "summary.json")
        assert len(found["step_ms_all"]) == 20 - num_warm_up - len(unstable)
        assert (found["unstable_steps"], found["saved_peak_gib"]) == (unstable, None)
        assert (found["tokens_per_step"], found["step_flops"]) == (4 * 32, 4 * 32), "the length of the timed steps"
