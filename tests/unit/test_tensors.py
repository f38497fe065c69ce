"""Swapping tensor by tensor: what comes back when, what stays valid, what is refused."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.swap.host_memory import HostMemoryError
from megatron.swap.native.access import StorageAccess, storage_access
from megatron.swap.native.queue import queue_class
from megatron.swap.native.twin import PythonQueue
from megatron.swap.tensors import TensorSwap
from megatron.swap.types import MIB, SwapError, UsageError
from tests.unit.orderly_queue import OrderlyQueue

HOST_GIB = 1 / 4
QUEUES = {queue.__name__: queue for queue in (queue_class(), PythonQueue)}


@pytest.fixture
def orderly() -> type[OrderlyQueue]:
    """A class of its own, that knows its queues: first that of the way out, then that of the way in."""
    return type("Orderly", (OrderlyQueue,), {"made": [], "fails": set()})


@pytest.fixture(params=QUEUES.values(), ids=QUEUES.keys())
def swap(request: pytest.FixtureRequest) -> Iterator[TensorSwap]:
    with TensorSwap(HOST_GIB, "cpu", request.param) as opened:
        yield opened


def tensor(num_bytes: int = 1 << 16, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_bytes // 4, generator=torch.Generator().manual_seed(seed))


def held_bytes(given: torch.Tensor) -> int:
    return given.untyped_storage().nbytes()


class TestOut:
    def test_memory_is_free_and_comes_back_with_the_same_bytes(self, swap: TensorSwap):
        a = tensor()
        expected = a.tolist()
        swap.swap_out(a)
        swap.wait_swapped_out()
        assert swap.is_out(a)
        assert held_bytes(a) == 0
        assert swap.stats.host_bytes == 1 << 16
        assert (a + 0).tolist() == expected
        assert held_bytes(a) == 1 << 16
        assert not swap.is_out(a)
        assert swap.stats.in_bytes == swap.stats.out_bytes == 1 << 16

    def test_what_is_queued_leaves_in_its_order_and_now_comes_first(self, orderly: type[OrderlyQueue]):
        with TensorSwap(HOST_GIB, "cpu", orderly) as swap:
            a, b, c, d = (tensor(seed=seed) for seed in range(4))
            swap.queue_swap_out(a, b)
            swap.swap_out(c, d)
            swap.wait_swapped_out()
            assert orderly.made[0].order == [4, 3, 1, 2]  # d was pushed first, then c ahead of it
            assert [held_bytes(x) for x in (a, b, c, d)] == [0] * 4

    def test_one_that_is_queued_is_put_ahead(self, orderly: type[OrderlyQueue]):
        with TensorSwap(HOST_GIB, "cpu", orderly) as swap:
            a, b = tensor(seed=1), tensor(seed=2)
            swap.queue_swap_out(a, b)
            swap.swap_out(b)
            swap.swap_out(b)
            swap.wait_swapped_out()
            assert len(orderly.made[0].order) == 2
            assert orderly.made[0].order[-1] == 1

    def test_an_operation_calls_back_what_has_not_left(self, orderly: type[OrderlyQueue]):
        with TensorSwap(HOST_GIB, "cpu", orderly) as swap:
            a = tensor()
            swap.queue_swap_out(a)
            a.add_(1)
            swap.wait_swapped_out()
            assert not swap.is_out(a)
            assert swap.stats.num_recalled == 1
            assert swap.stats.out_bytes == 0
            assert swap.stats.host_bytes == 0

    def test_host_memory_of_what_is_called_back_is_lent_until_the_copy_is_over(self, orderly: type[OrderlyQueue]):
        with TensorSwap(HOST_GIB, "cpu", orderly) as swap:
            orderly.erase = lambda queue, ticket: False  # as if it had begun
            a, b = tensor(), tensor(seed=1)
            swap.queue_swap_out(a)
            a.add_(1)
            assert swap.stats.host_bytes == 1 << 16
            orderly.made[0].wait_all()
            swap.queue_swap_out(b)
            assert swap.stats.host_bytes == 1 << 16  # b's
            assert torch.equal(a, tensor() + 1)

    def test_a_change_during_the_copy_is_kept(self, swap: TensorSwap):
        a = tensor(8 * MIB)
        expected = a + 1
        swap.swap_out(a)
        a.add_(1)
        swap.swap_out(a)
        swap.wait_swapped_out()
        assert torch.equal(a, expected)

    def test_memory_is_freed_by_later_operations_without_waiting(self, swap: TensorSwap):
        a, b = tensor(), torch.ones(4)
        swap.swap_out(a)
        for _ in range(100_000):
            b.add_(1)
            if swap.is_out(a):
                break
        assert swap.is_out(a)

    def test_twice_the_same_storage_is_one(self, swap: TensorSwap):
        a = tensor()
        swap.swap_out(a, a[3:], a.view(2, -1))
        swap.swap_out(a)
        swap.wait_swapped_out()
        swap.swap_out(a)
        assert swap.stats.out_bytes == 1 << 16


class TestIn:
    def test_prefetches_begin_when_told_in_their_order(self, orderly: type[OrderlyQueue]):
        with TensorSwap(HOST_GIB, "cpu", orderly) as swap:
            tensors = [tensor(seed=seed) for seed in range(3)]
            expected = [x.tolist() for x in tensors]
            swap.swap_out(*tensors)
            swap.wait_swapped_out()
            swap.queue_prefetch(tensors[2], tensors[0])
            assert held_bytes(tensors[2]) == held_bytes(tensors[0]) == 0
            swap.start_prefetches()
            assert held_bytes(tensors[2]) == held_bytes(tensors[0]) == 1 << 16
            assert held_bytes(tensors[1]) == 0
            assert orderly.made[1].order == []
            swap.wait()
            assert orderly.made[1].order == [1, 2]
            assert swap.stats.num_passive == 0
            assert swap.is_out(tensors[1])
            assert [(x + 0).tolist() for x in tensors] == expected

    def test_what_is_touched_comes_ahead_of_queued_prefetches(self, orderly: type[OrderlyQueue]):
        with TensorSwap(HOST_GIB, "cpu", orderly) as swap:
            a, b, c = (tensor(seed=seed) for seed in range(3))
            swap.swap_out(a, b, c)
            swap.wait_swapped_out()
            swap.queue_prefetch(a, b)
            swap.start_prefetches()
            c.sum()
            assert orderly.made[1].order == [3]
            b.sum()  # prefetched, not begun: goes to the head
            assert orderly.made[1].order == [3, 4]
            assert swap.stats.num_passive == 2
            swap.wait()
            assert orderly.made[1].order == [3, 4, 1]

    def test_cancel_takes_back_what_has_not_begun(self, orderly: type[OrderlyQueue]):
        with TensorSwap(HOST_GIB, "cpu", orderly) as swap:
            a, b, c = (tensor(seed=seed) for seed in range(3))
            swap.swap_out(a, b)
            swap.wait_swapped_out()
            swap.queue_prefetch(a, b)
            swap.cancel(a)  # noted only
            swap.start_prefetches()
            assert held_bytes(a) == 0
            assert held_bytes(b) == 1 << 16
            swap.cancel(b)  # queued
            assert held_bytes(b) == 0
            assert swap.is_out(b)
            swap.queue_swap_out(c)
            swap.cancel(c)
            swap.wait()
            assert not swap.is_out(c)
            assert swap.stats.host_bytes == 2 << 16
            assert torch.equal(a + b, tensor(seed=0) + tensor(seed=1))

    def test_a_prefetch_of_what_still_leaves_calls_it_back(self, orderly: type[OrderlyQueue]):
        with TensorSwap(HOST_GIB, "cpu", orderly) as swap:
            a = tensor()
            swap.queue_swap_out(a)
            swap.queue_prefetch(a)
            swap.start_prefetches()
            swap.wait()
            assert not swap.is_out(a)
            assert swap.stats.out_bytes == 0

    def test_what_returns_may_leave_again(self, swap: TensorSwap):
        a = tensor()
        for _ in range(3):
            swap.swap_out(a)
            swap.wait_swapped_out()
            swap.queue_prefetch(a)
            swap.start_prefetches()
        swap.swap_out(a)
        swap.wait()
        assert swap.is_out(a)
        assert torch.equal(a, tensor())

    def test_backward_brings_back_what_it_saved(self, swap: TensorSwap):
        a = tensor().requires_grad_()
        hidden = torch.tanh(a)
        loss = (hidden * hidden).sum()
        swap.swap_out(hidden)
        swap.wait_swapped_out()
        loss.backward()
        plain = tensor().requires_grad_()
        (torch.tanh(plain) ** 2).sum().backward()
        assert a.grad is not None
        assert plain.grad is not None
        assert torch.allclose(a.grad, plain.grad)
        assert swap.stats.num_passive == 1

    def test_lists_and_keyword_arguments_are_seen(self, swap: TensorSwap):
        a, b, c = (tensor(seed=seed) for seed in range(3))
        swap.swap_out(a, b, c)
        swap.wait_swapped_out()
        assert torch.equal(torch.cat([a, b])[: a.numel()], tensor(seed=0))
        torch.add(tensor(seed=0), tensor(seed=1), out=c)
        assert torch.equal(c, tensor(seed=0) + tensor(seed=1))

    def test_resident_for_what_nobody_sees(self, swap: TensorSwap):
        a = tensor()
        swap.swap_out(a)
        swap.wait_swapped_out()
        array = swap.resident(a).numpy()
        assert array.tolist() == tensor().tolist()


class TestAliases:
    def test_views_and_aliases_stay_valid(self, swap: TensorSwap):
        a = tensor()
        view, alias, odd = a.view(128, -1), a.detach(), a[1::2]
        swap.swap_out(odd)
        swap.wait_swapped_out()
        assert all(held_bytes(x) == 0 for x in (a, view, alias, odd))
        view.mul_(2)
        assert torch.equal(alias, tensor() * 2)
        assert torch.equal(odd, (tensor() * 2)[1::2])

    def test_host_memory_is_free_when_the_last_tensor_dies(self, swap: TensorSwap):
        a = tensor()
        view = a[2:]
        swap.swap_out(a)
        swap.wait_swapped_out()
        del a
        gc.collect()
        assert swap.stats.host_bytes == 1 << 16
        del view
        gc.collect()
        assert swap.stats.host_bytes == 0

    def test_a_tensor_that_dies_on_its_way_out(self, swap: TensorSwap):
        swap.swap_out(tensor(MIB))
        swap.queue_prefetch()
        swap.wait()
        gc.collect()
        assert swap.stats.host_bytes == 0


class TestErrors:
    def test_reading_behind_the_dispatchers_back_is_an_error(self, swap: TensorSwap):
        if not storage_access().refuses:
            pytest.skip("needs a compiler")
        a = tensor()
        view = a[:5]
        swap.swap_out(a)
        swap.wait_swapped_out()
        with pytest.raises(RuntimeError, match=r"64.0 KiB\) is out.*resident"):
            a.data_ptr()
        with pytest.raises(RuntimeError, match="resident"):
            view.data_ptr()
        with pytest.raises(RuntimeError, match="resident"):
            view.untyped_storage().data_ptr()
        seen: list[Exception] = []

        def reads() -> None:  # another thread: no mode there
            try:
                a.add_(1)
            except RuntimeError as error:
                seen.append(error)

        thread = threading.Thread(target=reads)
        thread.start()
        thread.join()
        assert "resident" in str(seen[0])
        assert torch.equal(a, tensor())

    def test_without_a_compiler_pointers_bring_it_back(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("megatron.swap.tensors.storage_access", lambda: StorageAccess(native=False))
        with TensorSwap(HOST_GIB, "cpu", PythonQueue) as swap:
            for read in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.data_ptr, torch.Tensor.__array__):
                a = tensor()
                swap.swap_out(a)
                swap.wait_swapped_out()
                assert swap.is_out(a)
                read(a)
                assert not swap.is_out(a)
                assert torch.equal(a, tensor())

    def test_what_numpy_points_at_never_leaves_again(self, swap: TensorSwap):
        a = tensor()
        array = a.numpy()
        with pytest.raises(UsageError, match="not PyTorch's own"):
            swap.swap_out(a)
        assert array.tolist() == a.tolist()

    def test_before_open_and_after_close(self):
        swap = TensorSwap(HOST_GIB, "cpu")
        a = tensor()
        for call in (swap.swap_out, swap.queue_swap_out, swap.queue_prefetch, swap.resident):
            with pytest.raises(SwapError, match="not open"):
                call(a)
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

    def test_close_brings_everything_back_in_spite_of_an_error(self):
        a, b = tensor(seed=0), tensor(seed=1)

        def fails() -> None:
            with TensorSwap(HOST_GIB, "cpu") as swap:
                swap.swap_out(a)
                swap.wait_swapped_out()
                swap.queue_swap_out(b)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fails()
        assert torch.equal(a, tensor(seed=0))
        assert torch.equal(b, tensor(seed=1))

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: [1.0], "list was given"),
            (lambda: torch.ones(4, device="meta"), "on meta"),
            (lambda: torch.ones(4).to_sparse(), "layout"),
            (lambda: torch.from_numpy(torch.ones(4).numpy()), "not PyTorch's own"),
            (lambda: torch.ones(4).share_memory_(), "not PyTorch's own"),
            (lambda: torch.nn.Buffer(torch.ones(4)) * torch.ones(4).as_subclass(Odd), "it is a Odd"),
        ],
    )
    def test_what_cannot_be_swapped_is_refused_and_nothing_begun(self, swap: TensorSwap, make: Any, message: str):
        a = tensor()
        with pytest.raises(UsageError, match=message):
            swap.swap_out(a, make())
        swap.wait()
        assert not swap.is_out(a)
        assert swap.stats.out_bytes == 0

    def test_of_two_swaps_the_second_is_told(self, swap: TensorSwap):
        a = tensor()
        swap.swap_out(a)
        swap.wait_swapped_out()
        other = TensorSwap(HOST_GIB, "cpu")
        with other, pytest.raises(UsageError, match="another TensorSwap"):
            other.swap_out(a)
        assert torch.equal(a, tensor())

    def test_host_memory_that_does_not_suffice(self):
        with TensorSwap(1 / 1024, "cpu") as swap:
            a = tensor(4 * MIB)
            with pytest.raises(HostMemoryError, match=r"4.00 MiB more: TensorSwap\(host_gib=0.000976"):
                swap.swap_out(a)
            assert torch.equal(a, tensor(4 * MIB))

    def test_too_little_host_memory_to_begin_with(self):
        with pytest.raises(UsageError, match="host_gib=0"):
            TensorSwap(0)

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

    def test_a_copy_that_fails_at_the_end_is_told_by_close(self, orderly: type[OrderlyQueue]):
        swap = TensorSwap(HOST_GIB, "cpu", orderly).open()
        orderly.fails.add(("swap-out", 1))
        a, b = tensor(seed=0), tensor(seed=1)
        swap.queue_swap_out(a, b)
        with pytest.raises(OSError, match="no space"):
            swap.close()
        assert torch.equal(a + b, tensor(seed=0) + tensor(seed=1))
        with pytest.raises(SwapError, match="not open"):
            swap.wait()

    def test_a_copy_in_that_fails_is_told_to_who_waits_and_can_be_tried_again(self, orderly: type[OrderlyQueue]):
        with TensorSwap(HOST_GIB, "cpu", orderly) as swap:
            orderly.fails.add(("swap-in", 1))
            a = tensor()
            swap.swap_out(a)
            swap.wait_swapped_out()
            with pytest.raises(OSError, match="no space"):
                a.sum()
            assert swap.is_out(a)
            assert torch.equal(a, tensor())


class Odd(torch.Tensor):
    pass
