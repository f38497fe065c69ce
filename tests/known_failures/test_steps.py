"""Known failures of offloading: what one step leaves behind for the next."""

import random
from collections.abc import Callable, Sequence
from itertools import count

import pytest
import torch
from megatron import swap
from torch import nn
from torch.nn import functional

from tests.engine import Engine, Layer, Result, batch, forward, loss_of, result, stack, wrongs
from tests.known_failures.meters import group_bytes, num_objects, tensor_memory
from tests.logged_device import LoggedDevice
from tests.sizes import sized

NUM_LAYERS = 6


def pipelined(layers: nn.ModuleList, lengths: Sequence[int], between: Callable[[], object] = lambda: None) -> Result:
    """Run a step of a pipeline's first stage: at most two micro-batches wait for their backward.

    Args:
        lengths: tokens of each micro-batch.
        between: called before each forward and each backward.
    """
    layers.zero_grad(set_to_none=True)
    losses: list[torch.Tensor] = []
    for number, length in enumerate(lengths):
        between()
        losses.append(loss_of(forward(layers, batch(number, tokens=length))))
        if len(losses) == 2:
            between()
            losses.pop(0).backward()
    for loss in losses:
        between()
        loss.backward()
    return result(layers)


# ------------------------------------------------------------------------------------ forwards without gradients


class Mixed(Layer):
    """A layer that computes its residual with gradients even under ``no_grad``, as Megatron's do."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        output = super().forward(hidden_states)
        with torch.enable_grad():
            return hidden_states + functional.gelu(output * 1)


class TestForwardsWithoutGradients:
    """A forward without gradients in train mode counts as training, and breaks the next step.

    Seen in NVIDIA-NeMo/RL#2279: a pass for log-probabilities used up the warm-up of Megatron's activation offload.

    Here: whether autograd records decides. Such a pass saves, copies and learns nothing.
    """

    @pytest.mark.parametrize("make", [Layer, Mixed], ids=["plain", "gradients-inside"])
    @pytest.mark.parametrize("swapped", [range(NUM_LAYERS), range(3)], ids=["all", "some-before-the-loss"])
    def test_the_next_step_is_the_same(self, make: Callable[[], nn.Module], swapped: range) -> None:
        def run(passes: bool) -> tuple[list[list[str]], Result]:
            layers, device, place = stack(NUM_LAYERS, make), LoggedDevice(), count()
            assert layers.training

            def sometimes_only_forward() -> None:
                if passes and next(place) % 3 == 0:  # at other places in each step
                    with torch.no_grad():
                        forward(layers, batch(9, tokens=24))

            logs: list[list[str]] = []
            with Engine(layers, swapped, device=device, ends_in_loss=swapped == range(3)) as engine:
                for _ in range(4):
                    device.log = []
                    sometimes_only_forward()
                    last = pipelined(layers, [64] * 4, sometimes_only_forward)
                    logs.append(device.log)
                assert engine.num_leases == 0
                assert device.violations == []
            return logs, last

        (with_passes, last), (without, plain) = run(True), run(False)
        assert len(without[-1]) > 50
        assert with_passes == without
        assert last.same_as(plain)


# ------------------------------------------------------------------------------------- micro-batches that differ


class TestShorterFirstMicroBatch:
    """The first micro-batch is shorter, and sizes what comes after it.

    Seen in pytorch/pytorch#126600: pipeline stages kept buffers of its size. Seen in NVIDIA/TransformerEngine#1762:
    kept pinned buffers have the first iteration's shapes.

    Here: each storage is copied by its own size, and the window grows with the largest layer seen.
    """

    @pytest.mark.parametrize("lengths", [(8, 64, 64, 64), (8, 16, 32, 64)], ids=str)
    def test_in_a_pipeline(self, lengths: tuple[int, ...]) -> None:
        late: list[int] = []

        def run(layers: nn.ModuleList, engine: Engine | None) -> Result:
            for step in range(4):
                last = pipelined(layers, lengths)
                if step == 0:  # the order is not known yet
                    late.append(engine.counters.num_late if engine is not None else 0)
            if engine is not None:
                late.append(engine.counters.num_late)
                window_bytes = engine.manager.release_budget.window_bytes
                assert window_bytes == group_bytes(max(lengths))
            return last

        assert wrongs(run) == []
        assert late[-1] == late[-2], "reloads were late, though the order was known"


# -------------------------------------------------------------------------------------------------- many steps

WIDTH = 32
LENGTHS = (40, 64, 17, 33, 64, 8)
"""Tokens of the packed batches, in turn."""
NUM_STEPS = sized(84, nightly=300)


class Lora(nn.Linear):
    """A frozen linear layer with a trained low-rank adapter."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out)
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(width_in, 4, bias=False), nn.Linear(4, width_out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.up(self.down(x))


class Block(nn.Module):
    """Attention over packed sequences, and experts. Some saved tensors are of no use to the loss: never unpacked."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), Lora(WIDTH, 3 * WIDTH), Lora(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList([nn.Sequential(Lora(WIDTH, 64), nn.GELU(), Lora(64, WIDTH)) for _ in range(2)])
        self.unused: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(hidden)).chunk(3, -1)
        hidden = hidden + self.out(functional.scaled_dot_product_attention(query, key, value, attn_mask=mask))
        chosen = self.router(hidden).argmax(-1)
        self.unused = self.router(hidden).exp().sin()  # a part of the graph that no backward enters
        mixed = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            mixed = mixed + expert(hidden) * (chosen == number).unsqueeze(-1)
        return hidden + mixed


def packed(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of sequences of random lengths, one behind the other, and the mask that separates them."""
    length = LENGTHS[step % len(LENGTHS)]
    cuts = sorted(random.Random(step).sample(range(1, length), 3))
    number = torch.bucketize(torch.arange(length), torch.tensor(cuts), right=True)
    hidden = torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(step))
    return hidden, (number[:, None] == number[None, :]).tril()


class TestMemoryGrowsOverSteps:
    """Memory grows with each step, until out of memory.

    Seen in axolotl-ai-cloud/axolotl#3638: 24 GiB became 260 GiB in 293 steps. State was cleared when the last saved
    tensor was unpacked, and some never are (huggingface/trl#5738): an expert without tokens, a branch beside the loss.

    Here: what is offloaded is freed with the graph, unpacked or not.
    """

    @pytest.mark.slow
    def test_lora_with_experts_and_packed_samples(self) -> None:
        torch.manual_seed(1)
        blocks = nn.ModuleList([Block() for _ in range(4)])
        optimizer = torch.optim.AdamW([p for p in blocks.parameters() if p.requires_grad], lr=1e-3)
        seen: list[tuple[int, int, int]] = []
        with tensor_memory() as memory, swap.activations(blocks, min_mib=0, host_gib=0.05) as swapped:
            for step in range(NUM_STEPS):
                hidden, mask = packed(step)
                for block in blocks:
                    hidden = block(hidden, mask)
                loss_of(hidden).backward()
                optimizer.step()
                optimizer.zero_grad()
                del hidden
                for block in blocks:
                    block.unused = None
                if step in (NUM_STEPS // 3, NUM_STEPS - 1):  # of the same length
                    stats = swapped.stats()
                    assert stats.held_bytes == 0
                    seen.append((memory.in_use, stats.host_booked_bytes, num_objects()))
            assert stats.out_bytes > NUM_STEPS * 64 * WIDTH
        (device_bytes, pinned_bytes, objects), later = seen
        assert later[0] <= device_bytes
        assert later[1] == pinned_bytes
        assert later[2] <= objects + 20
