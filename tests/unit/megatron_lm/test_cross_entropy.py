"""Cross entropy in chunks: Megatron's losses and gradients to the bit, and never all logits in single precision."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

from megatron.swap.megatron_lm import cross_entropy, loss_kernels
from megatron.swap.profiling.observer import Observer

LENGTH, BATCH, HIDDEN, VOCABULARY = 100, 3, 16, 1000
ROWS = 64

chunked_cross_entropy = cross_entropy.chunked_cross_entropy(vocab_parallel_cross_entropy)


@pytest.fixture(autouse=True)
def few_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "gpu" not in request.keywords:
        monkeypatch.setattr(cross_entropy, "LOSS_ROWS", ROWS)


class Made:
    """A projection on words, with gradients from its losses."""

    def __init__(
        self,
        loss_of: Callable[..., torch.Tensor],
        group: Any,
        dtype: torch.dtype = torch.bfloat16,
        length: int = LENGTH,
        vocabulary: int = VOCABULARY,
        device: str = "cpu",
    ) -> None:
        chance = torch.Generator(device).manual_seed(1)
        hidden = torch.randn(length, BATCH, HIDDEN, generator=chance, device=device).to(dtype)
        self.weight = torch.randn(vocabulary, HIDDEN, generator=chance, device=device).to(dtype).requires_grad_()
        target = torch.randint(vocabulary, (length, BATCH), generator=chance, device=device)
        self.factors = 1e3 * torch.randn(length, BATCH, generator=chance, device=device)
        self.logits = torch.nn.functional.linear(hidden, self.weight)
        self.address = self.logits.data_ptr()
        self.gradients: list[torch.Tensor] = []
        self.logits.register_hook(self.gradients.append)
        self.loss = loss_of(self.logits, target, 0.0, group)

    def backward(self, **options: Any) -> torch.Tensor:
        """Return the gradient of the logits after all other references to them are gone."""
        del self.logits
        return self.backward_beside(**options)

    def backward_beside(self, **options: Any) -> torch.Tensor:
        """Return the gradient of the logits while they are still referenced."""
        (self.loss * self.factors).sum().backward(**options)
        return self.gradients.pop()


def assert_equal(ours: Made, theirs: Made) -> None:
    assert torch.equal(ours.loss, theirs.loss)
    assert torch.equal(ours.backward(), theirs.backward())
    assert ours.weight.grad is not None
    assert theirs.weight.grad is not None
    assert torch.equal(ours.weight.grad, theirs.weight.grad)


@pytest.mark.parametrize(
    ("dtype", "length"), [(torch.bfloat16, 1), (torch.bfloat16, LENGTH), (torch.float16, ROWS // BATCH)]
)
def test_equal_to_the_bit(group: Any, dtype: torch.dtype, length: int) -> None:
    functions = (chunked_cross_entropy, vocab_parallel_cross_entropy)
    ours, theirs = (Made(loss_of, group, dtype, length) for loss_of in functions)
    assert "_CrossEntropy" in str(ours.loss.grad_fn)
    assert "_VocabParallel" not in str(ours.loss.grad_fn)
    assert_equal(ours, theirs)


def observer() -> AbstractContextManager[Any]:
    return Observer().context(torch.nn.Module())


@pytest.mark.parametrize("around", [nullcontext, observer])
def test_the_gradient_takes_the_logits_place(group: Any, around: Callable[[], AbstractContextManager[Any]]) -> None:
    with around():
        made = Made(chunked_cross_entropy, group)
    assert made.backward().data_ptr() == made.address


@pytest.mark.parametrize("around", [nullcontext, observer])
@pytest.mark.parametrize("held", ["themselves", "alias", "graph"])
def test_logits_that_somebody_holds_stay(
    group: Any, held: str, around: Callable[[], AbstractContextManager[Any]]
) -> None:
    with around():
        made = Made(chunked_cross_entropy, group)
        others = {
            "themselves": lambda: made.logits, "alias": lambda: made.logits.detach(),
            "graph": lambda: made.logits.pow(2),
        }[held]()  # fmt: skip
    before = made.logits.clone()
    if held == "themselves":
        gradient = made.backward_beside()
        assert torch.equal(made.logits, before)
    else:
        gradient = made.backward(retain_graph=True)
    assert gradient.data_ptr() != made.address
    if held == "alias":
        assert torch.equal(others, before)
    if held == "graph":
        others.sum().backward()  # its saved tensor is as it was
        assert torch.equal(made.gradients.pop(), 2 * before)


def test_a_second_backward_is_refused(group: Any) -> None:
    """The logits are gone by then. Behind saved-tensor hooks torch does not check, not even for Megatron's own
    function."""
    made = Made(chunked_cross_entropy, group)
    made.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.backward_beside()


@pytest.mark.parametrize(("dtype", "smoothing"), [(torch.float32, 0.0), (torch.bfloat16, 0.1)])
def test_the_rest_stays_with_megatron(group: Any, dtype: torch.dtype, smoothing: float) -> None:
    given = torch.randn(4, BATCH, VOCABULARY, dtype=dtype), torch.zeros(4, BATCH, dtype=torch.long), smoothing
    original = Mock()
    replaced = cross_entropy.chunked_cross_entropy(original)
    replaced(*given, group)
    replaced(*given)  # as megatron-core 0.18 does, whose function takes no group
    for call, named in zip(original.call_args_list, ({"tp_group": group}, {}), strict=True):
        assert all(one is other for one, other in zip(call.args, given, strict=True))
        assert call.kwargs == named


@pytest.mark.gpu
@pytest.mark.parametrize("with_kernels", [True, False])
@pytest.mark.parametrize(("length", "vocabulary"), [(5461, 32000), (683, 262144)])
def test_equal_at_the_sizes_of_models(
    group: Any, length: int, vocabulary: int, with_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak beyond the logits is one chunk, where Megatron has all of them."""
    if with_kernels:
        assert loss_kernels.kernels_for(torch.empty(1, vocabulary, dtype=torch.bfloat16, device="cuda")) is not None
    else:
        monkeypatch.setattr(loss_kernels, "kernels_for", lambda logits: None)
    made, peaks = [], []
    for loss_of in (chunked_cross_entropy, vocab_parallel_cross_entropy):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made.append(Made(loss_of, group, length=length, vocabulary=vocabulary, device="cuda"))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    logits_bytes = 2 * BATCH * length * vocabulary
    assert peaks[0] < 2.2 * logits_bytes
    assert peaks[1] > 2.9 * logits_bytes
    assert_equal(*made)
