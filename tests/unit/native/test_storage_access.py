"""Storages that refuse access, with real operators of torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.swap.native.build import load
from tests.unit.native.helpers import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER

MESSAGE = "layers.3/mlp/0 is on disk: wait for it first"


@pytest.fixture
def native() -> Any:
    found = load()
    assert found is not None
    return found


def tensor() -> torch.Tensor:
    return torch.arange(24, dtype=torch.float32).reshape(4, 6)


USES: dict[str, Callable[[torch.Tensor], object]] = {
    "read": lambda x: x + 1,
    "sum": lambda x: x.sum(),
    "matmul": lambda x: x @ x.t(),
    "item": lambda x: x[0, 0].item(),
    "write": lambda x: x.add_(1),
    "copy into": lambda x: x.copy_(torch.ones(4, 6)),
    "out=": lambda x: torch.add(torch.ones(4, 6), 1, out=x),
    "a view, written": lambda x: x.view(24)[3:].mul_(2),
    "an alias": lambda x: x.detach().exp(),
    "data_ptr": lambda x: x.data_ptr(),
    "numpy": lambda x: x.numpy(),
    "tolist": lambda x: x.tolist(),
    "cat": lambda x: torch.cat([x, torch.ones(1, 6)]),
    "dlpack": lambda x: torch.from_dlpack(x),
}
MAKE_VIEWS = {"matmul", "item", "a view, written"}


@pytest.mark.parametrize("is_emptied", [False, True], ids=["full", "emptied"])
def test_every_use_is_refused_and_works_again(native: Any, is_emptied: bool) -> None:
    for name, use in USES.items():
        given = tensor()
        view = given[1:, :3]
        storage = given.untyped_storage()
        num_bytes = storage.nbytes()
        if is_emptied:
            storage.resize_(0)
        native.refuse(storage._cdata, MESSAGE)
        # Torch refuses a new view of an empty storage before its bytes are read.
        said = f"{MESSAGE}|out of bounds for storage of size 0" if is_emptied and name in MAKE_VIEWS else MESSAGE
        for _ in range(2):
            with pytest.raises(RuntimeError, match=said):
                use(given)
        with pytest.raises(RuntimeError, match=MESSAGE):
            view.neg()
        native.allow(storage._cdata)
        if is_emptied:
            storage.resize_(num_bytes)
            given.copy_(tensor())
        assert torch.equal(view, tensor()[1:, :3]), name
        given.mul_(2)
        assert torch.equal(view, 2 * tensor()[1:, :3]), name
        assert given.resize_(100, 10).fill_(1).sum() == 1000, name
        use(given.resize_(4, 6))


def test_what_needs_no_bytes_is_allowed_and_the_message_is_that_of_the_last_refusal(native: Any) -> None:
    given = tensor()
    address = given.untyped_storage()._cdata
    native.refuse(address, "first")
    native.refuse(address, "second")
    assert (given.shape, given.t().stride(), given.untyped_storage().nbytes()) == ((4, 6), (1, 6), 96)
    with pytest.raises(RuntimeError, match="second"):
        given.sum()
    native.allow(address)
    native.allow(address)
    assert given.sum() == 276
    for call in (native.allow, lambda address: native.refuse(address, MESSAGE)):
        with pytest.raises(ValueError, match="storage_impl=0"):
            call(0)


def test_others_are_left_alone(native: Any) -> None:
    given = tensor()
    native.allow(given.untyped_storage()._cdata)
    copied = torch._lazy_clone(given)  # copy on write: its storage has a check of its own
    native.refuse(copied.untyped_storage()._cdata, MESSAGE)
    native.allow(copied.untyped_storage()._cdata)
    copied.add_(1)
    assert torch.equal(given, tensor())
    assert torch.equal(copied, tensor() + 1)
