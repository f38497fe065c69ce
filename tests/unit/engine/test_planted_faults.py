"""Planted faults: each protection of the engine is removed once, and the outcome must then be wrong.

Every scenario runs twice, on the engine as it is (nothing may be wrong) and with one planted fault. The lazy device
runs a copy only when a wait demands it, so a missing wait always shows.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from megatron.swap.common.types import Action
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.engine import handle, saved_tensors
from megatron.swap.engine.checksum import VerifyError
from megatron.swap.engine.fences import ReadFences
from megatron.swap.engine.handle import Alias, Handle
from megatron.swap.engine.layer_recording import LayerRecording
from megatron.swap.engine.offload import Offloader
from megatron.swap.engine.producer_records import ProducerRecord
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.engine.reload import Reloader
from tests import recipe_cases
from tests.engine import (
    Engine,
    Layer,
    Result,
    Run,
    batch,
    forward,
    loss_of,
    one_after_the_other,
    one_forward_one_backward,
    plant_fault,
    stack,
    train_step,
    wrongs,
)
from tests.lazy_device import LazyDevice, LazyStream


def accumulate(layers: nn.ModuleList, _: Engine | None) -> Result:
    train_step(layers, one_after_the_other(2))
    return train_step(layers, one_after_the_other(2))


def pipeline(layers: nn.ModuleList, _: Engine | None) -> Result:
    train_step(layers, one_forward_one_backward(3))
    return train_step(layers, one_forward_one_backward(3))


class TestWaits:
    def test_memory_is_given_up_only_after_it_was_copied_out(self, monkeypatch: pytest.MonkeyPatch):
        assert wrongs(accumulate) == []
        plant_fault(
            monkeypatch,
            Offloader,
            "_drop",
            "self._counters.add_stall(self._device.timed_wait(compute, handle.out_event))",
            "pass",
        )
        assert "not finite" in wrongs(accumulate)

    def test_a_tensor_is_given_out_only_after_it_came_back(self, monkeypatch: pytest.MonkeyPatch):
        assert wrongs(pipeline) == []
        plant_fault(
            monkeypatch,
            Reloader,
            "fetch",
            "self._counters.add_stall(self._device.timed_wait(compute, handle.in_event))",
            "pass",
        )
        assert "not finite" in wrongs(pipeline)

    def test_a_copy_in_waits_for_the_copy_out_also_where_another_stream_released_the_memory(
        self, monkeypatch: pytest.MonkeyPatch
    ):
        def forward_on_a_side_stream(layers: nn.ModuleList, engine: Engine | None) -> Result:
            layers.zero_grad()
            device = engine.device if engine else LazyDevice()
            main, device.compute = device.compute, LazyStream("side")
            loss = loss_of(forward(layers, batch()))
            device.compute = main
            loss.backward()
            return Result([loss.detach()], [parameter.grad for parameter in layers.parameters()])

        assert wrongs(forward_on_a_side_stream, device=LazyDevice(poison=False)) == []
        plant_fault(monkeypatch, Reloader, "_read", "self.lane.wait(handle.out_event)", "pass")
        assert "different" in wrongs(forward_on_a_side_stream, device=LazyDevice(poison=False))

    def test_a_copy_out_waits_for_reads_of_its_slot_by_earlier_owners(self, monkeypatch: pytest.MonkeyPatch):
        graph: dict[str, torch.Tensor] = {}

        class Dropping(Layer):
            """Frees a graph in the middle of a layer, since the garbage collector may do so at any moment."""

            drops = False

            def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
                hidden_states = super().forward(hidden_states)
                if self.drops:
                    graph.clear()
                return hidden_states

        def broken_off_backward(layers: nn.ModuleList, _: Engine | None) -> Result:
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
            return train_step(layers, one_after_the_other(2))

        def found_wrong() -> list[str]:
            return wrongs(broken_off_backward, Dropping, swapped=[3], device=LazyDevice(eager=["out"]))

        assert found_wrong() == []
        monkeypatch.setattr(ReadFences, "event_of", lambda *_: None)
        found = found_wrong()
        assert "out: overwrites memory that an earlier copy still uses" in found

    def test_memory_that_backward_claimed_back_outlives_its_copy_out(self, monkeypatch: pytest.MonkeyPatch):
        options = {"ends_in_loss": False, "window_bytes": 1 << 30}  # nothing is released: backward overtakes every copy
        assert wrongs(accumulate, **options) == []
        plant_fault(
            monkeypatch,
            Reloader,
            "fetch",
            "self._counters.add_stall(self._device.timed_wait(compute, handle.out_event))",
            "pass",
        )
        assert "out: the source was freed before its copy" in wrongs(accumulate, **options)

    def test_memory_outlives_a_handle_that_dies_in_the_middle_of_a_copy(self, monkeypatch: pytest.MonkeyPatch):
        def gradient_of_the_end_only(layers: nn.ModuleList, _: Engine | None) -> Result:
            train_step(layers, one_after_the_other(1))
            loss = loss_of(forward(layers, batch()))
            grads = torch.autograd.grad(loss, list(layers[3].mlp.parameters()))
            del loss
            train_step(layers, one_after_the_other(1))
            return Result([], list(grads))

        assert wrongs(gradient_of_the_end_only, window_bytes=1 << 17) == []
        plant_fault(monkeypatch, Handle, "__del__", "if event is not None and", "if False and")
        found = wrongs(gradient_of_the_end_only, window_bytes=1 << 17)
        assert "in: the target was freed before its copy" in found


class TestOwners:
    def test_memory_that_others_hold_is_not_given_up(self, monkeypatch: pytest.MonkeyPatch):
        def with_a_skip_connection(layers: nn.ModuleList, _: Engine | None) -> Result:
            layers.zero_grad()
            early = layers[0](batch())  # saved by layer 1, and used again at the end
            loss = loss_of(forward(layers[1:], early) * early.detach())
            loss.backward()
            return Result([loss.detach()], [parameter.grad for parameter in layers.parameters()])

        assert wrongs(with_a_skip_connection) == []
        monkeypatch.setattr(Handle, "has_external_refs", lambda _: False)
        assert "not finite" in wrongs(with_a_skip_connection)

    def test_memory_that_was_written_to_is_not_given_up(self, monkeypatch: pytest.MonkeyPatch):
        class Writing(Layer):
            writes = False

            def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
                norm = self.norm1(hidden_states) * 1
                output = norm.sin() + super().forward(hidden_states)
                if self.writes:
                    norm.zero_()
                return output

        def run(layers: nn.ModuleList, _: Engine | None) -> Result:
            layers[1].writes = True
            with pytest.raises(RuntimeError, match=r"modified (by an inplace|in place)"):
                loss_of(forward(layers, batch())).backward()
            return Result()

        assert wrongs(run, Writing) == []
        monkeypatch.setattr(Handle, "changed", lambda _: False)
        assert any("DID NOT RAISE" in wrong for wrong in wrongs_of_failures(run, Writing))

    def test_a_reused_address_is_a_new_storage(self, monkeypatch: pytest.MonkeyPatch):
        taken: list[int] = []
        find = Offloader.find

        def noting(self: Offloader, storage: torch.UntypedStorage) -> Handle | None:
            taken.append(storage._cdata)
            return find(self, storage)

        def run(layers: nn.ModuleList, _: Engine | None) -> Result:
            with monkeypatch.context() as patch:
                patch.setattr(Offloader, "find", noting)
                return train_step(layers, one_forward_one_backward(3, 3))

        assert wrongs(run, device=EmulatedDevice()) == []
        assert len(set(taken)) < len(taken), "no address was reused: the test shows nothing"
        plant_fault(
            monkeypatch,
            Offloader,
            "find",
            "if handle is None or handle.storage is None or handle.storage._cdata != storage._cdata:",
            "if handle is None:",
        )
        find = Offloader.find
        assert wrongs(run, device=EmulatedDevice()) != []


def wrongs_of_failures(run: Run, make: Callable[[], nn.Module], **options: object) -> list[str]:
    """Return differences as ``wrongs`` does. Failures of pytest (not raised as expected) count too."""
    try:
        return wrongs(run, make, **options)
    except BaseException as failure:  # pytest.fail raises none of Exception
        return [str(failure)]


def addresses_reused(block: recipe_cases.Block, hidden: torch.Tensor) -> torch.Tensor:
    """Save and free each norm's output. Later saved tensors of its size may get its address."""
    for _ in range(4):
        hidden = block.linear(block.norm(hidden)).sin().exp().tanh()
    return hidden


class TestRecipes:
    def wrongs(self, body: Callable, activation: Callable = functional.gelu) -> list[str]:
        def make() -> nn.Module:
            block = recipe_cases.Block(body)
            block.activation = activation
            return block

        return wrongs_of_failures(accumulate, make, policy=recipe_cases.where_known(Action.SWAP))

    def test_an_input_changed_before_the_output_is_saved(self, monkeypatch: pytest.MonkeyPatch):
        case = recipe_cases.input_changed_later, recipe_cases.Double.apply
        assert self.wrongs(*case) == []
        plant_fault(monkeypatch, ProducerRecord, "input_changed", "alias.changed() or", "")
        assert "different" in self.wrongs(*case)

    def test_an_output_changed_before_it_is_saved(self, monkeypatch: pytest.MonkeyPatch):
        case = recipe_cases.output_changed_later, recipe_cases.Double.apply
        assert self.wrongs(*case) == []
        plant_fault(monkeypatch, Recomputer, "_obstacle", "if record.version_probe.changed() or", "if")
        assert self.wrongs(*case) != []

    @pytest.mark.parametrize(
        "body", [recipe_cases.input_changed_after_saving, recipe_cases.output_changed_after_saving]
    )
    def test_a_change_after_saving(self, monkeypatch: pytest.MonkeyPatch, body: Callable):
        def run(layers: nn.ModuleList, _: Engine | None) -> Result:
            with pytest.raises(RuntimeError, match=r"modified (by an inplace|in place)"):
                loss_of(forward(layers, batch())).backward()
            return Result()

        options = {"policy": recipe_cases.where_known(Action.SWAP), "commit_bytes": 1}
        make = lambda: recipe_cases.Block(body)  # noqa: E731
        assert wrongs_of_failures(run, make, **options) == []
        monkeypatch.setattr(Alias, "changed", lambda _: False)
        for module in (handle, saved_tensors):
            monkeypatch.setattr(module, "check_version", lambda *_: None)
        assert any("DID NOT RAISE" in wrong for wrong in wrongs_of_failures(run, make, **options))

    def test_a_kernel_that_is_not_deterministic(self, monkeypatch: pytest.MonkeyPatch):
        class Noisy(recipe_cases.Block):
            """A layer whose activation returns other numbers each time, and the same ones in each run."""

            def __init__(self) -> None:
                super().__init__(recipe_cases.chain)
                self.number = 0
                self.activation = self.noisy

            def noisy(self, x: torch.Tensor) -> torch.Tensor:
                self.number += 1 if torch.is_grad_enabled() else 0
                return functional.gelu(x) * (self.number if torch.is_grad_enabled() else 100)

        options = {"policy": recipe_cases.where_known(Action.SWAP)}
        assert wrongs(accumulate, Noisy, **options) == []
        plant_fault(monkeypatch, Recomputer, "_reproduces", "record.recomputes_same_bytes(storage)", "True")
        assert "different" in wrongs(accumulate, Noisy, **options)

    def test_a_reused_address_is_a_new_storage(self, monkeypatch: pytest.MonkeyPatch):
        assert self.wrongs(addresses_reused) == []
        plant_fault(
            monkeypatch, LayerRecording, "spec", "if spec is not None and spec.output() is not None else None", ""
        )
        assert "different" in self.wrongs(addresses_reused)


class TestVerify:
    def test_a_slot_that_changed_in_the_tier_is_told_with_its_site(self):
        layers = stack(6)
        with Engine(layers, verify=True, device=LazyDevice()) as engine:
            train_step(layers, one_after_the_other(2))
            loss = loss_of(forward(layers, batch()))
            saved = next(one for one in engine.manager.offload._live.values() if one.slot is not None)
            saved.slot.views()[0][7] ^= 1
            with pytest.raises(VerifyError, match=str(saved.site)):
                loss.backward()
            del loss, saved
            train_step(layers, one_after_the_other(1))

    def test_without_verify_the_same_change_goes_unnoticed(self):
        """Only the option ``verify`` notices it."""
        layers = stack(6)
        with Engine(layers, device=LazyDevice()) as engine:
            loss = loss_of(forward(layers, batch()))
            next(one for one in engine.manager.offload._live.values() if one.slot).slot.views()[0][7] ^= 1
            loss.backward()
