"""Random programs that swap tensor by tensor, equal to the bit, also on a GPU."""

import random
from typing import Any

import pytest
import torch

from megatron.swap.tensor_swap.swap import TensorSwap
from tests.sizes import sized
from tests.unit.tensor_swap.tensor_cases import HOST_GIB, WAYS, begin_copies, leave


class NoSwap:
    """A stand-in that swaps nothing, for the same program without swapping."""

    def __getattr__(self, name: str) -> Any:
        return lambda *tensors: None


def program(seed: int, swap: Any, device: str = "cpu") -> list[list[float]]:
    """Run random operations among random swaps. Return the contents of all tensors at the end."""
    choose = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def fresh() -> torch.Tensor:
        rows = choose.choice([1, 16, 512])
        return torch.randn(rows, 32, generator=generator).to(device)

    alive = [fresh() for _ in range(3)]
    for _ in range(choose.randrange(8, 30)):
        a, b = choose.choice(alive), choose.choice(alive)
        match choose.randrange(20):
            case 0:
                alive.append(fresh())
            case 1 if a.is_contiguous() and a.numel() % 32 == 0:
                alive.append(a.view(-1)[a.numel() // 4 :].view(-1, 8)[:, :4])
            case 2:
                alive.append(a.detach())
            case 3:
                a.mul_(0.5).add_(1)
            case 4:
                alive.append(a @ a.t() if a.shape[0] < 64 else a * 2)
            case 5 if a.shape == b.shape and a.untyped_storage()._cdata != b.untyped_storage()._cdata:
                a.copy_(b)
            case 6:
                alive.append(torch.cat([a.reshape(-1), b.reshape(-1)])[:2048].view(1, -1))
            case 7:
                leaf = a.detach().clone().requires_grad_()
                hidden = torch.tanh(leaf * 1.5)
                loss = (hidden * hidden).sum()
                swap.swap_out(hidden.detach(), leaf.detach())
                if choose.random() < 0.5:
                    swap.wait_swapped_out()
                loss.backward()
                assert leaf.grad is not None
                alive.append(leaf.grad)
            case 8 if len(alive) > 2:
                alive.pop(choose.randrange(len(alive)))
            case 9 | 10:
                swap.swap_out(a, b)
            case 11 | 12 | 13:
                swap.queue_swap_out(a, b)
            case 14:
                swap.wait_swapped_out()
            case 15 | 16:
                swap.queue_prefetch(b, a)
            case 17:
                swap.start_prefetches()
            case 18:
                swap.cancel(a)
            case 19:
                swap.resident(a)
                swap.wait()
    return [one.tolist() for one in (torch.clone(one) for one in alive)]


@pytest.mark.parametrize("way", WAYS)
def test_random_programs_are_equal_to_the_same_without_swapping(monkeypatch: pytest.MonkeyPatch, way: str):
    """Each way has its share of the seeds."""
    begin_copies(monkeypatch, way)
    num_out, num_programs = 0, sized(80, 80, 160)
    for seed in range(WAYS.index(way), num_programs, len(WAYS)):
        with TensorSwap(HOST_GIB, "cpu") as swap:
            found = program(seed, swap)
            num_out += swap.stats.out_bytes
        assert found == program(seed, NoSwap()), f"seed {seed}"
    assert num_out > num_programs << 11


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("way", WAYS)
    def test_random_programs_are_equal_to_the_same_without_swapping(self, monkeypatch: pytest.MonkeyPatch, way: str):
        begin_copies(monkeypatch, way)
        with TensorSwap(HOST_GIB, "cuda") as swap:
            for seed in range(200):
                assert program(seed, swap, "cuda") == program(seed, NoSwap(), "cuda"), f"seed {seed}"
            assert swap.stats.out_bytes > 200 << 12

    @pytest.mark.parametrize("way", WAYS)
    def test_memory_is_the_allocators_again_and_busy_streams_are_waited_for(
        self, monkeypatch: pytest.MonkeyPatch, way: str
    ):
        begin_copies(monkeypatch, way)
        with TensorSwap(1.0, "cuda") as swap:
            big = torch.randn(64 << 18, device="cuda")  # 64 MiB
            expected = big.clone()
            other = torch.randn(4096, 4096, device="cuda")
            before = torch.cuda.memory_allocated()
            for _ in range(20):
                for _ in range(10):
                    other = other @ other * 1e-3  # the compute stream has much to do before the next line
                big.add_(1)
                expected.add_(1)
                leave(swap, big)
                assert torch.cuda.memory_allocated() <= before - (64 << 20) + 1024
                reused = torch.full_like(expected, 7.0)
                swap.queue_prefetch(big)
                del reused  # its block, still written by the compute stream, is given to what returns
                swap.start_prefetches()
                assert torch.equal(big, expected)
