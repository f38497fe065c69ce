"""The saved-tensor hooks: gradients equal to the bit, whatever a layer saves and however backward is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron.swap.devices.base import Stream
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.engine.decider import is_ineligible
from tests.engine import (
    HIDDEN,
    TOKENS,
    Engine,
    Result,
    batch,
    compare,
    forward,
    loss_of,
    one_after_the_other,
    result,
    stack,
    train_step,
)
from tests.lazy_device import LazyDevice


class PromptDevice(EmulatedDevice):
    """Copies at once, and so as early as a copy engine can."""

    def copy(self, stream: Stream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> int:
        number = super().copy(stream, targets, sources)
        self.synchronize()
        return number


class Lambda(nn.Module):
    """A layer made of one linear module and a function of its output and itself."""

    def __init__(self, function: Callable[[torch.Tensor, Lambda], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.function = function
        self.note: dict = {}

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(hidden_states), self)


def expanded(hidden: torch.Tensor, _: Lambda) -> torch.Tensor:
    row = hidden.sin()[3:4, :].expand(TOKENS, HIDDEN)
    return hidden * row + hidden * hidden.t().contiguous().t()


def strided(hidden: torch.Tensor, _: Lambda) -> torch.Tensor:
    base = hidden.exp().tanh()
    left, right = base[::2, 1::2], base.t()[::2, ::2].t()
    corner = torch.as_strided(base, (TOKENS // 2, HIDDEN // 2), (3, 1), 5)
    return functional.pad(left * right * corner, (0, HIDDEN // 2, 0, TOKENS // 2)) + hidden


def unsafe_chunks(hidden: torch.Tensor, _: Lambda) -> torch.Tensor:
    """The second half is written after the first one was saved, and no version shows it: PyTorch's GRU does so."""
    left, right = hidden.unsafe_chunk(2, 1)
    return left.sigmoid_().repeat(1, 2) * right.tanh_().repeat(1, 2)


def overlapping_unfold(hidden: torch.Tensor, _: Lambda) -> torch.Tensor:
    windows = hidden.cos().unfold(0, 4, 1)
    return functional.pad((windows * windows).sum(-1), (0, 0, 0, 3))


def checkpointed(hidden: torch.Tensor, _: Lambda) -> torch.Tensor:
    return checkpoint(lambda x: (x.sin() * x).exp(), hidden, use_reentrant=False) * hidden.cos()


def masks_and_indices(hidden: torch.Tensor, _: Lambda) -> torch.Tensor:
    mask = hidden > 0  # bool
    order = hidden.argsort(dim=0)  # int64
    return hidden.masked_fill(mask, 0.5) + hidden.gather(0, order) + torch.where(mask, hidden, hidden.sin())


def data_dependent_shape(hidden: torch.Tensor, _: Lambda) -> torch.Tensor:
    return hidden.index_put((hidden > 0.2).nonzero(as_tuple=True), hidden[hidden > 0.2].sin())


FUNCTIONS = [expanded, strided, overlapping_unfold, masks_and_indices, data_dependent_shape, checkpointed]


def of(function: Callable, num_layers: int = 4) -> nn.ModuleList:
    return stack(num_layers, lambda: Lambda(function))


@pytest.mark.parametrize("lazy", [False, True], ids=["random delays", "lazy"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_whatever_a_layer_saves_comes_back_to_the_bit(function: Callable, lazy: bool) -> None:
    compare(of(function), device=LazyDevice() if lazy else None, min_bytes=1, verify=True)


@pytest.mark.parametrize("verify", [False, True])
def test_parts_of_a_storage_that_are_written_after_its_copy_began(verify: bool) -> None:
    """The copy runs as early as a copy engine can."""
    options = {"commit_bytes": 1 << 24 if verify else 1, "verify": verify}
    compare(of(unsafe_chunks, 5), num_steps=3, device=PromptDevice(), **options)


@pytest.mark.parametrize(("reentrant", "more"), [(True, False), (False, False), (False, True)])
def test_a_checkpoint_around_layers(reentrant: bool, more: bool) -> None:
    """In a reentrant one nothing is swapped, but all is right. ``more``: it holds operators beside the layers."""

    def segment(layers: nn.ModuleList, hidden: torch.Tensor) -> torch.Tensor:
        return functional.gelu(forward(layers, hidden.sin())) if more else forward(layers, hidden)

    def run(layers: nn.ModuleList) -> Result:
        layers.zero_grad()
        output = hidden = batch().requires_grad_()
        for i in range(0, 4, 2):
            output = checkpoint(partial(segment, layers[i : i + 2]), output, use_reentrant=reentrant)
        (loss := loss_of(forward(layers[4:], output))).backward()
        return result(layers, loss, more=[hidden.grad])

    compare(stack(6), run)


def retained(layers: nn.ModuleList, hidden: torch.Tensor) -> Result:
    (loss := loss_of(forward(layers, hidden))).backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in layers.parameters()]
    loss.backward(retain_graph=True)
    loss.backward()
    return result(layers, loss, more=[hidden.grad, *first])


def of_some_parameters_then_of_all(layers: nn.ModuleList, hidden: torch.Tensor) -> Result:
    loss = loss_of(forward(layers, hidden))
    some = [layers[3].mlp.linear_fc2.weight, layers[1].norm1.weight]
    first = torch.autograd.grad(loss, some, retain_graph=True)
    return Result([loss.detach()], [*first, *torch.autograd.grad(loss, [hidden, *layers.parameters()])])


def of_gradients(layers: nn.ModuleList, hidden: torch.Tensor) -> Result:
    loss = loss_of(forward(layers, hidden))
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    return Result([loss.detach()], [grad.detach(), *torch.autograd.grad(grad.square().sum(), hidden)])


BACKWARDS = [retained, of_some_parameters_then_of_all, of_gradients]


@pytest.mark.parametrize("backward", BACKWARDS, ids=lambda backward: backward.__name__)
def test_however_backward_is_called(backward: Callable[..., Result]) -> None:
    def run(layers: nn.ModuleList) -> Result:
        layers.zero_grad()
        return backward(layers, batch().requires_grad_())

    compare(stack(5), run, device=LazyDevice(), verify=backward is retained)


def saves_and_changes(how: Callable[[torch.Tensor], object], source: Callable) -> Callable:
    """Return the function of a layer that changes a saved tensor if its note says so."""

    def function(hidden: torch.Tensor, layer: Lambda) -> torch.Tensor:
        saved = source(hidden)
        output = saved.sin() + hidden
        if layer.note.get("bad"):
            how(saved)
        return output

    return function


class TestInPlaceChangeAfterSaving:
    @pytest.mark.parametrize(("options", "site"), [
        ({"commit_bytes": 1 << 24}, r"layers\.1/layer/\d.*"), ({"commit_bytes": 1}, r"layers\.1/layer/\d.*"),
        ({"swapped": [0]}, ""), ({"min_bytes": 1 << 20}, ""),
    ], ids=["before the commit", "after the commit", "layer stays", "too small"])  # fmt: skip
    @pytest.mark.parametrize(("how", "source"), [
        (lambda x: x.add_(1), lambda x: x * 1), (lambda x: x[1:3].zero_(), torch.exp),
    ], ids=["input saved, whole", "output saved, part"])  # fmt: skip
    def test_raises_as_plain_autograd_does_and_names_the_site(self, how, source, options: dict, site: str) -> None:
        layers = of(saves_and_changes(how, source))
        layers[1].note["bad"] = True
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss_of(forward(layers, batch())).backward()
        with Engine(layers, device=LazyDevice(), **options) as engine:
            for _ in range(2):
                with pytest.raises(RuntimeError, match=f"{site}modified by an inplace"):
                    loss_of(forward(layers, batch())).backward()
            layers[1].note["bad"] = False
            assert train_step(layers, one_after_the_other(1)).grads[0].isfinite().all()
            assert not engine.device.violations

    def test_a_change_in_a_later_layer_before_the_release_raises(self) -> None:
        def keep(hidden: torch.Tensor, layer: Lambda) -> torch.Tensor:
            layer.note["saved"] = hidden * 1
            return layer.note["saved"].sin()

        layers = of(keep, 5)
        with Engine(layers, device=LazyDevice()):
            hidden = forward(layers[:2], batch())
            layers[1].note["saved"].add_(1)
            hidden = forward(layers[2:], hidden)
            with pytest.raises(RuntimeError, match=r"layers\.1/layer/0.*version 1, autograd saved it at version 0"):
                loss_of(hidden).backward()

    def test_a_change_between_two_saves_or_of_a_save_that_backward_does_not_use_is_no_error(self) -> None:
        def twice(hidden: torch.Tensor, _: Lambda) -> torch.Tensor:
            base = hidden * 1
            first = base.detach() * hidden  # saves the values of now
            base = base.mul(2)
            base.add_(1)
            return first + base.sin()

        def unused(hidden: torch.Tensor, _: Lambda) -> torch.Tensor:
            base = hidden * 1
            not_used = base.sin()
            base.add_(1)
            result = base.cos()  # the second saved tensor on the storage
            del not_used
            return result

        compare(of(twice), commit_bytes=1)
        compare(of(unused))


class TestBoundary:
    def test_outputs_and_inputs_are_no_views_and_remove_gives_every_layer_its_own_forward_back(self) -> None:
        seen = []

        def look(hidden: torch.Tensor, _: Lambda) -> torch.Tensor:
            seen.append(hidden._base)
            return hidden

        layers = nn.ModuleList([Lambda(look)])
        layers[0].linear = nn.Identity()
        with Engine(layers):
            assert "forward" in vars(layers[0])
            output = layers[0](batch().requires_grad_())
        assert (output._base, seen, output.requires_grad) == (None, [None], True)
        assert "forward" not in vars(layers[0])
        assert not any(module._forward_hooks for module in layers.modules())

    def test_parameters_stay_also_when_they_move_after_the_boundary_was_put_up(self) -> None:
        layers = stack(3)
        with Engine(layers, min_bytes=1, device=LazyDevice()) as engine:
            flat = torch.cat([parameter.detach().flatten() for parameter in layers.parameters()])
            first = 0
            for parameter in layers.parameters():
                parameter.data = flat[first : first + parameter.numel()].view_as(parameter)
                first += parameter.numel()
            for _ in range(2):
                train_step(layers, one_after_the_other(1))
            stayed = {layer: counters.stayed_bytes for layer, counters in engine.counters.layers.items()}
            assert stayed == {0: 2 * batch().nbytes}  # the input of the first layer, which the test holds
            assert flat.isfinite().all()

    def test_what_is_no_plain_device_memory_stays(self) -> None:
        assert not is_ineligible(torch.ones(2), torch.device("cpu"))
        conjugated = torch.ones(2, dtype=torch.complex64).conj()
        for tensor in (
            nn.Parameter(torch.ones(2)), torch.ones(2, device="meta"), torch.ones(2).to_sparse(), conjugated,
            conjugated.imag, torch.ones(0), torch.ones(2, 0, 3),
        ):  # fmt: skip
            assert is_ineligible(tensor, torch.device("cpu"))
