"""Kinds of tensors without plain memory, function transforms, and other saved-tensor hooks: equal, or refused in words.

Each kind is tried by itself with layers that are offloaded, and all of them in one model within a budget.
"""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron import swap
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.nn import functional

from megatron.swap.common.types import UsageError
from tests.plain_loop import ALL, WIDTH, Mlp, assert_equal, loss_of, mlps, rows, train
from tests.planned_loop import QUIET

NUM_STEPS = 12
"""Seven are measured; then plans are tried."""
ROLLED = torch.eye(16).roll(1, 0)
OFFSETS = [0, 5, 12, 16]


class Layer(nn.Module):
    """A layer that computes something of its own."""

    def __init__(self, does: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(WIDTH, WIDTH), does

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.does(self.linear(hidden)).tanh()


class Custom(torch.autograd.Function):
    """Saves a tensor that its backward does not read."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(saved)
        ctx.num_bytes = saved.untyped_storage().nbytes()
        return 2 * hidden

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (saved,) = ctx.saved_tensors
        assert saved.untyped_storage().nbytes() == ctx.num_bytes
        return 2 * gradient, None


def jagged(hidden: torch.Tensor) -> torch.Tensor:
    ragged = torch.nested.nested_tensor_from_jagged(hidden, torch.tensor(OFFSETS))
    return (functional.gelu(ragged) * ragged).values()


def nested(hidden: torch.Tensor) -> torch.Tensor:
    ragged = functional.gelu(torch.nested.as_nested_tensor([hidden[:5], hidden[5:]]))
    return torch.cat(ragged.unbind())


def emptied(hidden: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty_like(hidden)
    tensor.untyped_storage().resize_(0)
    return Custom.apply(hidden, tensor)


def complex_views(hidden: torch.Tensor) -> torch.Tensor:
    both = torch.complex(hidden, hidden.flip(0))
    return (both.tanh() * both.conj()).conj().imag.sin()


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse": lambda hidden: torch.sparse.mm(ROLLED.to_sparse(), hidden),
    "compressed": lambda hidden: ROLLED.to_sparse_csr() @ hidden,
    "jagged": jagged,
    "nested": nested,
    "zero": lambda hidden: 2 * hidden + hidden * torch._efficientzerotensor(16, WIDTH),
    "MKL-DNN's": lambda hidden: torch.relu(hidden.to_mkldnn()).to_dense(),
    "quantized": lambda hidden: Custom.apply(hidden, torch.quantize_per_tensor(hidden, 0.1, 0, torch.qint8)),
    "on the meta device": lambda hidden: Custom.apply(hidden, torch.empty(10**6, device="meta")),
    "emptied": emptied,
    "complex": complex_views,
    "vmap": torch.func.vmap(lambda row: row.sin() * row),
    "functional": torch.func.functionalize(lambda hidden: hidden.sin() * hidden),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind(kind: str) -> None:
    assert_equal(lambda: nn.Sequential(*(Layer(KINDS[kind]) for _ in range(4))))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_all_kinds_within_a_budget() -> None:
    torch.manual_seed(7)
    assert_planned_equal(nn.Sequential(*map(Layer, KINDS.values())))


def assert_planned_equal(model: nn.Module, backward: Any = None, num_steps: int = NUM_STEPS) -> swap.Stats:
    """Check that training within a large budget is equal to training without, and reaches a plan."""
    plain = train(copy.deepcopy(model), rows, num_steps, backward)
    with swap.activations(model, memory_gib=1.0, **QUIET) as swapped:
        assert train(model, rows, num_steps, backward).same_as(plain)
        assert swapped.plan().startswith("no plan yet") is False
        return swapped.stats()


def jvp(model: nn.Module, hidden: torch.Tensor, step: int) -> torch.Tensor:
    output, tangent = torch.func.jvp(model, (hidden,), (torch.ones_like(hidden),))
    loss = loss_of(output - tangent.detach())
    loss.backward()
    return loss


def vmap(model: nn.Module, hidden: torch.Tensor, step: int) -> torch.Tensor:
    loss = loss_of(torch.func.vmap(model)(hidden[:, None]))
    loss.backward()
    return loss


def jvp_and_plain(model: nn.Module, hidden: torch.Tensor, step: int) -> torch.Tensor:
    """A layer that is recomputed whole in other steps must not be in this one."""
    return jvp(model, hidden, step) if step % 3 == 0 else plain(model, hidden, step)


def plain(model: nn.Module, hidden: torch.Tensor, step: int) -> torch.Tensor:
    loss = loss_of(model(hidden))
    loss.backward()
    return loss


BACKWARDS = [jvp, vmap, jvp_and_plain]


@pytest.mark.parametrize("backward", BACKWARDS)
def test_layers_inside_a_transform(backward: Any) -> None:
    assert_equal(mlps, backward=backward)
    torch.manual_seed(7)
    assert_planned_equal(mlps(4), backward)


def test_a_graph_of_subclasses_that_is_dropped_is_freed() -> None:
    model, counts = nn.Sequential(*(Layer(jagged) for _ in range(3))), []
    with swap.activations(model, **ALL):
        for step in range(3):
            model(rows(step))
            gc.collect()
            counts.append(sum(isinstance(one, torch.Tensor) for one in gc.get_objects()))
    assert counts[1] == counts[2]


# ------------------------------------------------------------------------------------------------ other hooks


def in_16_bits(tensor: torch.Tensor) -> Any:
    return (tensor.dtype, tensor.bfloat16()) if tensor.is_floating_point() else (tensor.dtype, tensor)


HOOKS: dict[str, Callable[[], Any]] = {
    "what is no tensor": lambda: saved_tensors_hooks(in_16_bits, lambda packed: packed[1].to(packed[0])),
    "another tensor": lambda: saved_tensors_hooks(lambda tensor: 0.5 * tensor, lambda tensor: tensor),
    "the same tensor": lambda: saved_tensors_hooks(lambda tensor: tensor, lambda tensor: 0.5 * tensor),
    "on the CPU": save_on_cpu,
}


@pytest.mark.parametrize("is_within", [False, True])
@pytest.mark.parametrize("hooks", HOOKS)
def test_hooks_of_the_user(hooks: str, is_within: bool) -> None:
    """Around the model they get each tensor first; inside a layer they alone do."""

    class Hooked(Mlp):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            with HOOKS[hooks]():
                return super().forward(hidden)

    def backward(model: nn.Module, hidden: torch.Tensor, step: int) -> torch.Tensor:
        with HOOKS[hooks]():
            loss = loss_of(model(hidden))
        loss.backward()
        return loss

    torch.manual_seed(7)
    model = nn.Sequential(*(Hooked() for _ in range(4))) if is_within else mlps(4)
    step = None if is_within else backward
    plain = train(copy.deepcopy(model), backward=step)
    copied = copy.deepcopy(model)
    with swap.activations(copied, **ALL) as swapped:
        assert train(copied, backward=step).same_as(plain)
        assert (swapped.stats().out_bytes > 0) is (not is_within and hooks in ("another tensor", "the same tensor"))
    assert_planned_equal(model, step)


@pytest.mark.parametrize("backward", ["torch.func.grad", "disabled"])
def test_layers_where_autograd_calls_no_hooks(backward: str) -> None:
    def functional_step(model: nn.Module, hidden: torch.Tensor, step: int) -> torch.Tensor:
        weights = dict(model.named_parameters())
        called = lambda weights: loss_of(torch.func.functional_call(model, weights, (hidden,)))  # noqa: E731
        gradients, loss = torch.func.grad_and_value(called)(weights)
        for name, weight in weights.items():
            weight.grad = gradients[name]
        return loss

    def disabled_step(model: nn.Module, hidden: torch.Tensor, step: int) -> torch.Tensor:
        with disable_saved_tensors_hooks("none here"):
            return plain(model, hidden, step)

    step = functional_step if backward == "torch.func.grad" else disabled_step
    model = mlps(3)
    expected = train(copy.deepcopy(model), backward=step)
    with swap.activations(model, **ALL) as swapped:
        assert train(model, backward=step).same_as(expected)
        assert swapped.stats().out_bytes == 0
    with (
        swap.activations(model, memory_gib=1.0, **QUIET),
        pytest.raises(UsageError, match=r"the layers run where PyTorch calls no .* by backward\(\) or"),
    ):
        train(model, backward=step)
