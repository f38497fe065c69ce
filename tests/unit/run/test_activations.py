"""Swapping around a plain PyTorch training loop: equal to the bit, nothing left behind, clear errors."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron import swap
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.swap.common.types import MIB, SwapError, UsageError
from megatron.swap.engine.policy import ManualPolicy
from megatron.swap.memory.host_memory import HostMemoryError
from tests.plain_loop import (
    ALL,
    Checkpointed,
    Cnn,
    Mlp,
    OfKeyed,
    Twice,
    assert_equal,
    encoder,
    images,
    loss_of,
    mlps,
    rows,
    tokens,
    train,
)

ROOT = Path(__file__).resolve().parents[3]


# ------------------------------------------------------------------------------------------- equality to the bit


def checkpointed() -> nn.Module:
    return nn.Sequential(*(Checkpointed(bool(number % 2)) for number in range(4)))


@pytest.mark.parametrize(("make", "data", "options"), [
    (mlps, rows, {}), (mlps, rows, {"layers": "1,4"}), (Cnn, images, {}), (encoder, tokens, {}), (Twice, rows, {}),
    (OfKeyed, rows, {"num_steps": 5}), (checkpointed, rows, {}),
], ids=["all", "some", "convolutions", "dropout", "twice", "mappings", "checkpoints"])  # fmt: skip
def test_models(make: Callable[[], nn.Module], data: Any, options: dict[str, Any]) -> None:
    assert assert_equal(make, data, **options).num_late == 0 or make is not OfKeyed


def test_a_retained_graph_and_a_second_derivative() -> None:
    def backward(model: nn.Module, batch: torch.Tensor, step: int) -> torch.Tensor:
        batch.requires_grad_()
        loss = loss_of(model(batch))
        loss.backward(retain_graph=True)
        (slope,) = torch.autograd.grad(loss, batch, create_graph=True)
        (loss + slope.square().sum()).backward()
        return loss

    assert_equal(mlps, backward=backward)


def test_distributed_data_parallel(tmp_path: Path) -> None:
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        for wrapped_first in (True, False):
            torch.manual_seed(7)
            model = mlps()
            plain = train(nn.parallel.DistributedDataParallel(copy.deepcopy(model)))
            parallel = nn.parallel.DistributedDataParallel(model) if wrapped_first else model
            with swap.activations(parallel, **ALL) as swapped:
                if not wrapped_first:
                    parallel = nn.parallel.DistributedDataParallel(model)
                assert train(parallel).same_as(plain)
                assert len(swapped.layers) == 6
                assert swapped.stats().in_bytes > 0
    finally:
        torch.distributed.destroy_process_group()


# -------------------------------------------------------------------------------------------------------- memory


def test_nothing_piles_up() -> None:
    model = mlps()
    with swap.activations(model, min_mib=0) as swapped:
        train(model, num_steps=3)
        before = swapped.stats()
        train(model, num_steps=50)
        after = swapped.stats()
        assert after.held_bytes == 0
        assert after.host_peak_bytes == before.host_peak_bytes
        assert after.out_bytes > 10 * before.out_bytes
        manager = swapped.parts.manager
        assert len(manager.counters._stalls) < 100
        assert not manager._state.orphans
        assert not len(manager._state.offloading)
        assert manager._state.order._num_observed <= 6
        assert not list(manager._state.order._waiting.keys())


def test_too_little_host_memory_is_an_error_in_the_forward_that_needs_it() -> None:
    model = mlps()
    with (
        swap.activations(model, min_mib=0, host_gib=8 / MIB) as swapped,
        pytest.raises(HostMemoryError, match=r"Raise host_gib= or swap fewer layers \(layers=\)"),
    ):
        train(model)
    assert swapped.stats().host_booked_bytes <= 8 * 1024


# ---------------------------------------------------------------------------------------------- taking it off again


def footprint(model: nn.Module) -> list[object]:
    names = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called", "_backward_hooks")
    hooks = [dict(getattr(module, name)) for module in model.modules() for name in names]
    return [*hooks, *(sorted(vars(module)) for module in model.modules()), *(m.forward for m in model.modules())]


def test_close_leaves_the_modules_as_they_were() -> None:
    model = mlps()
    model[1].forward = lambda hidden, own=model[1].forward: own(hidden)  # another library's
    before = footprint(model)
    swapped = swap.activations(model, "0-3", **ALL)
    train(model)
    assert footprint(model) != before
    swapped.close()
    assert footprint(model) == before
    stats = swapped.stats()
    train(model)
    swapped.close()
    assert swapped.stats() == stats and stats.out_bytes  # noqa: PT018
    with pytest.raises(UsageError, match="is closed: call"):
        swapped.__enter__()
    with swap.activations(model, **ALL):  # once more
        train(model)
    assert footprint(model) == before


def test_a_backward_after_close() -> None:
    model = mlps()
    with swap.activations(model, **ALL):
        loss = loss_of(model(rows(0)))
    with pytest.raises(SwapError, match="Close after the last backward"):
        loss.backward()
    with swap.activations(model) as swapped:  # everything is small: it has never left
        loss = loss_of(model(rows(0)))
    assert swapped.stats().out_bytes == 0
    loss.backward()
    assert model[0].up.weight.grad is not None


# ------------------------------------------------------------------------------------------------- what layers are


def test_layers_are_the_children_of_the_outermost_stacks() -> None:
    model = Cnn()
    with swap.activations(model) as swapped:
        assert swapped.layers == (*model.stem, *model.stages)  # of nested stacks the outer one
    with swap.activations(encoder()) as swapped:
        assert len(swapped.layers) == 5
    with swap.activations(Twice()) as swapped:
        assert len(swapped.layers) == 4
    nested = nn.ModuleList([nn.ModuleList([Mlp(), Mlp()]), nn.ModuleDict({"a": nn.Sequential(Mlp())})])
    with swap.activations(nested, "0,2") as swapped:
        assert swapped.layers == (nested[0][0], nested[0][1], nested[1]["a"][0])
        assert swapped.chosen == (0, 2)
    layers = [Mlp(), Mlp(), Mlp()]
    with swap.activations(iter(layers), ManualPolicy({1}, ("up",), 0)) as swapped:
        assert swapped.layers == tuple(layers)
        assert swapped.chosen == (1,)


def refused() -> dict[str, tuple[Callable[[], Any], str]]:
    model = mlps(3)
    compiled = mlps(3)
    compiled[1].compile()
    return {
        "no stack": (lambda: swap.activations(Mlp()), "no layers were found in Mlp"),
        "no module": (lambda: swap.activations([model[0], 3]), "int is given as a layer"),  # type: ignore[list-item]
        "a list of stacks": (lambda: swap.activations([nn.ModuleList([Mlp()])]), "ModuleList is given as a layer"),
        "beyond": (lambda: swap.activations(model, "0-3"), "layer 3 is out of range"),
        "none": (lambda: swap.activations(model, "none"), "none of the 3 layers"),
        "a number": (lambda: swap.activations(model, 3), "given 3 as layers"),  # type: ignore[arg-type]
        "min_mib": (lambda: swap.activations(model, min_mib=-1), "min_mib=-1: must be"),
        "too much": (lambda: swap.activations(model, host_gib=1e6), "host_gib= asks for"),
        "a word": (lambda: swap.activations(model, min_mib="1"), "must be a number of MiB"),  # type: ignore[arg-type]
        "inside": (lambda: swap.activations([model, model[1]]), "layer 0 of list .Sequential. contains layer 1"),
        "the last": (lambda: swap.activations(model, "1-2"), "of 3 layers only the last"),
        "meta": (lambda: swap.activations(mlps(3).to("meta")), "are on meta"),
        "compiled layer": (lambda: swap.activations(compiled), "layer 1 of Sequential .Mlp. is compiled"),
        "scripted": (lambda: swap.activations([torch.jit.script(nn.Linear(2, 2))]), "is compiled"),
    }


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")
@pytest.mark.parametrize("case", refused())
def test_bad_input_is_refused(case: str) -> None:
    call, said = refused()[case]
    with pytest.raises(SwapError, match=said) as found:
        call()
    assert "--swap" not in str(found.value)


def test_nested_swaps_are_refused() -> None:
    model = nn.Sequential(*(mlps(4) for _ in range(4)))
    before = footprint(model)
    with swap.activations(model):
        for again in (model, [model], model[0], [model[1][1]], [model[1][1].up]):
            with pytest.raises(UsageError, match="swapped already"):
                swap.activations(again)
    assert footprint(model) == before


def test_checkpoints_around_layers() -> None:
    """A checkpoint around a layer that is to be swapped is refused. A checkpoint around another layer stays one."""

    class Around(nn.Sequential):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for number, layer in enumerate(self):
                hidden = checkpoint(layer, hidden, use_reentrant=False) if number == 3 else layer(hidden)
            return hidden

    def make() -> nn.Module:
        return Around(*(Mlp() for _ in range(5)))

    assert_equal(make, layers="0-2")
    model, runs = make(), []
    model[3].up.register_forward_hook(lambda *_: runs.append(1))
    with swap.activations(model, "0-2", min_mib=0):
        train(model, num_steps=2)
    assert len(runs) == 4
    with (
        swap.activations(model, "1-3", min_mib=0),
        pytest.raises(UsageError, match="is to be swapped, but runs inside an activation checkpoint"),
    ):
        train(model)


# ----------------------------------------------------------------------------------------------------- the package


def test_the_package_imports_nothing_before_it_is_asked_for() -> None:
    program = (
        "import sys, megatron.swap, megatron.swap.planner.solve\n"
        "assert not {'torch', 'megatron.swap.run.train'} & set(sys.modules)\n"
        "from megatron import swap\n"
        "from megatron.swap import types\n"
        "assert not hasattr(swap, 'anything')\n"
        "assert 'torch' not in sys.modules\n"
        "swap.activations\n"
        "assert 'torch' in sys.modules and not any(name.startswith('megatron.core') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.nightly
def test_a_compiled_model_runs_its_swapped_layers_as_they_are() -> None:
    program = (
        "import pytest, torch\n"
        "from megatron import swap\n"
        "from megatron.swap import types\n"
        "from tests import plain_loop as here\n"
        "torch.manual_seed(7)\n"
        "model = here.mlps()\n"
        "plain = here.train(here.copy.deepcopy(model))\n"
        "compiled = torch.compile(model, backend='aot_eager')\n"
        "with swap.activations(compiled, **here.ALL) as swapped:\n"
        "    assert here.train(compiled).same_as(here.Trained(plain.losses, plain.grads,\n"
        "        {'_orig_mod.' + name: value for name, value in plain.state.items()}))\n"
        "    assert swapped.stats().in_bytes > 0\n"
        "with pytest.raises(types.UsageError, match='is compiled .OptimizedModule.'):\n"
        "    swap.activations([torch.compile(here.Mlp())])\n"
    )
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "0"}
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, env=environment)
