"""The process of a soak of ``swap.activations``: ``python -m benchmarks.soak.loops SAMPLES RESULT LOOP STEPS KIND``.

The loops have the shapes of other people's: graphs that outlive a step, several optimizers, a generator that is closed
in the middle of a forward, steps that Ctrl-C ends, a graph that runs backward twice. ``KIND`` is ``swapped`` or
``plain``.
"""

import contextlib
import json
import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import torch
from torch import nn

from benchmarks.soak.meters import Meter

CYCLE = 12  # Steps after which all loops repeat
WIDTH = 64
LENGTHS = (32, 48, 16, 48)
NUM_BLOCKS = 6


class Block(nn.Module):
    """A residual MLP. It raises ``KeyboardInterrupt`` in the step ``interrupted``, as Ctrl-C would."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rise, self.fall = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.interrupts_forward = self.interrupts_backward = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.gelu(self.rise(self.norm(hidden)))
        if self.interrupts_forward:
            raise KeyboardInterrupt
        if self.interrupts_backward:
            inner.register_hook(_interrupt)
        return hidden + self.fall(inner)


def _interrupt(_: torch.Tensor) -> None:
    raise KeyboardInterrupt


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def batch(step: int) -> torch.Tensor:
    return torch.randn(LENGTHS[step % len(LENGTHS)], WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


class Loop:
    """Loops around a model. Each method is one, and returns the loss of a step, or that of an earlier one."""

    def __init__(self, num_models: int) -> None:
        torch.manual_seed(1)
        self.models = [Model() for _ in range(num_models)]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in self.models]
        self._losses: deque[torch.Tensor] = deque()

    def _descend(self, loss: torch.Tensor, which: int = 0) -> float:
        loss.backward()
        self.optimizers[which].step()
        self.optimizers[which].zero_grad()
        return float(loss)

    def outstanding(self, number: int) -> float:
        """Keep the losses of three steps, and run the oldest backward: a graph is always outstanding."""
        self._losses.append(loss_of(self.models[0](batch(number))))
        if len(self._losses) < 3:
            return 0.0
        oldest = self._losses.popleft()
        oldest.backward()  # stepping would change weights that the younger graphs have saved
        total = sum(float(param.grad.abs().sum()) for param in self.models[0].parameters() if param.grad is not None)
        self.optimizers[0].zero_grad()
        return float(oldest) + total

    def two_optimizers(self, number: int) -> float:
        """Train two models in turn, each through the other: a generator and a discriminator."""
        generator, critic = self.models
        made = generator(batch(number))
        found = self._descend(loss_of(critic(made.detach())) - critic(batch(number + 1)).mean(), 1)
        found += self._descend(-loss_of(critic(made)))
        self.optimizers[1].zero_grad()
        return found

    def _forward(self, hidden: torch.Tensor) -> Generator[torch.Tensor, None, None]:
        for block in self.models[0].blocks:
            hidden = block(hidden)
            yield hidden

    def generators(self, number: int) -> float:
        """Let a generator yield between layers, and close some in the middle of a forward."""
        outputs = self._forward(batch(number))
        for count, output in enumerate(outputs, 1):
            if number % 3 == 0 and count == 3:
                outputs.close()
                return float(output.sum().detach())
        return self._descend(loss_of(output))

    def interrupted(self, number: int) -> float:
        """End some steps as Ctrl-C does, in forward or in backward, and go on with the next step."""
        block = self.models[0].blocks[number % NUM_BLOCKS]
        assert isinstance(block, Block)
        block.interrupts_forward, block.interrupts_backward = number % 4 == 1, number % 6 == 2
        try:
            return self._descend(loss_of(self.models[0](batch(number))))
        except KeyboardInterrupt:
            self.optimizers[0].zero_grad()
            return 0.0
        finally:
            block.interrupts_forward = block.interrupts_backward = False

    def repeated(self, number: int) -> float:
        """Accumulate micro-batches, run a graph backward twice, and evaluate between."""
        model = self.models[0]
        first = loss_of(model(batch(number)))
        first.backward(retain_graph=number % 2 == 0)
        if number % 2 == 0:
            first.backward()
        with torch.no_grad():
            seen = float(loss_of(model(batch(number + 7))))
        discarded = model(batch(number + 3))
        found = self._descend(loss_of(model(batch(number + 1))))
        return found + float(first) + seen + float(discarded.detach().sum())


LOOPS: dict[str, Callable[[Loop, int], float]] = {
    "outstanding graphs": Loop.outstanding, "two optimizers": Loop.two_optimizers, "generators": Loop.generators,
    "interrupted steps": Loop.interrupted, "repeated backward": Loop.repeated,
}  # fmt: skip


def main(argv: Sequence[str]) -> None:
    samples_path, result_path, name, num_steps, kind = argv
    from megatron import swap

    from megatron.swap.native.guarding import native

    torch.set_num_threads(1)
    native().limit_ram(1 << 40)  # counts tensors
    loop = Loop(2 if name == "two optimizers" else 1)
    losses: list[str] = []
    with contextlib.ExitStack() as stack:
        swapped = [
            stack.enter_context(swap.activations(model.blocks, min_mib=0, host_gib=0.05))
            for model in (loop.models if kind == "swapped" else [])
        ]
        pinned = lambda: sum(one.stats().host_booked_bytes for one in swapped)  # noqa: E731
        read = {"device_bytes": lambda: int(native().ram_in_use()), "pinned_bytes": pinned}
        meter = Meter(Path(samples_path), CYCLE, read)
        for step in range(1, int(num_steps) + 1):
            losses.append(LOOPS[name](loop, step).hex())
            meter.sample(step)
        offloaded_bytes = sum(one.stats().out_bytes for one in swapped)
    Path(result_path).write_text(json.dumps({"losses": losses, "offloaded_bytes": offloaded_bytes}))


if __name__ == "__main__":
    main(sys.argv[1:])
