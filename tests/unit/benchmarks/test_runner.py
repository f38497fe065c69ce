"""Measured processes: how they are started, directed, stopped and judged, what they time; the commands around them."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.machine import ROOT
from benchmarks.runner import launch, stopwatch
from benchmarks.runner.fp8_scales import fp8_scales
from benchmarks.runner.launch import Child
from benchmarks.runner.memory_hog import MemoryHogError, memory_hog
from benchmarks.runner.outcome import TAIL_CHARACTERS, classify, tail
from benchmarks.runner.planning import plan_file, planning, searches, unstable_steps
from benchmarks.runner.request import Request
from benchmarks.runner.schedule import cut, length_at
from benchmarks.runner.stopwatch import EnoughSteps, Stopwatch
from benchmarks.suites import command as suites_command
from megatron.swap.common.leftovers import LOCK, boot
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
if what == "slow to import":
    time.sleep(600)
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
Path(result_path).write_text(json.dumps({{"heard": "everything", "env": dict(__import__("os").environ)}}))
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
def test_it_waits_for_its_words_and_has_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with Child(request("works", env={"MINE": "1"}), on_gpu=False) as child:
        quiet(child)
        assert child._process.poll() is None, "it waits for go"
        child.say("go")
        polls: list[float] = []

        def on_poll() -> None:
            polls.append(time.monotonic())
            if len(polls) == 5:
                child.say("time")

        finished = child.finish(60, on_poll=on_poll)
    assert finished.outcome == "ok", finished.output_tail
    assert len(polls) >= 5, "it ended before `time` was sent"
    assert (finished.result["heard"], finished.output_tail) == ("everything", "the last words\n")
    env = finished.result["env"]
    assert (env["MINE"], env["OMP_NUM_THREADS"], env["CUDA_VISIBLE_DEVICES"]) == ("1", "3", "")
    assert (env["RANK"], env["WORLD_SIZE"], env["TORCHDYNAMO_DISABLE"]) == ("0", "1", "1")
    on_gpu = launch.run(request("works"), on_gpu=True, timeout_s=60).result["env"]
    assert on_gpu["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert on_gpu["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


@pytest.mark.slow
@pytest.mark.usefixtures("script")
def test_what_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for what, timeout_s, host_gib, outcome, words in (
        ("refuses", 60, None, "refused", ""), ("crashes", 60, None, "failed (7)", ""),
        ("lacks", 60, None, "missing: a_package_that_nobody_has", ""),
        ("hangs", 2, None, "timeout", "not done after 2 s"),
        ("hangs", 60, 1e-6, "oom_host", "GiB of host memory are in use, the suite allows 1e-06"),
    ):  # fmt: skip
        with Child(request(what, requires=("x",)), on_gpu=False) as child:
            child.say("go")
            child.say("time")
            finished = child.finish(timeout_s, host_gib)
        assert (finished.outcome, finished.result) == (outcome, {}), finished.output_tail
        assert words in finished.output_tail
    monkeypatch.setattr(launch, "READY_S", 1.0)
    with Child(request("slow to import"), on_gpu=False) as child:
        assert not child.is_quiet()
        quiet(child)
        finished = child.finish(60)
    assert finished.outcome == "failed (-9)", "not oom_host: we have stopped it"
    assert "still importing after 1 s" in finished.output_tail


@pytest.mark.usefixtures("script")
def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Child(request("works"), on_gpu=False) as child:
        quiet(child)
        assert child._process.stdin is not None
        child._process.stdin.close()
        assert child._process.wait(60) == 1, "it ends with the one who should say its word"
        assert "waited for 'go' on the standard input, heard b''" in child._log.read_text()
        folder = child._log.parent
    assert not folder.exists()
    parent = tmp_path / "temporary"
    left = parent / f"measured-run-{boot()}-left"
    left.mkdir(parents=True)
    (left / LOCK).touch()
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    with Child(request("hangs"), on_gpu=False) as first, Child(request("hangs"), on_gpu=False) as second:
        assert set(parent.iterdir()) == {first._log.parent, second._log.parent}, "what a killed run left is removed"
    assert list(parent.iterdir()) == []


# ---------------------------------------------------------------------------------------------------- outcome

DISK = "megatron.swap.memory.disk_file.DiskError"
USAGE = "megatron.swap.common.types.UsageError"
FAILED = "torch.AcceleratorError: CUDA error: out of memory"


@pytest.mark.parametrize(
    ("code", "output", "stage", "outcome"),
    [
        (0, "", "done", "ok"),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "built", "oom_device"),
        (1, "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", "built", "oom_device"),
        (1, f"    output = torch.matmul(total_input, weight.t())\n{FAILED}", "built", "oom_device"),
        (1, f"    packed = torch.empty(tensor.size(), pin_memory=pin_memory)\n{FAILED}", "built", "oom_host"),
        (1, "megatron.swap.memory.host_memory.HostMemoryError: --swap-layers all takes at least", "ready", "oom_host"),
        (1, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "built", "oom_host"),
        (1, "MemoryError", "stepped", "oom_host"),
        (1, f"{DISK}: optimizer state takes 9 GiB more on disk: the limit is 8 GiB.", "built", "oom_disk"),
        (1, f"{DISK}: taking 9 GiB failed (No space left on device, 1 GiB are free).", "built", "oom_disk"),
        (1, f"{DISK}: --swap-disk-dir /d: reading failed (Input/output error).", "stepped", "failed (1)"),
        (1, f"{USAGE}: --swap-disk-gib: 9 GiB are asked for, 8 GiB are free in /d. Lower it", "ready", "oom_disk"),
        (1, f"{DISK}: 9 GiB more: the limit is 8 GiB.\nHostMemoryError while ending", "built", "oom_disk"),
        (-9, "", "stepped", "oom_host"),
        (124, "torch.OutOfMemoryError is what it would have said", "built", "timeout"),
        (1, "AssertionError: fine_grained_activation_offloading cannot be enabled", "ready", "refused"),
        (1, f"{USAGE}: --swap-layers '0-99': layer 6 is out of range", "ready", "refused"),
        (2, "pretrain_gpt_swap.py: error: unrecognized arguments: --offload", "ready", "refused"),
        (2, "\nerror: --offload is not a flag: `pretrain_gpt_swap.py --help` lists all of them.", "ready", "refused"),
        (1, "AssertionError: a fault while training", "built", "failed (1)"),
        (1, "RuntimeError: the address is in use", "ready", "failed (1)"),
        (0, "ended, but nothing was measured", "stepped", "failed (0)"),
    ],
)
def test_outcomes(code: int, output: str, stage: str, outcome: str) -> None:
    assert classify(code, output, stage) == outcome


def test_packages_that_are_missing_and_the_tail() -> None:
    error = "ModuleNotFoundError: No module named 'torchao.dtypes'"
    assert classify(1, error, "starting", ("torchtune.training",)) == "missing: torchao.dtypes"
    assert classify(1, "ImportError: torchao not installed.", "starting", ("torchtune",)) == "missing: torchtune"
    assert classify(1, error, "starting") == classify(1, error, "built", ("torchtune",)) == "failed (1)"
    assert tail("x" * 9000) == "x" * TAIL_CHARACTERS
    assert tail("the words\ntorch/distributed/elastic traceback") == "the words\n"


# --------------------------------------------------------------------------------------------- plans and steps

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
    assert (plan_file(("--swap-plan", "plan.json")), plan_file(AUTO)) == ("plan.json", None)
    assert planning(AUTO, FOUND) == {**FOUND, "predicted_peak_gib": 82.0}, "that of the highest plan it followed"
    assert planning(("--swap-layers", "all"), None) is None
    with pytest.raises(ValueError, match="searched for its plan does not report a plan"):
        planning(AUTO, None)
    prediction = {
        "budget_gib": 80.0, "predicted_peak_gib": 79.5, "predicted_step_ms": 1400.0, "lower_bound_ms": 1390.0,
        "profile_sha256": "beef", "num_replans": 0, "stages": [],
    }  # fmt: skip
    flags = ("--swap-plan", str(a_plan(tmp_path / "plan.json")))
    assert planning(flags, None) == prediction
    assert planning(flags, FOUND) == {**prediction, "num_replans": 1, "stages": STAGES}
    hand = a_plan(tmp_path / "hand.json", budget_gib=None, profile_sha256=None, predicted=None)
    assert planning(("--swap-plan", str(hand)), None) == {**dict.fromkeys(prediction), "num_replans": 0, "stages": []}
    for first, last, unstable in ((10, 14, []), (17, 40, []), (9, 12, [9]), (12, 20, [15, 16]), (1, 3, [1, 2, 3])):
        assert unstable_steps(AUTO, FOUND, first, last) == unstable
        assert unstable_steps(flags, FOUND, first, last) == [], "nothing is tried"


def test_lengths_and_cut_batches() -> None:
    schedule = ((2, 64), (1, 32), (3, 48))
    assert [length_at(schedule, step) for step in range(1, 8)] == [64, 64, 32, 48, 48, 48, 64]
    tokens = torch.arange(24).view(2, 12)
    lengths = iter([12, 5])
    inner = Namespace(get_batch=lambda *args: [tokens, tokens + 1, None])
    cut(inner, lambda: next(lengths))
    assert torch.equal(inner.get_batch(None, None)[0], tokens)
    inputs, labels, mask = inner.get_batch(None, None)
    assert torch.equal(inputs, tokens[:, :5])
    assert torch.equal(labels, tokens[:, :5] + 1)
    assert mask is None
    assert inputs.is_contiguous()
    masked = Namespace(get_batch=lambda *args: [torch.zeros(2, 1, 8, 8)])
    cut(masked, lambda: 4)
    with pytest.raises(ValueError, match="holds an attention mask"):
        masked.get_batch(None, None)


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
    [({}, 9), ({"num_timed": 3}, 5), ({"num_timed": 1}, 3), ({"timed_limit_s": 100.0}, 9), ({"timed_limit_s": 20.0}, 5),
     ({"timed_limit_s": 19.9}, 4), ({"timed_limit_s": 1.0}, 4)],
)  # fmt: skip
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


def test_scales_and_histories_of_8_bit_layers_are_found() -> None:
    scale, history, backward = torch.ones(3), torch.ones(4, 3), torch.ones(2)
    layer, plain = nn.Linear(2, 2), nn.Linear(2, 2)
    layer.fp8_meta = {
        "recipe": "delayed",
        "scaling_fwd": Namespace(scale=scale, amax_history=history),
        "scaling_bwd": Namespace(scale=backward),  # a recipe without a history
    }
    assert [id(one) for one in fp8_scales(nn.Sequential(plain, layer))] == [id(scale), id(history), id(backward)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU that has them")
def test_memory_that_another_program_would_take() -> None:
    with pytest.raises(MemoryHogError, match=r"1 and 0\.5 GiB of GPU memory are not free: .+"), memory_hog([1, 0.5]):
        pytest.fail("the block ran without it")
    with memory_hog([0, 0]):
        pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_is_taken_so_long_and_no_longer() -> None:
    before_bytes, _ = torch.cuda.mem_get_info()
    with memory_hog([2]):
        assert torch.cuda.mem_get_info()[0] <= before_bytes - 2 * 2**30
    assert torch.cuda.mem_get_info()[0] > before_bytes - 2**30


# --------------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--output x.md", "--output x.md: the name of the rows must end in .jsonl"),
        ("--rounds 0", "--rounds 0: at least 1"),
        ("--time-limit-s 0", "--time-limit-s 0: must be more than 0"),
        ("--time-limit-s nan", "--time-limit-s nan: must be more than 0"),
        ("--output folder.jsonl --resume", "--output folder.jsonl is no file"),
        ("--output held.jsonl", "--output held.jsonl: another run is writing it"),
        ("--output x.jsonl", "--output x.jsonl: x.md is there, and would be overwritten. Name another file."),
        ("--output binary.jsonl --resume", "binary.jsonl: cannot be read as rows"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(suites_command.machine, "facts", lambda: {"machine": {"gpu": "none"}})
    (tmp_path / "x.md").write_text("kept")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "binary.jsonl").write_bytes(b"\x80\x00\xff" * 1000)
    with (tmp_path / ".held.jsonl.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match=r"[12]"):  # argparse ends the program itself
            sys.exit(suites_command.main(["--suite", "quick", *flags.split()]))
    assert said in capsys.readouterr().err
    assert (tmp_path / "x.md").read_text() == "kept"
    assert not list(tmp_path.glob(".[xfb]*.lock")), "no lock is left"


def measured_children(parent: int) -> list[int]:
    """Return the live measured processes that a process started."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(one) for one in children if b"runner.child" in Path(f"/proc/{one}/cmdline").read_bytes()]


@pytest.mark.slow
def test_told_to_end_it_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "bench.py"), "--suite", "quick", "--method", "none"]
    running = subprocess.Popen([*command, "--output", "rows.jsonl"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert "runs to do" in running.stdout.readline()
    while not (children := measured_children(running.pid)):
        assert running.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)  # it has begun; the one who started it has noted that, too
    running.send_signal(signal.SIGTERM)
    rest, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "interrupted" in rest
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    assert list(tmp_path.iterdir()) == [], "neither rows nor a lock"
