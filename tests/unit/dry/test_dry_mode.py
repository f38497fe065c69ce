"""Operators on the dry device: values that follow from shapes, sums of gradients, and what is remembered of calls."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron.swap.common.types import UsageError
from megatron.swap.devices.dry import DryDevice
from megatron.swap.dry import mode as dry_mode
from megatron.swap.dry.autocast import DryAutocast
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


FP32, BF16 = torch.float32, torch.bfloat16


def made(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(4, 4, dtype=dtype, device="meta", requires_grad=True)


TYPES: tuple[tuple[Any, torch.dtype | None], ...] = (
    (lambda x: x @ x, BF16),
    (lambda x: functional.linear(x, x, x[0]), BF16),
    (lambda x: torch.addmm(x, x, x), BF16),
    (lambda x: torch.bmm(x[None], x[None]), BF16),
    (lambda x: torch.einsum("ij,jk->ik", x, x), BF16),
    (lambda x: x.softmax(-1), FP32),
    (lambda x: functional.layer_norm(x, (4,)), FP32),
    (lambda x: x.pow(2), FP32),
    (lambda x: x.sum(), FP32),
    (lambda x: functional.cross_entropy(x, torch.empty(4, dtype=torch.long, device="meta")), FP32),
    (lambda x: x + x, None),
    (functional.silu, None),
)


def test_types() -> None:
    autocast = DryAutocast()
    for given in (FP32, BF16, FP32):  # every step enters it again
        with autocast.entered(), autocast.forward():
            for function, dtype in TYPES:
                assert function(made(given)).dtype == (dtype or given)
    assert (made(FP32) @ made(FP32)).dtype == FP32


@pytest.mark.parametrize(("has_cache", "num_casts"), [(True, 1), (False, 2)])
def test_a_weight_is_cast_once_in_forward_by_the_cache(has_cache: bool, num_casts: int) -> None:
    autocast, weight = DryAutocast(), made(FP32)
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.untyped_storage()._cdata)
        return tensor

    with autocast.entered(), autocast.forward(), torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        inputs = made(BF16)
        torch.set_autocast_cache_enabled(has_cache)
        try:
            functional.linear(functional.linear(inputs, weight), weight)
        finally:
            torch.set_autocast_cache_enabled(True)
    assert len(kept) == 4
    assert len(set(kept)) == 2 + num_casts  # the input, the output of the first, and casts


def test_a_recomputation_in_backward_is_cast_too() -> None:
    autocast, weight, seen = DryAutocast(), made(FP32), []

    def part(inputs: torch.Tensor) -> torch.Tensor:
        result = functional.linear(inputs, weight)
        seen.append(result.dtype)
        return result.pow(2)  # which saves it, so that all of this runs again

    with autocast.entered():
        with autocast.forward():
            loss = checkpoint(part, made(FP32), use_reentrant=False).sum()
        loss.backward()
        assert (weight.detach() @ weight.detach()).dtype == FP32  # outside forward nothing is cast
    assert seen == [BF16, BF16]
    assert weight.grad is not None
    assert weight.grad.dtype == FP32
