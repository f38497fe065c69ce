"""Known failures of offloading: copies that race with kernels, with each other, or with the memory's next owner.

The lazy device runs each copy as late as the engine's waits allow, so that a missing wait always shows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.engine.offload import Offloader
from tests.engine import (
    Engine,
    Layer,
    Result,
    batch,
    forward,
    loss_of,
    one_after_the_other,
    one_forward_one_backward,
    one_step,
    result,
    train_step,
    wrongs,
)
from tests.lazy_device import LazyDevice, LazyStream


def accumulate(layers: nn.ModuleList, _: Engine | None) -> Result:
    one_step(layers)
    return one_step(layers)


class TestReloadBeforeItsOwnOffload:
    """A reload reads host memory that its own offload has not written yet.

    Seen in NVIDIA/Megatron-LM#7398: a group without prefetch was reloaded inline, without a wait for its offload.
    Backward got stale bytes, and the loss still fell.

    Here: every reload waits for the event of its own offload.
    """

    def test_late_reloads_of_layers_that_ran_on_another_stream(self) -> None:
        """Only the reload's own wait orders the two copies: the release has made another stream wait."""
        late: list[int] = []

        def run(layers: nn.ModuleList, engine: Engine | None) -> Result:
            layers.zero_grad()
            device = engine.device if engine is not None else LazyDevice()
            main, device.compute = device.compute, LazyStream("side")
            loss = loss_of(forward(layers, batch()))
            device.compute = main
            loss.backward()
            late.append(engine.counters.num_late if engine is not None else 0)
            return result(layers, loss)

        assert wrongs(run, device=LazyDevice(poison=False), window_bytes=0) == []
        assert late[-1] > 0, "no reload was late: the test shows nothing"
        assert wrongs(run, device=LazyDevice(poison=False)) == []


class TestMemoryFreedUnderItsCopy:
    """Device memory is used again while the copy to the host still reads it.

    Seen in meta-pytorch/torchtune#1867: `OffloadActivations` deleted tensors under their copies. Gradients became NaN
    on some machines.

    Here: memory is released behind its copy, on every stream that may use it next, also if the graph is dropped.
    """

    def test_released_memory(self) -> None:
        assert wrongs(accumulate) == []
        assert wrongs(lambda layers, _: train_step(layers, one_forward_one_backward(4))) == []
        # Nothing is released: backward overtakes every copy.
        assert wrongs(accumulate, ends_in_loss=False, window_bytes=1 << 30) == []

    def test_a_graph_that_is_dropped_during_its_copies(self) -> None:
        def run(layers: nn.ModuleList, _: Engine | None) -> Result:
            train_step(layers, one_after_the_other(1))
            loss_of(forward(layers, batch(1)))  # dropped: its offloads are in flight
            loss = loss_of(forward(layers, batch()))
            ends = torch.autograd.grad(loss, list(layers[3].mlp.parameters()))
            del loss  # dropped halfway: its prefetches are in flight
            return Result([], [*ends, *train_step(layers, one_after_the_other(1)).grads])

        assert wrongs(run, window_bytes=1 << 17) == []
        assert wrongs(run, ends_in_loss=False, window_bytes=1 << 30) == []


class LaggingKernel(torch.autograd.Function):
    """Saves what a kernel of the current stream is going to write: NaN until the kernel has run.

    What is saved is a transposed view with an offset, as attention saves of one projection.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: LazyDevice | None) -> torch.Tensor:
        values, written = x.exp(), torch.full_like(x, torch.nan)
        ctx.save_for_backward(written[1:].t())

        def kernel() -> None:
            written.data.copy_(values)  # behind autograd's back, as a kernel writes

        if device is None:
            kernel()
        else:
            device.compute.enqueue(kernel)
        return values

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (saved,) = ctx.saved_tensors
        return torch.cat([grad[:1], grad[1:] * saved.t()]), None


class TwoStreams(Layer):
    """A layer that computes a part of itself on a stream of its own, as Megatron's shared experts do."""

    device: LazyDevice | None = None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(hidden_states)
        with on_side_stream(self.device):
            side = LaggingKernel.apply(normed, self.device)
        return super().forward(hidden_states) + side


@contextmanager
def on_side_stream(device: LazyDevice | None) -> Iterator[None]:
    if device is None:
        yield
        return
    main, device.compute = device.compute, LazyStream("side")
    yield
    side, device.compute = device.compute, main
    device.wait(main, device.record(side))


class TestStreamOfTheMoment:
    """A copy waits for the wrong stream.

    Seen in huggingface/trl#7195: copies waited for the stream that was current when `OffloadActivations` was made. Seen
    in pytorch/torchtitan#2581: inside the copy stream's context the current stream is the copy stream, so the wait was
    none.

    Here: a copy waits for the stream that was current when the tensor was saved. Whole storages are copied, not clones
    of views.
    """

    @pytest.mark.parametrize("commit_bytes", [1, 1 << 24], ids=["at-once", "at-the-end-of-a-layer"])
    def test_a_layer_on_two_streams(self, commit_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Copies to the host run as soon as their waits allow, so that they overtake a kernel that still lags."""

        def run(layers: nn.ModuleList, engine: Engine | None) -> Result:
            for layer in layers:
                layer.device = engine.device if engine is not None else None
            return accumulate(layers, engine)

        device = LazyDevice(eager=["out"])
        assert wrongs(run, TwoStreams, device=device, commit_bytes=commit_bytes) == []


class TestHostMemoryUsedAgain:
    """An offload overwrites host memory that a reload still reads.

    Seen in pytorch/torchtitan#2581: offloads of the next step overwrote the pinned pool. Gradients were silently wrong.

    Here: memory in the pool has the number of its last read, and its next owner waits for that read.
    """

    def test_a_backward_that_breaks_off_and_steps_behind_it(self) -> None:
        graph: dict[str, torch.Tensor] = {}

        class Dropping(Layer):
            """Frees a graph in the middle of a layer, since the garbage collector may do so at any moment."""

            drops = False

            def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
                hidden_states = super().forward(hidden_states)
                if self.drops:
                    graph.clear()
                return hidden_states

        def run(layers: nn.ModuleList, _: Engine | None) -> Result:
            train_step(layers, one_after_the_other(1))

            def stop(grad: torch.Tensor) -> None:
                raise InterruptedError

            hidden = forward(layers[:4], batch())
            hidden.register_hook(stop)
            graph["loss"] = loss_of(forward(layers[4:], hidden))
            del hidden
            with pytest.raises(InterruptedError):
                graph["loss"].backward()
            layers[3].drops = True
            return one_step(layers)

        assert wrongs(run, Dropping, swapped=[3], device=LazyDevice(eager=["out"])) == []

    def test_a_device_address_used_again_within_a_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Seen in huggingface/trl#6241 too: by address alone, a new tensor counted as offloaded already."""
        seen: list[int] = []
        find = Offloader.find
        monkeypatch.setattr(Offloader, "find", lambda self, storage: seen.append(storage._cdata) or find(self, storage))
        run = lambda layers, _: train_step(layers, one_forward_one_backward(3, 3))  # noqa: E731
        assert wrongs(run, device=EmulatedDevice()) == []
        assert len(set(seen)) < len(seen), "no address was used again: the test shows nothing"
