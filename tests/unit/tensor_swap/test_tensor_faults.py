"""Swapping tensor by tensor, with wrong uses and copies that fail: errors, never lost bytes."""

import copy
import io
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.swap.common.types import MIB, SwapError, UsageError
from megatron.swap.memory.host_memory import HostMemoryError
from megatron.swap.native.build import load
from megatron.swap.tensor_swap.operations import storage_of
from megatron.swap.tensor_swap.swap import TensorSwap
from tests.unit.tensor_swap.tensor_cases import HOST_GIB, OrderlyQueue, leave, tensor


def error_of(call: Callable[[], Any]) -> str:
    """Return the error that a call raises."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


class Odd(torch.Tensor):
    pass


class TestErrors:
    @pytest.mark.parametrize("when", ["leaving", "out"])
    def test_what_nobody_sees_gets_an_error(self, orderly: type[OrderlyQueue], when: str):
        if load() is None:
            pytest.skip("needs a compiler")
        with TensorSwap(HOST_GIB, "cpu", orderly) as swap:
            a = tensor()
            view = a[:5]
            swap.queue_swap_out(a)
            if when == "out":
                swap.wait_swapped_out()
            seen = []
            for use in (a.zero_, a.data_ptr, view.data_ptr, storage_of(a).data_ptr):
                thread = threading.Thread(target=lambda use=use: seen.append(error_of(use)))  # no mode there
                thread.start()
                thread.join()
            assert all("64.0 KiB) is offloaded" in text and "resident(tensor)" in text for text in seen), seen
            swap.wait_swapped_out()
            assert torch.equal(a, tensor())

    def test_ways_to_an_address_bring_it_back(self, swap: TensorSwap):
        for read in (
            torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.data_ptr, torch.Tensor.__array__, repr,
            copy.deepcopy, pickle.dumps, lambda given: torch.save(given, io.BytesIO()), "{}".format,
            lambda given: given.storage().tolist(),
        ):  # fmt: skip
            a = tensor()
            leave(swap, a)
            assert swap.is_out(a)
            read(a)
            assert not swap.is_out(a)
            assert torch.equal(a, tensor())

    def test_before_open_and_after_close(self):
        swap = TensorSwap(HOST_GIB, "cpu")
        a = tensor()
        for call in (swap.swap_out, swap.queue_swap_out, swap.queue_prefetch, swap.resident):
            with pytest.raises(SwapError, match="not open"):
                call(a)
        with pytest.raises(SwapError, match="not open"):
            _ = swap.stats
        with swap:
            swap.swap_out(a)
            with pytest.raises(SwapError, match="open already"):
                swap.open()
        swap.close()
        assert torch.equal(a, tensor())
        for call in (swap.wait, swap.wait_swapped_out, swap.start_prefetches, swap.stop):
            with pytest.raises(SwapError, match="not open"):
                call()
        with swap:  # again
            swap.swap_out(a)
        assert torch.equal(a, tensor())

    def test_stopped_accepts_nothing_but_brings_back(self, swap: TensorSwap):
        a, b = tensor(seed=0), tensor(seed=1)
        swap.queue_swap_out(a, b)
        swap.stop()
        assert swap.is_out(a)
        with pytest.raises(SwapError, match="stopped"):
            swap.swap_out(b)
        with pytest.raises(SwapError, match="stopped"):
            swap.queue_prefetch(a)
        assert torch.equal(a, tensor(seed=0))
        swap.close()
        assert torch.equal(b, tensor(seed=1))

    @pytest.mark.parametrize(("make", "message"), [
        (lambda: [1.0], "list was given"),
        (lambda: torch.ones(4, device="meta"), "on meta"),
        (lambda: torch.ones(4).to_sparse(), "layout"),
        (lambda: torch.from_numpy(torch.ones(4).numpy()), "not PyTorch's own"),
        (lambda: torch.ones(4).share_memory_(), "not PyTorch's own"),
        (lambda: torch.nn.Buffer(torch.ones(4)) * torch.ones(4).as_subclass(Odd), "it is a Odd"),
    ])  # fmt: skip
    def test_what_cannot_be_swapped_is_refused_and_nothing_begun(self, swap: TensorSwap, make: Any, message: str):
        a = tensor()
        with pytest.raises(UsageError, match=message):
            swap.swap_out(a, make())
        swap.wait()
        assert not swap.is_out(a)
        assert swap.stats.out_bytes == 0

    @pytest.mark.parametrize("when", ["leaving", "out", "returning"])
    def test_of_two_swaps_the_second_is_told(self, orderly: type[OrderlyQueue], when: str):
        with TensorSwap(HOST_GIB, "cpu", orderly) as swap, TensorSwap(HOST_GIB, "cpu") as other:
            a = tensor()
            swap.swap_out(a)
            if when != "leaving":
                swap.wait_swapped_out()
            if when == "returning":
                swap.queue_prefetch(a)
                swap.start_prefetches()
            with pytest.raises(UsageError, match="another TensorSwap"):
                other.swap_out(a)
            assert torch.equal(a, tensor())
            leave(other, a)
            assert other.is_out(a)

    def test_they_are_closed_in_order_and_where_they_were_opened(self):
        first, second = TensorSwap(HOST_GIB, "cpu").open(), TensorSwap(HOST_GIB, "cpu").open()
        a = tensor()
        leave(second, a)
        with pytest.raises(SwapError, match="all that was opened later"):
            first.close()
        seen: list[str] = []
        thread = threading.Thread(target=lambda: seen.append(error_of(second.close)))
        thread.start()
        thread.join()
        assert "on the thread that opened it" in seen[0]
        assert torch.equal(a, tensor())
        second.close()
        first.close()

    def test_a_forked_process_is_told(self, swap: TensorSwap):
        a = tensor()
        leave(swap, a)
        child = os.fork()
        if child == 0:
            os._exit(7 if "forked" in error_of(a.sum) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert torch.equal(a, tensor())

    def test_host_memory_that_does_not_suffice(self):
        with TensorSwap(1 / 1024, "cpu") as swap:
            a = tensor(4 * MIB)
            with pytest.raises(HostMemoryError, match=r"4.00 MiB more: TensorSwap\(host_gib=0.000976"):
                swap.swap_out(a)
            assert torch.equal(a, tensor(4 * MIB))

    def test_a_copy_out_that_fails_is_told_to_who_waits_and_the_tensor_stays(self, orderly: type[OrderlyQueue]):
        with TensorSwap(HOST_GIB, "cpu", orderly) as swap:
            orderly.fails.add(("swap-out", 1))
            a, b = tensor(seed=0), tensor(seed=1)
            swap.queue_swap_out(a, b)
            with pytest.raises(OSError, match="no space"):
                swap.wait_swapped_out()
            assert not swap.is_out(a)
            assert swap.is_out(b)
            swap.wait_swapped_out()
            assert torch.equal(a + b, tensor(seed=0) + tensor(seed=1))
            assert swap.stats.host_bytes == 0
            orderly.fails.add(("swap-out", 3))
            swap.queue_swap_out(a)
            with pytest.raises(OSError, match="no space"):
                swap.close()
            with pytest.raises(SwapError, match="not open"):
                swap.wait()
        assert torch.equal(a + b, tensor(seed=0) + tensor(seed=1))

    def test_a_copy_in_that_fails_is_told_to_who_waits_and_can_be_tried_again(self, orderly: type[OrderlyQueue]):
        with TensorSwap(HOST_GIB, "cpu", orderly) as swap:
            orderly.fails.add(("swap-in", 1))
            a = tensor()
            leave(swap, a)
            with pytest.raises(OSError, match="no space"):
                a.sum()
            assert swap.is_out(a)
            assert torch.equal(a, tensor())
