"""Operators on the dry device: values that follow from shapes, sums of gradients, and what is remembered of calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.swap.common.types import UsageError
from megatron.swap.devices.dry import DryDevice
from megatron.swap.dry import mode as dry_mode
from megatron.swap.dry.mode import dry_run
from megatron.swap.dry.steps import dry_step
from megatron.swap.engine.overrides import in_backward
from megatron.swap.forecast.gpus import GPUS

transformers = pytest.importorskip("transformers", reason="requirements-dev.txt has it")
from megatron.swap.dry.config_model import Training, model_of, step_of  # noqa: E402

H200 = GPUS["h200"]


@pytest.fixture
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_mode, "_makes_new_tensors", lambda _: False)


def test_values_that_follow_from_shapes_are_known() -> None:
    with dry_run(DryDevice("a GPU"), H200):
        positions = torch.arange(5, device="meta")[None].expand(2, -1)
        assert bool((torch.diff(positions) == 1).all())
        assert int(positions[1, -1]) == 4
        positions = positions.clone()
        positions[0, 0] = 7  # the values are not followed through changes
        with pytest.raises(UsageError, match="depends on its tokens or weights"):
            int(positions[0, 0])


def added_gradients(loss_of: Callable[[torch.Tensor], torch.Tensor], **options: bool) -> list[str]:
    """Return the names of the operators that add tensors of some size in backward."""
    added: list[str] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(func.overloadpacket).removeprefix("aten.")
            added.extend([name] if name in ("add", "add_") and in_backward() and args[0].numel() > 2 else [])
            return func(*args, **(kwargs or {}))

    device = DryDevice("a GPU")
    with Noting(), dry_run(device, H200):
        loss_of(torch.empty(64, 64, device="meta", requires_grad=True) * 1).backward(**options)
    return added


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.usefixtures("nothing_remembered")  # a call that is remembered is not seen
def test_gradients_that_only_autograd_holds_are_added_in_place() -> None:
    assert added_gradients(lambda x: (x.sin() + x.cos() + x.exp()).sum()) == ["add_", "add_"]
    assert added_gradients(lambda x: (x + x.sin()).sum()) == ["add"]  # the sum's gradient is another input's, too
    assert added_gradients(lambda x: (x.sin() + x.cos()).sum(), create_graph=True) == ["add"]
    assert added_gradients(lambda x: torch.atan2(x[:, :1], x).sum()).count("add_") < 2  # not a derivative's own sum
    assert added_gradients(lambda x: x.sum() + x.sum()) == ["add"]  # expanded


def test_steps_are_the_same_without_what_is_remembered(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    config = transformers.Qwen3Config(
        num_hidden_layers=2, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=1000,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    training = Training(512, 2, "mixed", "adamw")
    steps = []
    for remembers in (True, False):
        if not remembers:
            request.getfixturevalue("nothing_remembered")
        model = model_of(tmp_path, training)
        steps.append(dry_step(model, step_of(model, training), H200))
    assert steps[0] == steps[1]


class Subclass(torch.Tensor):
    """A tensor whose operators return such tensors."""


def test_types_of_results_are_those_of_the_call() -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with dry_run(DryDevice("a GPU"), H200):
        assert [meta(4).cos().dtype, meta(4, dtype=torch.bfloat16).cos().dtype] == [torch.float32, torch.bfloat16]
        assert [type(each.sin()) for each in (meta(4), meta(4).as_subclass(Subclass), meta(4))] == [
            torch.Tensor, Subclass, torch.Tensor
        ]  # fmt: skip
        whole = meta(4, dtype=torch.int64)
        assert (whole / 2).dtype is torch.float32
        torch.set_default_dtype(torch.bfloat16)
        try:
            assert (whole / 2).dtype is torch.bfloat16
        finally:
            torch.set_default_dtype(torch.float32)
        assert (whole * 2).dtype is torch.int64
        assert (whole * 2.0).dtype is torch.float32
        views = [meta(4, 4).t().contiguous().view(2, 8) for _ in range(2)]
        assert [each.stride() for each in views] == [(8, 1), (8, 1)]
