"""Planted faults: each protection of the guard is removed once, and the outcome must then be wrong."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron.swap.devices import emulated
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.engine.handle import Handle
from megatron.swap.engine.offload import Offloader
from megatron.swap.engine.oom_guard import OomGuard
from megatron.swap.engine.reload import Reloader
from megatron.swap.native.guarding import native
from tests.engine import Engine, HeldEvent, Layer, batch, forward, loss_of, plant_fault, stack
from tests.unit.engine.test_oom_guard import evict_everything, plain_backward, result
from tests.unit.native.helpers import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER

NOTHING_RELEASED = {"commit_bytes": 1, "window_bytes": 1 << 30, "ends_in_loss": False}


@pytest.fixture(autouse=True)
def unlimited() -> Iterator[None]:
    yield
    native().unlimit_ram()


class Between(Layer):
    """Calls a function in the middle of its backward and after its forward."""

    in_backward: Callable[[], None] | None = None
    behind: Callable[[], None] | None = None
    holds = False

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states + self.attention(self.norm1(hidden_states))
        if self.holds:
            self.held = hidden_states.sin()  # cos of it is saved below
        if self.in_backward is not None:
            hidden_states.register_hook(lambda grad: self.in_backward())
        output = hidden_states + self.mlp(self.norm2(hidden_states))
        return output + self.held.cos() if self.holds else output


def wrongs(
    swapped: tuple[int, ...] | None = (),
    *,
    in_backward: bool = False,
    behind: bool = False,
    holds: bool = False,
    held_copy_s: float = 0.0,
    before_backward: bool = True,
    **options: Any,
) -> list[str]:
    """Return the errors of a step in which every offered storage is evicted at a chosen moment.

    Args:
        held_copy_s: copies out are held up for so long, or until everything was taken without waiting for them.
    """
    layers = stack(4, Between)
    for layer in layers:
        layer.holds = holds
    plain = plain_backward(layers)
    found: list[str] = []
    engine = Engine(layers, swapped, guarded=True, device=EmulatedDevice(), **options)
    held = HeldEvent()
    try:
        if held_copy_s:
            engine.device.wait(engine.manager.offload.lane.stream, held)
        for layer in layers:
            layer.in_backward = (lambda: evict_everything(engine)) if in_backward else None
        hidden = batch()
        for layer in layers:
            hidden = layer(hidden)
            if behind:
                evict_everything(engine)
        loss = loss_of(hidden)
        del hidden
        if held_copy_s:
            opened = threading.Timer(held_copy_s, held.open)
            opened.start()
        if before_backward:
            evict_everything(engine)
        if held_copy_s and not held.has_passed():
            found.append("did not wait")
            opened.cancel()
            held.open()
        loss.backward()
        swapped_result = result(layers, loss)
        found += [] if swapped_result.same_as(plain) else ["different"]
        del loss
        gc.collect()
        found += ["something was left over"] if engine.guard._offered or engine.num_leases else []
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    finally:
        held.open()
        engine.close()
    return found


REFUSED = "RuntimeError: the out-of-memory guard evicted this saved tensor, and it was not reloaded"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of finalizers, by the fault
def test_what_is_used_soon_is_reacquired(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrongs(in_backward=True) == []
    assert wrongs(in_backward=True, before_backward=False) == []
    plant_fault(monkeypatch, Reloader, "_is_on_device", "self._evictions.reacquire(handle)", "pass")
    assert REFUSED in "".join(wrongs(in_backward=True, before_backward=False))


def test_what_others_hold_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrongs(holds=True, in_backward=True) == []
    offer = OomGuard.offer

    def with_all_owners(guard: OomGuard, handle: Handle, *args: Any, **named: Any) -> None:
        assert handle.storage is not None
        count = torch._C._storage_Use_Count(handle.storage._cdata)
        with monkeypatch.context() as patch:
            patch.setattr(Handle, "num_owners", property(lambda _: count))
            offer(guard, handle, *args, **named)

    monkeypatch.setattr(OomGuard, "offer", with_all_owners)
    layers = stack(2, Between)
    layers[0].holds = True
    with Engine(layers, (), guarded=True, device=EmulatedDevice()) as engine:
        loss = loss_of(forward(layers, batch()))
        evict_everything(engine)
        with pytest.raises(RuntimeError, match="the out-of-memory guard evicted this saved tensor"):
            layers[0].held.sum()
        del loss


def test_the_copy_out_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrongs(None, held_copy_s=0.2, **NOTHING_RELEASED) == []
    raised = native().Flag()
    raised.raise_()
    monkeypatch.setattr(EmulatedDevice, "native_event", lambda *_: raised.address)
    # A copy engine would find arbitrary bytes in freed memory; here it finds none.
    monkeypatch.setattr(emulated._TensorBytes, "exists", lambda _: False)
    assert wrongs(None, held_copy_s=60, **NOTHING_RELEASED) == ["did not wait", "different"]


def test_room_on_the_host_is_used_again_only_when_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrongs(behind=True) == []
    slot = "handle.slot = RescuedBytes(pieces, self._freed)"
    plant_fault(monkeypatch, OomGuard, "reacquire", slot, f"{slot}; self._core.release(pieces)")
    assert "different" in wrongs(behind=True)


def test_what_was_taken_is_not_taken_for_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrongs(None, behind=True, **NOTHING_RELEASED) == []
    plant_fault(monkeypatch, OomGuard, "reacquire", "handle.move_to(StorageState.OFFLOADED)", "return None")
    assert REFUSED in "".join(wrongs(None, behind=True, **NOTHING_RELEASED))


def test_an_offer_ends_with_its_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrongs() == []
    plant_fault(monkeypatch, Handle, "__del__", "if self.guard is not None:", "if False:")
    layers = stack(2)
    with Engine(layers, (), guarded=True) as engine:
        loss = loss_of(forward(layers, batch()))
        engine.guard.end()  # nobody may look at what is left of it
        del loss
        gc.collect()
        assert engine.guard._offered


class ChangesTheLast(Layer):
    """Leaves a saved tensor for the next layer, which may change it, drop it, or run out of memory."""

    runs_out: Callable[[], None] | None = None
    before: ChangesTheLast | None = None
    made: torch.Tensor

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.made = hidden_states * 1.5
        output = self.made.sin() + super().forward(hidden_states)
        if self.runs_out is not None and self.before is not None:
            with torch.no_grad():
                self.before.made.zero_()
            del self.before.made
            self.runs_out()
        return output


def test_a_change_of_what_was_taken_is_told_by_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def error_of() -> str:
        layers = stack(5, ChangesTheLast)
        with Engine(layers, guarded=True, commit_bytes=1, device=EmulatedDevice()) as engine:
            layers[2].runs_out = lambda: evict_everything(engine)
            object.__setattr__(layers[2], "before", layers[1])  # no submodule of it
            try:
                loss_of(forward(layers, batch())).backward()
            except RuntimeError as error:
                return f"{type(error).__name__}: {error}"
        return ""

    assert "modified by an inplace operation" in error_of()
    plant_fault(monkeypatch, Offloader, "_keep", "return  # evicted", "pass  # evicted")
    assert error_of().startswith("StateError")
