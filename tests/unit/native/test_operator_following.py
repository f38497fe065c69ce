"""The C++ that follows operators sees what a dispatch mode sees, and changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.swap.native.operator_following import Following, load_operators
from megatron.swap.operators.following import _resolve
from megatron.swap.operators.kinds import Kind, kind_of

aten = torch.ops.aten
VALUE = torch.arange(12.0).view(3, 4)


@pytest.fixture(scope="module")
def native() -> Any:
    operators = load_operators()
    if operators is None:
        pytest.skip("needs a compiler")
    return operators


class Seen(TorchDispatchMode):
    """Notes operators, their arguments and their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if kind_of(func) is not Kind.IGNORED:
            self.calls.append((func, args, kwargs or {}, result))
        return result


class Followed:
    """A run that is followed along ``operators``, or without a sequence; notes the reports."""

    def __init__(self, native: Any, operators: list[Any] | None, wanted: list[bool] | None = None) -> None:
        sequence = None
        if operators is not None:
            names = [(one._schema.name, one._schema.overload_name) for one in operators]
            sequence = native.Sequence(names, [True] * len(names) if wanted is None else wanted)
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.following: Following = native.Following(sequence, lambda *call: self.calls.append(call), _resolve)

    def __enter__(self) -> Followed:
        self.following.begin()
        return self

    def __exit__(self, *error: object) -> None:
        self.following.end()

    def __getattr__(self, name: str) -> bool:
        return getattr(self.following, name)

    @property
    def names(self) -> list[Any]:
        return [call[0] for call in self.calls]


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        yield from leaves([value[key] for key in sorted(value)])
    else:
        yield value


def mixed(value: torch.Tensor) -> torch.Tensor:
    """Options, lists, several results, optional tensors, a scalar, a type, operators that call others, views."""
    parts = torch.cat([value, value.t().reshape(3, 4)], dim=1).to(torch.float64)
    normed = torch.nn.functional.layer_norm(parts, (8,), None, torch.ones(8, dtype=torch.float64))
    most, _ = normed.max(dim=1, keepdim=True)
    near = torch.where(normed > most - 1, normed, 0.5).add(most, alpha=2)
    return near.sum([0, 1], dtype=torch.float32) + torch.zeros((), dtype=torch.float32)


def test_what_is_reported_is_what_a_mode_sees(native: Any) -> None:
    with Seen() as seen:
        expected = mixed(VALUE)
    operators = [call[0] for call in seen.calls]
    for sequence, names in ((None, operators), (operators, [*range(len(operators))])):
        with Followed(native, sequence) as followed:
            result = mixed(VALUE)
        assert followed.saw_all
        assert followed.is_as_expected is (sequence is not None)
        assert torch.equal(result, expected)
        assert followed.names == names
        for (operator, args, options, made), (_, *given, reported) in zip(seen.calls, followed.calls, strict=True):
            again = operator(*given[0], **given[1])
            for one, other in zip(leaves(again), leaves(operator(*args, **options)), strict=True):
                assert torch.equal(one, other)
                assert one.dtype is other.dtype
            assert [type(one) for one in leaves(reported)] == [type(one) for one in leaves(made)]
            assert len(given[0]) == len(args)
            assert {*given[1]} == {*options}


def test_tensors_are_those_of_the_caller(native: Any) -> None:
    weight = torch.ones(4, requires_grad=True)
    with Followed(native, [aten.mul.Tensor, aten.exp.default]) as followed:
        made = (VALUE * weight).exp()
    ((_, (first, second), _, _), (_, _, _, last)) = followed.calls
    assert first is VALUE
    assert second is weight
    assert last.data_ptr() == made.data_ptr()
    made.sum().backward()
    assert torch.equal(weight.grad, VALUE.exp().mul(VALUE).sum(0))  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [lambda: VALUE.cos(), lambda: VALUE.clone().mul_(2), lambda: None])
def test_other_operators_are_noticed(native: Any, other: Callable[[], object]) -> None:
    with Followed(native, [aten.exp.default, aten.sin.default]) as followed:
        VALUE.exp()
        other()
        if other() is not None:
            VALUE.sin()
    assert not followed.is_as_expected
    assert followed.names == [0]


def test_only_wanted_operators_are_reported_and_those_of_a_report_and_unfollowed_ones_do_not_count(
    native: Any,
) -> None:
    with Followed(native, [aten.exp.default] * 4, [False, True, False, True]) as followed:
        for _ in range(4):
            with native.Following.unseen():
                VALUE.cos()
            VALUE.exp()
    assert followed.names == [1, 3]
    assert followed.is_as_expected
    reports = []
    following = native.Following(
        native.Sequence([("aten::exp", "")], [True]), lambda *_: reports.append(VALUE.cos().sin()), _resolve
    )
    following.begin()
    VALUE.exp()
    following.end()
    assert (following.is_as_expected, len(reports)) == (True, 1)


def test_an_error_in_a_report_comes_out_of_the_operator(native: Any) -> None:
    def fail(*_: object) -> None:
        raise KeyError("of a report")

    following = native.Following(native.Sequence([("aten::exp", "")], [True]), fail, _resolve)
    following.begin()
    try:
        with pytest.raises(KeyError, match="of a report"):
            VALUE.exp()
    finally:
        following.end()
    VALUE.exp()


def test_other_threads_are_not_followed_and_runs_nest(native: Any) -> None:
    with Followed(native, [aten.exp.default, aten.sin.default]) as outer:
        thread = threading.Thread(target=lambda: VALUE.cos())
        thread.start()
        thread.join()
        VALUE.exp()
        with Followed(native, [aten.cos.default]) as inner:
            VALUE.cos()
        VALUE.sin()
    assert inner.is_as_expected
    assert outer.is_as_expected


def test_modes_of_the_layer_are_noticed_and_those_around_it_are_none_of_its(native: Any) -> None:
    """Behind a mode that begins within the layer arguments may be others than those that are seen here."""
    for operators in (None, [aten.exp.default, aten.sin.default]):
        with Followed(native, operators) as followed:
            VALUE.exp()
            with Seen():
                VALUE.sin()
        assert not followed.saw_all
        assert not followed.is_as_expected
        assert len(followed.calls) == 1
        with Seen() as seen, Followed(native, operators) as followed:
            VALUE.exp()
            VALUE.sin()
        assert followed.saw_all
        assert len(followed.calls) == len(seen.calls) == 2


def test_an_operator_that_fails_does_not_count(native: Any) -> None:
    five = torch.ones(5)
    with Followed(native, [aten.add.Tensor, aten.exp.default]) as followed:
        with pytest.raises(RuntimeError, match="size of tensor a"):
            VALUE + five
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            VALUE @ VALUE  # not even expected
        VALUE.add(VALUE).exp()
    assert followed.is_as_expected
    assert followed.names == [0, 1]


def test_a_gradient_within_the_run_is_noticed(native: Any) -> None:
    """Autograd adds gradients in place where nobody else holds them: its operators are not always the same."""
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * 2).sum()
    with Followed(native, None) as followed:
        VALUE.exp()
        loss.backward()
    assert not followed.saw_all
    assert followed.names[:1] == [aten.exp.default]
