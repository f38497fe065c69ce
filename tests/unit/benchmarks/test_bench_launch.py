"""Starting, directing and stopping measured processes; a script stands in for the trainer."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.runner import launch
from benchmarks.runner.launch import Child
from benchmarks.runner.outcome import TIMED_OUT
from benchmarks.runner.request import Request
from megatron.swap.common.leftovers import LOCK, boot

# A fake trainer: it follows its first flag and prints the words of the real one.
SCRIPT = """#!{python}
import json, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from benchmarks.runner.child import Channel, leave
from benchmarks.runner.request import Request
from megatron.swap.common.leftovers import LOCK
_, _, _, request_path, result_path, descriptor = sys.argv
request = Request.from_json(Path(request_path).read_text())
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


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "python"
    path.write_text(SCRIPT.format(python=sys.executable, root=str(launch.ROOT)))
    path.chmod(0o755)
    monkeypatch.setattr(launch.sys, "executable", str(path))


def request(what: str, **changed: Any) -> Request:
    return Request(flags=(what,), num_warm_up=2, **changed)


def quiet(child: Child) -> None:
    deadline = time.monotonic() + 60
    while not child.is_quiet():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_both_words_may_be_said_at_once() -> None:
    finished = launch.run(request("works"), on_gpu=False, timeout_s=60)
    assert finished.outcome == "ok", finished.output_tail
    assert finished.result["heard"] == "everything"
    assert finished.output_tail == "the last words\n"


@pytest.mark.slow
def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    on_cpu = launch.run(request("works", env={"MINE": "1"}), on_gpu=False, timeout_s=60).result["env"]
    assert (on_cpu["MINE"], on_cpu["OMP_NUM_THREADS"], on_cpu["CUDA_VISIBLE_DEVICES"]) == ("1", "3", "")
    assert (on_cpu["RANK"], on_cpu["WORLD_SIZE"], on_cpu["TORCHDYNAMO_DISABLE"]) == ("0", "1", "1")
    on_gpu = launch.run(request("works"), on_gpu=True, timeout_s=60).result["env"]
    assert on_gpu["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert on_gpu["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_it_waits_for_its_words() -> None:
    with Child(request("works"), on_gpu=False) as child:
        quiet(child)
        assert child._process.poll() is None, "it waits for go"
        child.say("go")
        polls: list[float] = []
        sent_s: list[float] = []

        def on_poll() -> None:
            polls.append(time.monotonic())
            if len(polls) == 5:
                child.say("time")
                sent_s.append(time.monotonic())

        finished = child.finish(60, on_poll=on_poll)
    assert finished.outcome == "ok"
    assert sent_s, "it ended before `time` was sent"


@pytest.mark.parametrize(
    ("what", "outcome"),
    [
        ("refuses", "refused"),
        ("lacks", "missing: a_package_that_nobody_has"),
        ("crashes", "failed (7)"),
    ],
)
def test_what_goes_wrong(what: str, outcome: str) -> None:
    finished = launch.run(request(what, requires=("x",)), on_gpu=False, timeout_s=60)
    assert finished.outcome == outcome, finished.output_tail
    assert finished.result == {}


@pytest.mark.slow
def test_time_is_up() -> None:
    finished = launch.run(request("hangs"), on_gpu=False, timeout_s=3)
    assert finished.outcome == "timeout"
    assert "not done after 3 s" in finished.output_tail
    assert TIMED_OUT == 124


def test_the_host_is_protected() -> None:
    with Child(request("hangs"), on_gpu=False) as child:
        finished = child.finish(60, host_limit_gib=1e-6)
    assert finished.outcome == "oom_host"
    assert "GiB of host memory are in use, the suite allows 1e-06" in finished.output_tail


def test_what_never_becomes_quiet_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "READY_S", 1.0)
    with Child(request("slow to import"), on_gpu=False) as child:
        assert not child.is_quiet()
        quiet(child)
        assert child._process.poll() is not None
        finished = child.finish(60)
    assert finished.outcome == "failed (-9)", "not oom_host: we have stopped it"
    assert "still importing after 1 s" in finished.output_tail


def test_whoever_waits_for_its_word_ends_with_the_one_who_should_say_it() -> None:
    with Child(request("works"), on_gpu=False) as child:
        quiet(child)
        assert child._process.stdin is not None
        child._process.stdin.close()
        assert child._process.wait(60) == 1
        assert "waited for 'go' on the standard input, heard b''" in child._log.read_text()


def test_nothing_is_left_behind() -> None:
    child = Child(request("hangs"), on_gpu=False)
    folder = child._log.parent
    quiet(child)
    child.close()
    assert child._process.poll() is not None
    assert not folder.exists()


def test_the_folder_of_a_program_that_was_killed_is_removed_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of a run that goes on stays."""
    parent = tmp_path / "temporary"
    left = parent / f"measured-run-{boot()}-left"
    left.mkdir(parents=True)
    (left / LOCK).touch()
    (left / "request.json").write_text("{}")
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    with Child(request("hangs"), on_gpu=False) as first, Child(request("hangs"), on_gpu=False) as second:
        assert set(parent.iterdir()) == {first._log.parent, second._log.parent}
    assert list(parent.iterdir()) == []
