"""``swap.activations(model, memory_gib=…)``: equal to the bit, within the budget, as predicted, clear errors."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron import swap
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from megatron.swap.common.plan import Infeasible
from megatron.swap.common.types import GIB, UsageError
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.forecast.profiles import load_profile
from megatron.swap.layers import learned, makers
from megatron.swap.memory.host_memory import HostCapacity, HostMemoryError
from megatron.swap.models.hints import ModelHints
from megatron.swap.native.operator_following import load_operators
from megatron.swap.planner.profile import Link
from megatron.swap.planning import workload_profiler
from megatron.swap.run import host_share
from tests.plain_loop import (
    Cnn,
    Mlp,
    encoder,
    images,
    loss_of,
    mlps,
    rows,
    tokens,
    train,
)
from tests.planned_loop import NUM_STEPS, QUIET, assert_planned, check, fraction_gib


@pytest.fixture
def offloads_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recomputed, however short a busy machine's times make it look, and the link is fast."""
    monkeypatch.setattr(workload_profiler, "measure_link", lambda *_: Link(1e3, 1e3, 1e3, 1e3))
    monkeypatch.setattr(ModelHints, "recomputes_layers", False)
    monkeypatch.setattr(learned, "computing_devices", lambda _: True)  # so that no operators are recorded


def planned(model: nn.Module, memory_gib: float = 1.0, **options: Any) -> swap.Run:
    swapped = swap.activations(model, memory_gib=memory_gib, **{**QUIET, **options})
    assert isinstance(swapped, swap.Run)
    return swapped


# ------------------------------------------------------------------------ equal to the bit, within the budget


@pytest.mark.slow
def test_without_a_compiler_layers_are_recomputed_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(makers, "load_operators", functools.cache(load_operators.__wrapped__))
    monkeypatch.setattr(makers, "OperatorWatch", lambda *_: pytest.fail("follows"))
    for plan in assert_planned(mlps):
        assert "recomputed as a whole" in plan
    assert caplog.text.count("swap.activations recomputes whole layers only. no compiler is on PATH") == 1


@pytest.mark.usefixtures("offloads_only")
def test_layers_offloaded() -> None:
    assert " swap " in assert_planned(lambda: mlps(8), fractions=(0.6,))[0]


@pytest.mark.nightly
def test_dropout_is_restored() -> None:
    assert "recomputed as a whole" in assert_planned(encoder, tokens)[1]


def of_autocast(model: nn.Module, batch: torch.Tensor, step: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = loss_of(model(batch).float())
    loss.backward()
    return loss


@pytest.mark.slow
def test_autocast_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "computing_devices", lambda _: True)  # so that no operators are recorded
    assert "recomputed as a whole" in assert_planned(mlps, rows, (0.6, 0.4), of_autocast)[1]


class Towers(nn.Module):
    """The stack that runs last is listed first."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.tower = nn.Sequential(*(Mlp(48) for _ in range(3))), mlps(4)
        self.between = nn.Linear(32, 48)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.between(self.tower(hidden)))


def test_layers_that_differ_in_two_stacks_in_another_order() -> None:
    plan = assert_planned(Towers, fractions=(0.5,))[0]
    assert plan.startswith("model        7 layers of 32, Towers, float32")


def test_layers_that_change_their_inputs_or_buffers_are_not_run_again(tmp_path: Path) -> None:
    torch.manual_seed(7)
    model, path = Cnn(), tmp_path / "profile.json"
    with planned(model, save_profile=str(path)):
        train(model, images, 9)
    assert not any(entry.sections for entry in load_profile(path).layers)
    assert " swap " in assert_planned(Cnn, images, (0.8,))[0]


@pytest.mark.slow
def test_more_is_saved_later() -> None:
    """Twice as many rows: such steps are measured and planned anew, within the same budget."""
    torch.manual_seed(7)
    model = mlps()
    data = lambda step: rows(step) if step < 14 else torch.cat([rows(step), rows(step + 1)])  # noqa: E731
    plain = train(copy.deepcopy(model), data, 32)
    with planned(model, fraction_gib(model, 0.7)) as swapped:
        assert train(model, data, 32).same_as(plain)
        check(swapped.stats())


def test_training_goes_on_after_close() -> None:
    torch.manual_seed(7)
    model = mlps()
    plain = train(copy.deepcopy(model), num_steps=6)
    swapped = planned(model)

    def backward(model: nn.Module, batch: torch.Tensor, step: int) -> torch.Tensor:
        if step == 3:
            swapped.close()
            swapped.close()
        loss = loss_of(model(batch))
        loss.backward()
        return loss

    assert train(model, num_steps=6, backward=backward).same_as(plain)
    assert swapped.stats().num_steps == 2
    assert swapped.plan() == "no plan yet (profile): the first steps are measured, and keep as little as they can"


# ----------------------------------------------------------------------------------------- what users see


def test_a_host_without_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = HostCapacity(2**34, 2**30, None, safe_bytes=0, reason="16 GiB of memory, 1 GiB available")
    monkeypatch.setattr(host_share, "safe_host_bytes", lambda _: nothing)
    model = mlps()
    for settings in ({}, {"memory_gib": 1.0}):
        with pytest.raises(HostMemoryError, match=r"no memory left for activations: 16 GiB .* host_gib="):
            swap.activations(model, **settings)
    assert "forward" not in vars(model[0])


def test_the_least_budget_works() -> None:
    torch.manual_seed(7)
    model = mlps()
    with planned(model, 1e-6) as swapped, pytest.raises(Infeasible, match="Give memory_gib=") as refused:
        train(model, num_steps=NUM_STEPS)
    assert swapped.stats().stage is not None
    least = float(str(refused.value).split("memory_gib=")[1].split()[0])
    assert least == refused.value.smallest_gib
    with planned(model, least) as swapped:
        train(model, num_steps=NUM_STEPS)
        check(swapped.stats())


def test_a_model_that_exceeds_the_budget_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedDevice, "allocated_bytes", lambda _: 2 * GIB)
    with planned(mlps()) as swapped, pytest.raises(UsageError, match=r"take 2.00 GiB before .* Raise the budget, or"):
        train(swapped.hints.chunks[0], num_steps=1)


class Caching(nn.Module):
    """A model as transformers makes them: a flag for checkpointing, and a config."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlps(3)
        self.config = SimpleNamespace(use_cache=True)
        self.gradient_checkpointing = True

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layers(hidden)


def test_checkpointing_and_caches_of_transformers_are_taken_over() -> None:
    model, lines = Caching(), list[str]()
    with planned(model, log=lines.append):
        assert not model.gradient_checkpointing
        assert not model.config.use_cache
    assert model.gradient_checkpointing
    assert model.config.use_cache
    assert "gradient checkpointing is off" in lines[0]
    assert "use_cache is off" in lines[1]


def test_a_cache_is_refused() -> None:
    class DynamicCache:
        pass

    class Layer(Mlp):
        def forward(self, hidden: torch.Tensor, past: Any = None) -> torch.Tensor:
            return super().forward(hidden)

    class Model(nn.Sequential):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for layer in self:
                hidden = layer(hidden, past=DynamicCache())
            return hidden

    model = Model(Layer(), Layer(), Layer())
    with planned(model), pytest.raises(UsageError, match="Layer is called with a DynamicCache"):
        model(rows(0))


def test_a_checkpoint_around_a_layer_is_refused() -> None:
    class Model(Caching):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                hidden = torch_checkpoint.checkpoint(layer, hidden, use_reentrant=False)
            return hidden

    with planned(Model()) as swapped, pytest.raises(UsageError, match="runs inside an activation checkpoint"):
        swapped.hints.chunks[0](rows(0).requires_grad_()).sum().backward()


class FSDPModule(nn.Module):
    pass


class Sharded(Mlp, FSDPModule):
    pass


def compiled(module: nn.Module) -> nn.Module:
    module.compile()
    return module


@pytest.mark.parametrize(
    ("make", "arguments", "said"),
    [
        (mlps, {"layers": "0-3", "memory_gib": 1.0}, "layers '0-3' beside memory_gib"),
        (mlps, {"memory_fraction": 0.5, "memory_gib": 1.0}, "memory_fraction=0.5 both say"),
        (mlps, {"memory_gib": 1e9}, "at most what the device has"),
        (mlps, {"memory_fraction": 2.0}, "memory_fraction=2"),
        (lambda: list(mlps()), {"memory_gib": 1.0}, "plan a whole model"),
        (lambda: nn.Sequential(Mlp(), Mlp().to("meta")), {"memory_gib": 1.0}, "cpu, meta: a budget needs a model on"),
        (lambda: compiled(mlps()), {"memory_gib": 1.0}, "Sequential is compiled as a whole"),
        (lambda: nn.Sequential(compiled(Mlp()), Mlp(), Mlp()), {"memory_gib": 1.0}, "layer 0 .* is compiled"),
        (lambda: nn.Sequential(Sharded(), Sharded()), {"memory_gib": 1.0}, "0 is sharded .FSDPModule."),
    ],
)
def test_refused(make: Callable[[], Any], arguments: dict[str, Any], said: str) -> None:
    model = make()
    with pytest.raises(UsageError, match=said):
        swap.activations(model, **arguments)
    modules = model.modules() if isinstance(model, nn.Module) else model
    assert not any("forward" in vars(module) for module in modules if isinstance(module, Mlp | nn.Sequential))
