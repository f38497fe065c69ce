"""Swapping tensor by tensor: the order of reloads, valid views, refused arguments."""

import gc
import weakref

import torch

from megatron.swap.common.types import MIB
from megatron.swap.tensor_swap.operations import storage_of
from megatron.swap.tensor_swap.swap import TensorSwap
from tests.unit.tensor_swap.tensor_cases import HOST_GIB, OrderlyQueue, leave, tensor


def held_bytes(given: torch.Tensor) -> int:
    return storage_of(given).nbytes()


class TestOut:
    def test_memory_is_free_and_comes_back_with_the_same_bytes(self, swap: TensorSwap):
        a = tensor()
        expected = a.tolist()
        leave(swap, a)
        assert swap.is_out(a)
        assert held_bytes(a) == 0
        assert swap.stats.host_bytes == 1 << 16
        assert (a + 0).tolist() == expected
        assert held_bytes(a) == 1 << 16
        assert not swap.is_out(a)
        assert swap.stats.in_bytes == swap.stats.out_bytes == 1 << 16

    def test_the_device_unless_one_is_named(self):
        with TensorSwap(HOST_GIB) as swap:
            assert swap.device.type == ("cuda" if torch.cuda.is_available() else "cpu")

    def test_what_is_queued_leaves_in_its_order_and_now_comes_first(self, orderly: type[OrderlyQueue]):
        with TensorSwap(HOST_GIB, "cpu", orderly) as swap:
            a, b, c, d = (tensor(seed=seed) for seed in range(4))
            swap.queue_swap_out(a, b)
            leave(swap, c, d)
            assert orderly.made[0].order == [4, 3, 1, 2]  # d was pushed first, then c ahead of it
            assert [held_bytes(x) for x in (a, b, c, d)] == [0] * 4

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

    def test_a_change_during_the_copy_is_kept(self, swap: TensorSwap):
        a = tensor(8 * MIB)
        expected = a + 1
        swap.swap_out(a)
        a.add_(1)
        leave(swap, a)
        assert torch.equal(a, expected)


class TestIn:
    def test_prefetches_begin_when_told_in_their_order(self, orderly: type[OrderlyQueue]):
        with TensorSwap(HOST_GIB, "cpu", orderly) as swap:
            tensors = [tensor(seed=seed) for seed in range(3)]
            expected = [x.tolist() for x in tensors]
            leave(swap, *tensors)
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
            leave(swap, a, b, c)
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
            leave(swap, a, b)
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


class TestAliases:
    def test_views_and_aliases_stay_valid(self, swap: TensorSwap):
        a = tensor()
        view, alias, odd = a.view(128, -1), a.detach(), a[1::2]
        leave(swap, odd)
        assert all(held_bytes(x) == 0 for x in (a, view, alias, odd))
        view.mul_(2)
        assert torch.equal(alias, tensor() * 2)
        assert torch.equal(odd, (tensor() * 2)[1::2])

    def test_host_memory_is_free_when_the_last_tensor_dies(self, swap: TensorSwap):
        a = tensor()
        view = a[2:]
        leave(swap, a)
        del a
        gc.collect()
        assert swap.stats.host_bytes == 1 << 16
        del view
        gc.collect()
        assert swap.stats.host_bytes == 0

    def test_what_came_back_dies_with_its_last_tensor_at_once(self, swap: TensorSwap):
        gc.disable()
        try:
            a = tensor()
            leave(swap, a)
            a.add_(1)
            b = tensor(seed=1)
            swap.swap_out(b)
            b.add_(1)  # called back, or out and back
            swap.wait()
            alive = [weakref.ref(storage_of(x)) for x in (a, b)]
            del a, b
            assert [x() for x in alive] == [None, None]
        finally:
            gc.enable()
