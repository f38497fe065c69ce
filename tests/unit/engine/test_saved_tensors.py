"""The saved-tensor hooks: gradients equal to the bit, whatever a layer saves and however backward is called."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron.swap.devices.base import Stream
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.engine.decider import is_ineligible
from megatron.swap.engine.saved_tensors import KeptTensor, keep
from tests.engine import (
    HIDDEN,
    TOKENS,
    Engine,
    Layer,
    Result,
    batch,
    forward,
    loss_of,
    one_after_the_other,
    plain_and_swapped,
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


def masks_and_indices(hidden: torch.Tensor, _: Lambda) -> torch.Tensor:
    mask = hidden > 0  # bool
    order = hidden.argsort(dim=0)  # int64
    return hidden.masked_fill(mask, 0.5) + hidden.gather(0, order) + torch.where(mask, hidden, hidden.sin())


def in_place_that_autograd_allows(hidden: torch.Tensor, _: Lambda) -> torch.Tensor:
    hidden = functional.relu(hidden + 1, inplace=True)
    return functional.dropout(hidden, 0.25).sub_(1)


def mixed_dtypes(hidden: torch.Tensor, _: Lambda) -> torch.Tensor:
    return (hidden.to(torch.bfloat16).sin() * hidden.double().cos()).float() + hidden.half().tanh().float()


def complex_numbers(hidden: torch.Tensor, _: Lambda) -> torch.Tensor:
    rotated = torch.polar(hidden.abs(), hidden)
    return (rotated * rotated.conj() * torch.view_as_complex(torch.stack([hidden, hidden], -1)).conj()).imag + hidden


def zero_size(hidden: torch.Tensor, _: Lambda) -> torch.Tensor:
    nothing = hidden[:0].sin() * hidden[:0].cos()
    return torch.cat([hidden.sin(), nothing]) + nothing.sum()


def data_dependent_shape(hidden: torch.Tensor, _: Lambda) -> torch.Tensor:
    return hidden.index_put((hidden > 0.2).nonzero(as_tuple=True), hidden[hidden > 0.2].sin())


def reads_a_saved_tensor_twice(hidden: torch.Tensor, _: Lambda) -> torch.Tensor:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out = x * x
            ctx.save_for_backward(x, out)
            return out

        @staticmethod
        def backward(ctx, grad):
            assert torch.equal(ctx.saved_tensors[0], ctx.saved_tensors[0])
            return 2 * grad * ctx.saved_tensors[0] + 0 * ctx.saved_tensors[1]

    return Twice.apply(hidden.sin())


def sparse(hidden: torch.Tensor, _: Lambda) -> torch.Tensor:
    neighbours = torch.eye(TOKENS).roll(1, 0).to_sparse()  # it has no storage
    return torch.sparse.mm(neighbours, hidden.sin()) * hidden


FUNCTIONS = [
    expanded,
    strided,
    overlapping_unfold,
    masks_and_indices,
    in_place_that_autograd_allows,
    mixed_dtypes,
    complex_numbers,
    zero_size,
    data_dependent_shape,
    reads_a_saved_tensor_twice,
    sparse,
]


@pytest.mark.parametrize("lazy", [False, True], ids=["random delays", "lazy"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_whatever_a_layer_saves_comes_back_to_the_bit(function: Callable, lazy: bool):
    plain, swapped = plain_and_swapped(
        stack(4, lambda: Lambda(function)),
        lambda layers: train_step(layers, one_after_the_other(2)),
        device=LazyDevice() if lazy else None,
        min_bytes=1,
        verify=True,
    )
    assert swapped.same_as(plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_precision_trains_to_the_bit(dtype: torch.dtype):
    plain, swapped = plain_and_swapped(
        stack(4, dtype=dtype), lambda layers: train_step(layers, one_after_the_other(2), dtype=dtype), verify=True
    )
    assert swapped.same_as(plain)


def test_dropout_draws_the_same_numbers():
    plain, swapped = plain_and_swapped(
        stack(4, lambda: Layer(dropout=0.3)), lambda layers: train_step(layers, one_after_the_other(3))
    )
    assert swapped.same_as(plain)


class TestCheckpoint:
    @pytest.mark.parametrize("reentrant", [True, False])
    def test_inside_a_layer(self, reentrant: bool):
        def part(hidden: torch.Tensor, _: Lambda) -> torch.Tensor:
            return checkpoint(lambda x: (x.sin() * x).exp(), hidden, use_reentrant=reentrant) * hidden.cos()

        plain, swapped = plain_and_swapped(
            stack(4, lambda: Lambda(part)), lambda layers: train_step(layers, one_after_the_other(2)), verify=True
        )
        assert swapped.same_as(plain)

    def test_around_layers_recomputed_in_backward_nothing_is_swapped_but_all_is_right(self):
        def run(layers: nn.ModuleList) -> Result:
            hidden = batch().requires_grad_()
            layers.zero_grad()
            half = len(layers) // 2
            middle = checkpoint(lambda x: forward(layers[:half], x), hidden, use_reentrant=True)
            loss = loss_of(forward(layers[half:], middle))
            loss.backward()
            return Result([loss.detach()], [hidden.grad, *(parameter.grad for parameter in layers.parameters())])

        plain, swapped = plain_and_swapped(stack(6), run)
        assert swapped.same_as(plain)

    @pytest.mark.parametrize(
        "before_and_after",
        [False, True],
    )
    def test_not_reentrant_around_layers(self, before_and_after: bool):
        def segment(layers: nn.ModuleList, hidden: torch.Tensor) -> torch.Tensor:
            if before_and_after:
                return functional.gelu(forward(layers, hidden.sin()))
            return forward(layers, hidden)

        def run(layers: nn.ModuleList) -> Result:
            hidden = batch().requires_grad_()
            layers.zero_grad()
            output = hidden
            for i in range(0, len(layers), 2):
                here = layers[i : i + 2]
                output = checkpoint(lambda x, here=here: segment(here, x), output, use_reentrant=False)
            loss = loss_of(output)
            loss.backward()
            return Result([loss.detach()], [hidden.grad, *(parameter.grad for parameter in layers.parameters())])

        plain, swapped = plain_and_swapped(stack(6), run)
        assert swapped.same_as(plain)


class TestBackwardAskedForOtherwise:
    def test_a_second_backward_over_a_retained_graph(self):
        def run(layers: nn.ModuleList) -> Result:
            layers.zero_grad()
            hidden = batch().requires_grad_()
            loss = loss_of(forward(layers, hidden))
            loss.backward(retain_graph=True)
            first = [parameter.grad.clone() for parameter in layers.parameters()]
            loss.backward(retain_graph=True)
            loss.backward()
            second = [parameter.grad for parameter in layers.parameters()]
            return Result([loss.detach()], [*first, hidden.grad, *second])

        for device in (None, LazyDevice()):
            plain, swapped = plain_and_swapped(stack(5), run, device=device, verify=True)
            assert swapped.same_as(plain)

    def test_gradients_of_some_parameters_only_then_of_all(self):
        def run(layers: nn.ModuleList) -> Result:
            hidden = batch().requires_grad_()
            loss = loss_of(forward(layers, hidden))
            some = [layers[3].mlp.linear_fc2.weight, layers[1].norm1.weight]
            first = torch.autograd.grad(loss, some, retain_graph=True)
            second = torch.autograd.grad(loss, [hidden, *layers.parameters()])
            return Result([loss.detach()], [*first, *second])

        plain, swapped = plain_and_swapped(stack(5), run, device=LazyDevice())
        assert swapped.same_as(plain)

    def test_gradients_of_gradients(self):
        def run(layers: nn.ModuleList) -> Result:
            hidden = batch(dtype=torch.float64).requires_grad_()
            output = forward(layers, hidden).square().mean()
            (grad,) = torch.autograd.grad(output, hidden, create_graph=True)
            (second,) = torch.autograd.grad(grad.square().sum(), hidden)
            return Result([output.detach()], [grad.detach(), second])

        plain, swapped = plain_and_swapped(stack(4, dtype=torch.float64), run)
        assert swapped.same_as(plain)

    def test_frozen_layers_and_inputs_without_gradient(self):
        def run(layers: nn.ModuleList) -> Result:
            layers.zero_grad()
            for parameter in layers[:2].parameters():
                parameter.requires_grad_(False)
            for layer in layers[2:]:
                layer.norm1.weight.requires_grad_(False)
            loss = loss_of(forward(layers, batch()))
            loss.backward()
            return Result([loss.detach()], [parameter.grad for parameter in layers.parameters()])

        plain, swapped = plain_and_swapped(stack(6), run, device=LazyDevice())
        assert swapped.same_as(plain)

    def test_a_hook_that_reads_what_backward_passes(self):
        def run(layers: nn.ModuleList) -> Result:
            seen: list[torch.Tensor] = []
            hidden = batch().requires_grad_()
            for layer in layers:
                hidden = layer(hidden)
                hidden.register_hook(lambda grad: seen.append(grad.clone()))
            loss = loss_of(hidden)
            loss.backward()
            return Result([loss.detach()], seen)

        plain, swapped = plain_and_swapped(stack(4), run)
        assert swapped.same_as(plain)


class TestInPlaceChangeAfterSaving:
    @staticmethod
    def changes(how: Callable[[torch.Tensor], object], source: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
        def function(hidden: torch.Tensor, layer: Lambda) -> torch.Tensor:
            saved = source(hidden)
            output = saved.sin() + hidden
            if layer.note.get("bad"):
                how(saved)
            return output

        return function

    @pytest.mark.parametrize("commit_bytes", [1 << 24, 1], ids=["before the commit", "after the commit"])
    @pytest.mark.parametrize(
        "how",
        [lambda x: x.add_(1), lambda x: x[1:3].zero_(), lambda x: x.detach().mul_(2)],
        ids=["whole", "view", "detached"],
    )
    @pytest.mark.parametrize("source", [lambda x: x * 1, torch.exp], ids=["input saved", "output saved"])
    def test_raises_as_plain_autograd_does_and_names_the_site(self, how, source, commit_bytes: int):
        layers = stack(4, lambda: Lambda(self.changes(how, source)))
        layers[1].note["bad"] = True
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss_of(forward(layers, batch())).backward()
        with Engine(layers, commit_bytes=commit_bytes, device=LazyDevice()) as engine:
            for _ in range(2):
                with pytest.raises(RuntimeError, match=r"layers\.1/layer/\d.*modified by an inplace"):
                    loss_of(forward(layers, batch())).backward()
            layers[1].note["bad"] = False
            assert train_step(layers, one_after_the_other(1)).grads[0].isfinite().all()
            assert not engine.device.violations

    @pytest.mark.parametrize("swapped", [[0], [0, 1]], ids=["layer stays", "too small"])
    def test_raises_also_where_the_tensor_stays(self, swapped: list[int]):
        layers = stack(4, lambda: Lambda(self.changes(lambda x: x.add_(1), lambda x: x * 1)))
        layers[1].note["bad"] = True
        with (
            Engine(layers, swapped, min_bytes=1 << 20),
            pytest.raises(RuntimeError, match="modified by an inplace"),
        ):
            loss_of(forward(layers, batch())).backward()

    def test_a_change_in_a_later_layer_before_the_release_raises(self):
        def keep(hidden: torch.Tensor, layer: Lambda) -> torch.Tensor:
            layer.note["saved"] = hidden * 1
            return layer.note["saved"].sin()

        layers = stack(5, lambda: Lambda(keep))
        with Engine(layers, device=LazyDevice()):
            hidden = forward(layers[:2], batch())
            layers[1].note["saved"].add_(1)
            hidden = forward(layers[2:], hidden)
            with pytest.raises(RuntimeError, match=r"layers\.1/layer/0.*version 1, autograd saved it at version 0"):
                loss_of(hidden).backward()

    def test_a_change_before_the_next_save_belongs_to_the_next_save(self):
        def twice(hidden: torch.Tensor, _: Lambda) -> torch.Tensor:
            base = hidden * 1
            first = base.detach() * hidden  # saves the values of now
            base = base.mul(2)
            base.add_(1)
            return first + base.sin()

        plain, swapped = plain_and_swapped(
            stack(4, lambda: Lambda(twice)), lambda layers: train_step(layers, one_after_the_other(2)), commit_bytes=1
        )
        assert swapped.same_as(plain)

    def test_a_change_after_a_save_that_backward_does_not_use_is_no_error(self):
        def unused(hidden: torch.Tensor, _: Lambda) -> torch.Tensor:
            base = hidden * 1
            not_used = base.sin()
            base.add_(1)
            result = base.cos()  # the second saved tensor on the storage
            del not_used
            return result

        plain, swapped = plain_and_swapped(
            stack(4, lambda: Lambda(unused)), lambda layers: train_step(layers, one_after_the_other(2))
        )
        assert swapped.same_as(plain)


def test_a_parameter_that_a_node_has_made_is_kept_as_an_alias():
    """The node that saves its own output would hold itself."""
    made = nn.Parameter(torch.ones(3), requires_grad=False)
    made.mul_(torch.ones(3, requires_grad=True))
    leaf = nn.Parameter(torch.ones(3))
    packed, of_leaf = keep(made), keep(leaf)
    assert isinstance(packed, KeptTensor)
    assert packed.tensor.grad_fn is None
    assert isinstance(of_leaf, KeptTensor)
    assert of_leaf.tensor is leaf


class TestWithoutGradients:
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_nothing_is_swapped_and_training_goes_on(self, mode: Callable):
        layers = stack(4)
        plain = train_step(copy.deepcopy(layers), one_after_the_other(2))
        with Engine(layers) as engine:
            with mode():
                expected = forward(layers, batch())
            assert engine.counters.out_bytes == engine.num_leases == 0
            assert train_step(layers, one_after_the_other(2)).same_as(plain)
            before = engine.counters.out_bytes
            with mode():
                assert torch.equal(forward(layers, batch()), expected)
            assert engine.counters.out_bytes == before
            assert train_step(layers, one_after_the_other(2)).same_as(plain)

    def test_evaluation_between_forward_and_backward(self):
        def run(layers: nn.ModuleList) -> Result:
            layers.zero_grad()
            loss = loss_of(forward(layers, batch()))
            with torch.no_grad():
                forward(layers, batch(1))
            loss.backward()
            return Result([loss.detach()], [parameter.grad for parameter in layers.parameters()])

        plain, swapped = plain_and_swapped(stack(4), run)
        assert swapped.same_as(plain)


class TestBoundary:
    def test_outputs_and_inputs_are_no_views(self):
        seen = []

        def look(hidden: torch.Tensor, _: Lambda) -> torch.Tensor:
            seen.append(hidden._base)
            return hidden

        layers = nn.ModuleList([Lambda(look)])
        layers[0].linear = nn.Identity()
        with Engine(layers):
            output = layers[0](batch().requires_grad_())
        assert output._base is None
        assert seen == [None]
        assert output.requires_grad

    def test_hidden_states_as_keyword_and_results_in_a_tuple(self):
        class Pair(Layer):
            def forward(self, attention_mask=None, *, hidden_states):
                assert attention_mask is None
                return super().forward(hidden_states), None

        def run(layers: nn.ModuleList) -> Result:
            layers.zero_grad()
            hidden = batch()
            for layer in layers:
                hidden, context = layer(None, hidden_states=hidden)
                assert context is None
            loss = loss_of(hidden)
            loss.backward()
            return Result([loss.detach()], [parameter.grad for parameter in layers.parameters()])

        plain, swapped = plain_and_swapped(stack(4, Pair), run)
        assert swapped.same_as(plain)

    def test_remove_gives_every_layer_its_own_forward_back(self):
        layers = stack(3)
        with Engine(layers):
            assert all("forward" in vars(layer) for layer in layers)
        assert not any("forward" in vars(layer) for layer in layers)
        assert not any(module._forward_hooks for module in layers.modules())

    @pytest.mark.parametrize("verify", [False, True])
    def test_parts_of_a_storage_that_are_written_after_its_copy_began(self, verify: bool):
        layers = stack(5, lambda: Lambda(unsafe_chunks))
        step = lambda layers: train_step(layers, one_after_the_other(2))  # noqa: E731
        plain, swapped = plain_and_swapped(
            layers, step, num_steps=3, device=PromptDevice(), commit_bytes=1 << 24 if verify else 1, verify=verify
        )
        assert swapped.same_as(plain)

    def test_parameters_stay_also_when_they_move_after_the_boundary_was_put_up(self):
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

    def test_what_is_no_plain_device_memory_stays(self):
        cpu = torch.device("cpu")
        assert not is_ineligible(torch.ones(2), cpu)
        for tensor in (
            nn.Parameter(torch.ones(2)),
            torch.ones(2, device="meta"),
            torch.ones(2).to_sparse(),
            torch.ones(2, dtype=torch.complex64).conj(),
            torch.ones(2, dtype=torch.complex64).conj().imag,
            torch.ones(0),
            torch.ones(2, 0, 3),
        ):
            assert is_ineligible(tensor, cpu)
