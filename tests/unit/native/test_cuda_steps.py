"""The transfer queue: CUDA copies. The fake shows order and waits; real copies need a GPU."""

import random
import threading
import time
from collections.abc import Callable

import pytest

from megatron.swap.common.types import SwapError
from megatron.swap.native.transfer_queue import CudaCopy, TransferQueue
from tests.unit.native.helpers import NEEDS_COMPILER, FakeCuda, Memory, copy

Make = Callable[..., TransferQueue]
STREAM, OTHER_STREAM = 77, 78

pytestmark = NEEDS_COMPILER


def cuda_copy(target: Memory, source: Memory, done: int, after: int = 0, **other: int) -> CudaCopy:
    where = {"stream": STREAM, "device": 3, **other}
    return CudaCopy(target.address, source.address, len(source.data), after=after, done=done, **where)


def until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.001)


def test_a_copy_waits_records_and_is_noticed(make: Make, fake: FakeCuda) -> None:
    queue = make(cuda=fake)
    source, target = Memory(b"new"), Memory(b"old")
    fake.allow(0)
    fake.record(5, OTHER_STREAM)
    ticket = queue.enqueue([cuda_copy(target, source, done=6, after=5)])
    queue.wait_issued(ticket)
    assert fake.calls == ["device 3", "wait 5 stream 77", "copy 3 kind 4 stream 77 device 3", "record 6 stream 77"]
    time.sleep(0.01)
    assert not queue.is_done(ticket)
    assert target.data == b"old"
    fake.allow(-1)
    queue.wait(ticket)
    assert target.data == b"new"


def test_a_step_behind_a_copy_begins_when_the_copy_is_complete(make: Make, fake: FakeCuda) -> None:
    queue = make(cuda=fake)
    source, middle, target = Memory(b"new"), Memory(b"old"), Memory(b"old")
    fake.allow(0)
    ticket = queue.enqueue([cuda_copy(middle, source, done=6), copy(target, middle)])
    until(lambda: "record 6 stream 77" in fake.calls)
    time.sleep(0.01)
    assert target.data == b"old"
    fake.allow(-1)
    queue.wait_issued(ticket)
    assert target.data == b"new"
    assert queue.is_done(ticket)


def test_copy_behind_copy_is_left_to_the_device(make: Make, fake: FakeCuda) -> None:
    queue = make(cuda=fake)
    places = [Memory(bytes([number])) for number in range(4)]
    fake.allow(0)
    ticket = queue.enqueue([
        cuda_copy(places[1], places[0], done=6),
        cuda_copy(places[2], places[1], done=7),
        cuda_copy(places[3], places[2], done=8, stream=OTHER_STREAM),
    ])
    queue.wait_issued(ticket)
    assert [call for call in fake.calls if call.startswith("wait")] == ["wait 7 stream 78"]
    fake.allow(-1)
    queue.wait(ticket)
    assert [place.data for place in places] == [b"\0"] * 4


def test_so_many_are_in_flight_and_pushed_ones_go_ahead(make: Make, fake: FakeCuda) -> None:
    queue = make(num_in_flight=2, cuda=fake)
    source, target = Memory(b"new"), Memory(b"old")
    fake.allow(0)
    tickets = [queue.enqueue([cuda_copy(target, source, done=number)]) for number in range(1, 5)]
    until(lambda: queue.num_waiting == 2)
    time.sleep(0.01)
    assert queue.num_waiting == 2
    assert not any(queue.is_done(ticket) for ticket in tickets[:2])
    pushed = queue.push([cuda_copy(target, source, done=9)])
    urgent = queue.push([copy(target, source)])
    queue.wait(urgent)  # no CUDA in it: nothing holds it up
    assert not queue.is_done(tickets[0])
    fake.allow(2)  # the first of them is complete
    queue.wait(tickets[0])
    queue.wait_issued(pushed)
    assert [call.split()[1] for call in fake.calls if call.startswith("record")] == ["1", "2", "9"]
    fake.allow(-1)
    queue.wait_all()
    assert [call.split()[1] for call in fake.calls if call.startswith("record")] == ["1", "2", "9", "3", "4"]


@pytest.mark.parametrize(("call", "said"), [
    ("cudaSetDevice", "choosing a device"), ("cudaStreamWaitEvent", "waiting for an event"),
    ("cudaMemcpyAsync", "copying"), ("cudaEventRecord", "recording an event"), ("cudaEventQuery", "a copy"),
])  # fmt: skip
def test_errors_of_cuda_reach_whoever_waits(make: Make, fake: FakeCuda, call: str, said: str) -> None:
    queue = make(cuda=fake)
    source, target, other = Memory(b"new"), Memory(b"old"), Memory(b"old")
    fake.fail(call)
    failing = queue.enqueue([cuda_copy(target, source, done=1, after=2), copy(other, source)])
    good = queue.enqueue([cuda_copy(target, source, done=3)])
    queue.wait(good)
    with pytest.raises(SwapError, match=f"job {failing}: CUDA: {said} failed: as the test wished") as caught:
        queue.wait(failing)
    assert isinstance(caught.value, RuntimeError)
    assert other.data == b"old"
    assert ("synchronize stream 77" in fake.calls) == (call == "cudaEventRecord")


def test_many_threads(make: Make, fake: FakeCuda) -> None:
    """Jobs of copies of both kinds are enqueued, pushed, withdrawn and waited for at once. Each moves all its bytes."""
    queue = make(cuda=fake)
    problems: list[BaseException] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for number in range(100):
                data = chance.randbytes(chance.randrange(1, 2000))
                source, middle, target = Memory(data), Memory(bytes(len(data))), Memory(bytes(len(data)))
                done = 1 + seed * 1000 + 2 * number  # events of this job alone
                first = chance.choice([copy(middle, source), cuda_copy(middle, source, done)])
                last = chance.choice([copy(target, middle), cuda_copy(target, middle, done + 1)])
                ticket = chance.choice([queue.enqueue, queue.push])([first, last])
                if chance.random() < 0.2 and queue.erase(ticket):
                    assert target.data == bytes(len(data))
                    continue
                queue.wait(ticket)
                assert target.data == data
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    queue.wait_and_stop()


def test_a_failure_is_told_when_the_copy_before_it_is_over(make: Make, fake: FakeCuda) -> None:
    queue = make(cuda=fake)
    source, target = Memory(b"new"), Memory(b"old")
    fake.allow(0)
    good = cuda_copy(target, source, done=1)
    ticket = queue.enqueue([good, CudaCopy(1, 1, 0, stream=STREAM, after=0, done=2, device=3)])
    queue.wait_issued(ticket)
    fake.allow(-1)
    queue.wait(ticket)
    fake.allow(0)
    fake.fail("cudaStreamWaitEvent")
    ticket = queue.enqueue([good, cuda_copy(target, source, done=2, after=5)])
    until(lambda: queue.num_waiting == 0)
    time.sleep(0.01)
    assert not queue.is_done(ticket)  # its memory is in use
    fake.allow(-1)
    with pytest.raises(SwapError, match="waiting for an event"):
        queue.wait_issued(ticket)
