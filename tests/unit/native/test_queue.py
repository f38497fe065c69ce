"""The transfer queue: host memory."""

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from megatron.swap.common.types import MIB, SwapError, UsageError
from megatron.swap.native.transfer_queue import CudaCopy, HostCopy, TransferQueue
from tests.unit.native.helpers import NEEDS_COMPILER, Memory, copy
from tests.unit.test_house import ROOT

Make = Callable[..., TransferQueue]

pytestmark = NEEDS_COMPILER


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> CudaCopy:
    """A step that fails, since queues find no CUDA."""
    monkeypatch.setattr("megatron.swap.native.transfer_queue.loaded_cuda_library", lambda: None)
    return CudaCopy(1, 1, 1, 0, 0, 1, 0)


def slow_job() -> tuple[list[HostCopy], list[Memory]]:
    """Return a job of copies of some hundred milliseconds, and the objects to keep alive."""
    source, target = Memory(bytes(64 * MIB)), Memory(bytes(64 * MIB))
    return [copy(target, source)] * 20, [source, target]


def test_jobs_are_done_in_order_and_pushed_ones_go_ahead_of_all_that_wait(make: Make) -> None:
    queue = make(started=False)
    places = [Memory(bytes([number])) for number in range(10)]
    tickets = [queue.enqueue([copy(places[i + 1], places[i])]) for i in range(9)]
    assert tickets == sorted(set(tickets))
    pushed = [queue.push([copy(places[0], Memory(b"x"))]), queue.push([copy(places[0], Memory(b"y"))])]
    assert queue.erase(pushed[0])
    assert queue.num_waiting == 10
    queue.start()
    queue.wait(tickets[-1])
    assert [place.data for place in places] == [b"y"] * 10
    assert all(queue.is_done(ticket) for ticket in (*tickets, pushed[1]))
    assert queue.num_waiting == 0


def test_nothing_is_done_before_start(make: Make) -> None:
    queue = make(started=False)
    source, target = Memory(b"new"), Memory(b"old")
    ticket = queue.enqueue([copy(target, source)])
    time.sleep(0.05)
    assert target.data == b"old"
    assert not queue.is_done(ticket)
    for call in (lambda: queue.wait(ticket), lambda: queue.wait_issued(ticket), queue.wait_all, queue.wait_and_stop):
        with pytest.raises(UsageError, match="not started"):
            call()
    queue.start()
    queue.start()
    queue.wait_issued(ticket)
    assert target.data == b"new"


def test_erased_jobs_are_never_done(make: Make) -> None:
    queue = make(started=False)
    source, target = Memory(b"new"), Memory(b"old")
    erased, taken = queue.enqueue([copy(target, source)]), queue.enqueue([copy(target, source)])
    done = queue.enqueue([])
    assert queue.erase(erased)
    assert queue.erase(erased)
    assert queue.erase(taken)
    queue.start()
    queue.wait_all()
    assert target.data == b"old"
    assert not queue.erase(done)
    for ticket in (erased, taken):
        for call in (queue.wait, queue.wait_issued, queue.is_done):
            with pytest.raises(UsageError, match=f"job {ticket} was withdrawn"):
                call(ticket)


def test_a_job_that_runs_is_not_erased(make: Make) -> None:
    queue = make()
    job, keep = slow_job()
    ticket = queue.enqueue(job)
    while queue.num_waiting:
        time.sleep(0.001)
    assert not queue.erase(ticket)
    assert not queue.is_done(ticket)
    queue.wait(ticket)
    assert queue.is_done(ticket)
    assert keep


def test_errors_reach_whoever_waits(failing: CudaCopy, make: Make) -> None:
    queue = make()
    source, target = Memory(b"new"), Memory(b"old")
    first, second, third = (queue.enqueue([failing, copy(target, source)]) for _ in range(3))
    good = queue.enqueue([])
    queue.wait(good)
    queue.wait(good)
    with pytest.raises(SwapError, match=f"queue test, job {second}: no CUDA runtime is loaded"):
        queue.wait(second)
    with pytest.raises(SwapError, match=f"job {first}"):
        queue.wait_issued(first)
    assert queue.is_done(first)
    assert target.data == b"old"  # the step behind the one that failed was left out
    with pytest.raises(SwapError, match=f"job {third}"):
        queue.wait_all()
    queue.wait_all()  # each was raised
    with pytest.raises(SwapError, match=f"job {second}"):
        queue.wait(second)  # and is again for who asks for it
    queue.wait_and_stop()


def test_stopping_finishes_everything_and_raises_what_nobody_was_told(failing: CudaCopy, make: Make) -> None:
    queue = make()
    job, keep = slow_job()
    source, target = Memory(b"new"), Memory(b"old")
    queue.enqueue(job)
    failed, also_failed = queue.enqueue([failing]), queue.enqueue([failing])
    last = queue.enqueue([copy(target, source)])
    with pytest.raises(SwapError, match=f"job {failed}"):
        queue.wait_and_stop()
    assert target.data == b"new"
    with pytest.raises(SwapError, match=f"job {also_failed}"):
        queue.wait_and_stop()
    queue.wait_and_stop()
    assert queue.is_done(last)
    assert keep
    for add in (queue.enqueue, queue.push):
        with pytest.raises(UsageError, match="it was stopped"):
            add([])
    queue.start()


@pytest.mark.parametrize(("make_step", "error", "said"), [
    (lambda: TransferQueue("test", 0), UsageError, "num_in_flight=0"),
    (lambda: TransferQueue("test").enqueue([1]), TypeError, "not a step: int"),  # type: ignore[list-item]
])  # fmt: skip
def test_wrong_steps_are_refused_where_they_are_made(make_step: Callable, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make_step()


INTERRUPTED = """
import ctypes, os, signal, threading
from megatron.swap.native.transfer_queue import HostCopy, TransferQueue
queue = TransferQueue("test")
queue.start()
source = ctypes.create_string_buffer(64 << 20)
half = 32 << 20
job = [HostCopy(ctypes.addressof(source), ctypes.addressof(source) + half, half)]
for _ in range(20_000):  # minutes of copies, of which all but the first few are dropped at the end
    ticket = queue.enqueue(job)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without it
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    queue.wait(ticket)
except KeyboardInterrupt:
    assert not queue.is_done(ticket)
    print("interrupted")
"""

EXIT = """
import ctypes, sys
from megatron.swap.native.transfer_queue import HostCopy, TransferQueue
source = ctypes.create_string_buffer(64 << 20)
half = 32 << 20
for number in range(3):
    queue = TransferQueue("test")
    if number:
        queue.start()
    address = ctypes.addressof(source)
    for _ in range(1000):
        queue.enqueue([HostCopy(address, address + half, half)])
    kept = (queue, globals().get("kept"))
sys.exit(0)
"""


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100,
    )


def test_ctrl_c_interrupts_waiting() -> None:
    done = run_program(INTERRUPTED)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


@pytest.mark.slow
def test_the_interpreter_ends_with_a_queue_at_work() -> None:
    done = run_program(EXIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
