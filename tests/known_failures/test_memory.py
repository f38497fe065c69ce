"""Known failures of offloading: memory that does not fall, or rises, on the device or on the host."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import megatron.swap.engine
from megatron.swap.common.plan import LAYER_SECTION
from megatron.swap.common.types import KIB, MIB
from megatron.swap.devices.base import Device
from megatron.swap.engine.offload import Offloader
from megatron.swap.engine.reload import Reloader
from megatron.swap.memory.host_arena import HostArena
from megatron.swap.memory.host_memory import PAGE_BYTES
from megatron.swap.memory.host_pool import HostPool
from megatron.swap.planner.profile import MS_PER_MIB, LayerClass, Section
from megatron.swap.planner.simulate import simulate
from megatron.swap.planner.solve import empty_plan, solve, whole_layers
from tests.engine import Engine, Layer, batch, forward, loss_of, stack
from tests.known_failures.meters import Link, group_bytes, tensor_memory
from tests.unit.optimizer.test_stepper import OPTIMIZERS, Training
from tests.unit.planner.cases import GB_S, profile, site

NUM_LAYERS = 8
SWAP = Path(megatron.swap.engine.__file__).parents[1]


def with_gradients(make: Callable[[], nn.Module] = Layer) -> nn.ModuleList:
    """Return layers that have gradients, so that backward allocates none."""
    layers = stack(NUM_LAYERS, make)
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return layers


@contextmanager
def noted(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, note: Callable[[], None]) -> Iterator[None]:
    """Call ``note`` after each call of a method."""
    original = getattr(owner, method)

    def noting(*arguments: object) -> object:
        answer = original(*arguments)
        note()
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, noting)
        yield


class TestReloadedTooEarly:
    """Layers that are kept let reloads run ahead, and the peak of backward rises.

    Seen in NVIDIA/Megatron-LM#7575: with partial offload, reloads advanced after groups that had stayed on the GPU too.

    Here: reloads ahead of their use fit into the window and the memory that backward has freed.
    """

    @pytest.mark.parametrize("is_chosen", [True, False], ids=["chosen-window", "own-window"])
    @pytest.mark.parametrize("swapped", [range(4), range(6), (0, 2, 4, 6)], ids=["first", "most", "every-other"])
    def test_the_peak_of_backward(self, swapped: range, is_chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        window_bytes = group_bytes()
        layers = with_gradients()
        seen: list[int] = []
        chosen = {"window_bytes": window_bytes} if is_chosen else {}
        with tensor_memory() as memory, Engine(layers, swapped, device=Link(stalls=False), **chosen) as engine:
            for _ in range(3):
                seen.clear()
                loss = loss_of(forward(layers, batch()))
                after_forward_bytes = memory.in_use
                with noted(monkeypatch, Reloader, "begin_backward", lambda: seen.append(memory.in_use)):
                    loss.backward()
                del loss
                assert max(seen) <= after_forward_bytes + window_bytes + KIB
            assert engine.counters.num_late == 0, "nothing came ahead: the test shows nothing"


class TestPinnedMemoryRounded:
    """Pinned host memory takes nearly twice the bytes that are offloaded.

    Seen in pytorch/pytorch#95823, vllm-project/vllm#53042 and vllm-project/vllm#56410: PyTorch's pinned allocator
    rounds up to powers of two.

    Here: host memory is mapped and registered in slabs. A piece is rounded to 4 KiB; at most one slab is reserved
    beyond what is leased.
    """

    def test_sizes_just_above_a_power_of_two(self) -> None:
        pool = HostPool(limit=256 * MIB, slab_bytes=8 * MIB, pinned=False)
        sizes = [(1 << power) + KIB for power in range(12, 24)] * 2
        leases = [pool.lease(size) for size in sizes]
        stats = pool.stats
        assert stats.leased_bytes < sum(sizes) + len(sizes) * PAGE_BYTES
        assert stats.reserved_bytes <= stats.leased_bytes + pool.slab_bytes
        for lease in leases:
            lease.free()
        pool.close()

    def test_optimizer_state(self) -> None:
        arena = HostArena(limit_bytes=256 * MIB, pinned=False, region_bytes=MIB)
        sizes = [(1 << power) + KIB for power in range(12, 24)]
        pieces = arena.take_all(sizes)
        assert [piece.numel() for piece in pieces] == sizes
        assert arena.reserved_bytes <= 1.02 * sum(sizes) + len(sizes) * PAGE_BYTES + MIB
        arena.close()

    def test_no_code_asks_pytorch_for_pinned_memory(self) -> None:
        """But for numbers of tokens: 64 KiB at most, and PyTorch recycles them."""
        sources = [path for path in SWAP.rglob("*") if path.suffix in (".py", ".cpp")]
        assert len(sources) > 100
        asking = [path.name for path in sources if re.search("pin_memory|cudaHostAlloc", path.read_text())]
        assert asking == ["host_writes.py"]


class TestHostPeakTwice:
    """The host holds the last copy and the new one.

    Seen in verl-project/verl#6193: each offload made a new pinned buffer while the old one was referenced.

    Here: state has one place in host memory, which checkpoints read too. A saved tensor's lease is free before it is
    saved again.
    """

    def test_optimizer_state_over_steps_and_checkpoints(self) -> None:
        training = Training(OPTIMIZERS["adamw"], lambda _: True)
        state_bytes = 12 * sum(param.numel() for param in training.params)
        reserved_bytes = training.arena.reserved_bytes
        assert state_bytes <= reserved_bytes <= 2 * state_bytes  # in one shared mapping of 64 KiB
        stepper = training.stepper
        assert stepper is not None
        for _ in range(3):
            training.steps(2)
            with tensor_memory() as memory:
                stepper.materialize()
                assert memory.peak < state_bytes / 10, "a checkpoint makes a second copy"
                saved = training.optimizer.state[training.params[0]]["exp_avg"]
                assert saved.isfinite().all()
                del saved
            assert training.arena.reserved_bytes == reserved_bytes

    def test_saved_tensors_over_steps(self) -> None:
        layers = stack(NUM_LAYERS)
        with Engine(layers) as engine:
            for step in range(6):
                before = engine.counters.out_bytes
                loss_of(forward(layers, batch(step))).backward()
                if step == 1:  # the second step knows which layers to keep
                    leased_bytes, moved_bytes = engine.pool.stats.leased_peak_bytes, engine.counters.out_bytes - before
            assert engine.pool.stats.leased_peak_bytes == leased_bytes
            assert engine.num_leases == 0
            assert leased_bytes <= 2 * moved_bytes  # the first step moves the last layers too, and small storages pad


class TestBytesMovedInVain:
    """Bytes go to the host and back, and the device's peak stays.

    Seen in huggingface/accelerate#4175: the peak was in the recomputation of backward, where the offloaded tensors did
    not matter.

    Here: the peak falls by what is offloaded. Plans move only what the budget needs, and count what a recomputation
    holds; a budget that no plan meets is refused.
    """

    def test_the_peak_falls_by_what_was_moved(self) -> None:
        def peak(layers: nn.ModuleList) -> tuple[int, int]:
            """The most bytes after forward, and in the whole step."""
            with tensor_memory() as memory:
                loss = loss_of(forward(layers, batch()))
                after_forward = memory.in_use
                loss.backward()
                return after_forward, memory.peak

        plain = peak(with_gradients())
        layers = with_gradients()
        with Engine(layers, range(6), device=Link(stalls=False)) as engine:
            for _ in range(3):
                before = engine.counters.out_bytes
                swapped = peak(layers)
            moved_bytes = engine.counters.out_bytes - before
            assert moved_bytes > plain[0] / 2
            assert swapped[0] <= plain[0] - moved_bytes + 8 * KIB
            window_bytes = moved_bytes // 6  # in backward one layer is reloaded ahead
            assert swapped[1] <= plain[1] - moved_bytes + window_bytes + 8 * KIB

    def test_tensors_that_others_hold_are_not_copied_for_ever(self) -> None:
        held: list[torch.Tensor] = []

        class Held(Layer):
            def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
                normed = self.norm1(hidden_states)
                held.append(normed)  # saved by the attention, and held by the model's user
                return hidden_states + self.attention(normed)

        layers, moved = stack(NUM_LAYERS, Held), []
        with Engine(layers) as engine:
            for _ in range(5):
                before = engine.counters.out_bytes
                loss_of(forward(layers, batch())).backward()
                moved.append(engine.counters.out_bytes - before)
                held.clear()
            assert moved[-1] == moved[-2]
            assert moved[-1] <= moved[0] - 3 * batch().nbytes
            stayed = sum(layer.stayed_bytes for layer in engine.counters.layers.values())
            loss_of(forward(layers, batch())).backward()
            assert sum(layer.stayed_bytes for layer in engine.counters.layers.values()) == stayed

    def test_a_peak_inside_a_recomputation_is_predicted(self) -> None:
        """A layer's recomputation holds its input, the 100 MiB that it makes, and 60 MiB while it runs."""
        sites = site("in/0", 10, 0.1, 3.0, 4.0), site("a/0", 100, 1.0, 1.0, 2.0)
        section = Section(LAYER_SECTION, ("a/0",), ("in/0",), 1.5, peak_mib=60)
        of = profile([LayerClass(tuple(range(8)), 2.0, 4.0, sites, (section,))])
        moves_inputs = whole_layers(of, 100.0)
        assert moves_inputs is not None
        assert simulate(of, moves_inputs).host_gib > 0
        assert simulate(of, moves_inputs).peak_gib >= (10 + 100 + 60) / 1024


class TestSlowerAndLargerThanCheckpointing:
    """Offloading is slower than checkpointing, and takes more memory.

    Seen in axolotl-ai-cloud/axolotl#3733: offloads came faster than PCIe took them, and the backlog stayed on the GPU.

    Here: compute waits once a bounded number of bytes is on its way. Within the memory of checkpointing, a plan is no
    slower.
    """

    def test_a_link_that_stalls_costs_no_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def peak(device: Device) -> int:
            layers = with_gradients()
            seen: list[int] = []
            with tensor_memory() as memory, Engine(layers, range(7), device=device):
                note = lambda: seen.append(memory.in_use)  # noqa: E731
                for _ in range(3):
                    seen.clear()
                    with noted(monkeypatch, Offloader, "release", note), noted(monkeypatch, Reloader, "prefetch", note):
                        loss = loss_of(forward(layers, batch()))
                        note()
                        loss.backward()
                    del loss
            return max(seen)

        assert peak(Link(stalls=True)) <= peak(Link(stalls=False)) + KIB

    @pytest.mark.parametrize("speed", [0.02, 0.2, 1.0, 5.0])
    @pytest.mark.parametrize("share", [0.0, 0.3, 0.7], ids=["checkpointing", "a-little-more", "much-more"])
    def test_a_plan_is_no_slower_than_recomputing_all(self, speed: float, share: float) -> None:
        """Within the memory of checkpointing, and of more."""
        sites = (site("in/0", 20, 0.1, 3.0, 4.0), site("qkv/0", 60, 0.4, 2.5, 3.0), site("fc1/0", 160, 1.0, 1.0, 2.0))
        section = Section(LAYER_SECTION, ("qkv/0", "fc1/0"), ("in/0",), 2.0)
        of = profile([LayerClass(tuple(range(12)), 2.0, 4.0, sites, (section,))], gb_s=speed * GB_S)
        checkpointed = whole_layers(of, 1000.0)
        assert checkpointed is not None
        alone = simulate(of, checkpointed)
        more_gib = simulate(of, empty_plan(of)).peak_gib - alone.peak_gib
        found = solve(of, alone.peak_gib + of.reserve_gib + share * more_gib).prediction
        assert found.step_ms <= alone.step_ms * 1.001
        assert found.step_ms >= found.host_gib * 1024 * MS_PER_MIB / (speed * GB_S), "faster than the link"
