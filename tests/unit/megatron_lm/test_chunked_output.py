"""The output layer and the loss in chunks: one is Megatron's to the bit; several are no worse, and take less memory."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer import multi_token_prediction

from megatron.swap.common.types import UsageError
from megatron.swap.megatron_lm import cross_entropy
from megatron.swap.megatron_lm.chunked_output import OutputLayer, chunked_losses
from megatron.swap.megatron_lm.loss_chunks import DeferredLogits
from megatron.swap.megatron_lm.weight_gradients import te_kernel
from tests.known_failures.meters import tensor_memory

TOKENS, BATCH, WIDTH, WORDS = 96, 2, 64, 1000
MORE = 1.001
"""How much more the error of several chunks may be, relative to that of the whole: sums in another order differ."""

cross_entropy_of = cross_entropy.chunked_cross_entropy(vocab_parallel_cross_entropy)


@pytest.fixture(autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that adds a weight's gradient: TransformerEngine's; without a GPU a stand-in, which rounds once."""
    if "gpu" in request.keywords:
        monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", te_kernel(), raising=False)
        return

    def add(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.copy_((main_grad.float() + grad_output.t().float().matmul(inputs.float())).to(main_grad.dtype))

    both = SimpleNamespace(wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", both, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # where Megatron's layer makes a tensor


@dataclass
class Head:
    """Hidden states, the weight of an output layer, and labels; with the gradient of each token's loss."""

    group: Any
    dtype: torch.dtype = torch.bfloat16
    fused: torch.dtype | None = None
    tokens: int = TOKENS
    words: int = WORDS
    wide: int = WIDTH
    device: str = "cpu"
    knows: bool = True
    """The loss is known to be the cross entropy; else it is any function."""

    def __post_init__(self) -> None:
        chance = torch.Generator().manual_seed(1)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=chance).to(self.device)

        self.hidden = random(self.tokens, BATCH, self.wide).bfloat16().to(self.dtype).requires_grad_()
        self.weight = torch.nn.Parameter((random(self.words, self.wide) / 8).bfloat16().to(self.dtype))
        self.labels = torch.randint(self.words, (BATCH, self.tokens), generator=chance).to(self.device)
        # As a loss mask and a normalization leave it: some tokens do not count, all others may count differently.
        self.factors = random(BATCH, self.tokens) * (random(BATCH, self.tokens) > -0.5)
        if self.fused is not None:
            self.weight.main_grad = random(self.words, self.wide).to(self.fused)
            self.weight.grad_added_to_main_grad = False
            self.before = self.weight.main_grad.clone()

    @property
    def module(self) -> Any:
        return SimpleNamespace(
            tp_group=self.group, sequence_parallel=False, allreduce_dgrad=False, weight=self.weight,
            gradient_accumulation_fusion=self.fused is not None,
        )  # fmt: skip

    def loss_of(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if self.dtype == torch.float64:
            losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="none")
            return losses.view(labels.t().shape).t()
        return cross_entropy_of(logits, labels.t().contiguous(), 0.0, self.group).t().contiguous()

    def in_chunks(self, num_chunks: int, **options: Any) -> torch.Tensor:
        output = OutputLayer(self.module, self.loss_of, num_chunks, **{"is_cross_entropy": self.knows, **options})
        return chunked_losses(output, self.hidden, self.weight, self.labels)

    def whole(self) -> torch.Tensor:
        """Megatron's linear layer, then the loss of all logits."""
        fused = self.fused is not None
        logits = layers.linear_with_grad_accumulation_and_async_allreduce(
            self.hidden, self.weight, None, fused, False, False, tp_group=self.group
        )
        return self.loss_of(self.labels, logits)

    def results(self, losses: torch.Tensor) -> list[torch.Tensor]:
        """Return losses and gradients after backward."""
        losses.backward(self.factors.to(losses.dtype))
        assert self.hidden.grad is not None
        of_weight = self.weight.grad
        if self.fused is not None:
            assert self.weight.grad_added_to_main_grad is True
            of_weight = self.weight.main_grad
        assert of_weight is not None
        return [losses.detach(), self.hidden.grad, of_weight]


def assert_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    for one, other in zip(some, others, strict=True):
        assert torch.equal(one, other)


WAYS = [None, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize(
    ("dtype", "fused"), [*((torch.bfloat16, way) for way in WAYS), (torch.float32, torch.float32)]
)
def test_one_chunk_is_megatrons_to_the_bit(
    group: Any, dtype: torch.dtype, fused: torch.dtype | None, knows: bool
) -> None:
    ours, theirs = Head(group, dtype, fused, knows=knows), Head(group, dtype, fused)
    assert_equal(ours.results(ours.in_chunks(1)), theirs.results(theirs.whole()))


@pytest.mark.parametrize("num_chunks", [7, 1000])
@pytest.mark.parametrize("fused", WAYS)
def test_several_chunks_are_no_worse_than_the_whole(group: Any, num_chunks: int, fused: torch.dtype | None) -> None:
    exact, whole, ours = Head(group, torch.float64), Head(group, fused=fused), Head(group, fused=fused)
    truth = exact.results(exact.whole())
    if fused is not None:
        truth[2] = truth[2] + whole.before.double()
    errors = [
        [float((found.double() - true).square().mean().sqrt()) for found, true in zip(results, truth, strict=True)]
        for results in (ours.results(ours.in_chunks(num_chunks)), whole.results(whole.whole()))
    ]
    for mine, theirs in zip(*errors, strict=True):
        assert 0 < mine <= MORE * theirs, errors


def test_any_loss_gives_the_same_as_the_known_one(group: Any) -> None:
    """And both are equal from run to run."""
    one, other, again = Head(group), Head(group, knows=False), Head(group)
    expected = one.results(one.in_chunks(5))
    assert_equal(expected, other.results(other.in_chunks(5)))
    assert_equal(expected, again.results(again.in_chunks(5)))


def test_a_second_backward_is_refused_or_gives_the_same(group: Any) -> None:
    """The kept logits are gone by then, as those of ``cross_entropy.py`` are. Any other loss runs again."""
    known = Head(group)
    losses = known.in_chunks(3)
    losses.backward(known.factors, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.backward(known.factors)
    head = Head(group, knows=False)
    losses = head.in_chunks(3)
    losses.backward(head.factors, retain_graph=True)
    first = [head.hidden.grad, head.weight.grad]
    head.hidden.grad = head.weight.grad = None
    losses.backward(head.factors)
    assert_equal(first, [head.hidden.grad, head.weight.grad])  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["hidden", "weight"])
def test_what_is_frozen_has_no_gradient(group: Any, what: str) -> None:
    head, full = Head(group), Head(group)
    _, of_hidden, of_weight = full.results(full.in_chunks(3))
    getattr(head, what).requires_grad_(False)
    head.in_chunks(3).backward(head.factors)
    frozen, other = (head.hidden, head.weight) if what == "hidden" else (head.weight, head.hidden)
    assert frozen.grad is None
    assert torch.equal(other.grad, of_weight if what == "hidden" else of_hidden)


@pytest.mark.parametrize("zero", [True, False])
def test_what_the_wrapper_expects_of_an_added_gradient(group: Any, zero: bool) -> None:
    head = Head(group, fused=torch.float32)
    head.weight.zero_out_wgrad = zero  # set where the embedding adds its gradient
    head.results(head.in_chunks(4))
    assert head.weight.grad is not None
    assert not zero or not head.weight.grad.any()
    del head.weight.grad_added_to_main_grad  # no wrapper: nothing but the sum is wanted
    head.weight.grad = None
    head.in_chunks(4).backward(head.factors)
    assert head.weight.grad is None


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("num_chunks", [1, 8])
def test_the_logits_of_one_chunk_exist_at_a_time(
    group: Any, num_chunks: int, knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By formula: a chunk's logits; beside them the rows in single precision that the cross entropy takes at once."""
    rows = 32
    monkeypatch.setattr(cross_entropy, "LOSS_ROWS", rows)
    none = SimpleNamespace(wgrad_gemm_accum_fp32=lambda *_: None)  # as the kernel on a GPU, it takes no memory
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", none)
    head = Head(group, fused=torch.float32, tokens=1024, words=4096, wide=16, knows=knows)
    head.in_chunks(num_chunks).backward(head.factors)  # what is created once exists
    head.hidden.grad = torch.zeros_like(head.hidden)  # so that backward's results are added to what exists
    with tensor_memory() as memory:
        losses = head.in_chunks(num_chunks)
        in_forward, between = memory.peak, memory.in_use
        losses.backward(head.factors)
        in_backward = memory.peak
    logits_bytes = 2 * head.tokens * BATCH * head.words
    of_chunk = logits_bytes / num_chunks
    in_single = 2 * 4 * rows * head.words  # exponentials; in backward the softmax and its product
    small = 0.01 * logits_bytes + 8 * head.hidden.nbytes
    assert of_chunk <= between <= of_chunk + small
    assert of_chunk <= in_forward <= of_chunk + in_single + small
    scratch = of_chunk / 4  # of the CPU's matrix product
    assert in_backward <= of_chunk + scratch + max(in_single, 2 * head.weight.nbytes) + small


def deferred(head: Head, num_chunks: int = 5) -> tuple[DeferredLogits, torch.Tensor]:
    whole = torch.nn.functional.linear(head.hidden, head.weight)
    output = OutputLayer(head.module, head.loss_of, num_chunks, head.knows)
    return DeferredLogits(output, head.hidden, head.weight, lambda: whole), whole


def test_without_gradients_they_are_the_whole_and_largest_ones_are_found_in_chunks(group: Any) -> None:
    logits, whole = deferred(Head(group))
    with torch.no_grad():
        assert torch.equal(logits.transpose(0, 1), whole.transpose(0, 1))
        assert torch.equal((logits * 0.5).float(), (whole * 0.5).float())
        # Megatron counts accepted tokens by a largest logit over ranks, and multiplies by the words of a rank.
        logits._whole = lambda: pytest.fail("the whole was computed")  # type: ignore[assignment, return-value]
        assert all(map(torch.equal, logits.max(dim=-1), whole.max(dim=-1)))
        assert torch.equal(torch.argmax(logits, dim=-1), whole.argmax(dim=-1))  # type: ignore[call-overload]
        found = multi_token_prediction._vocab_parallel_argmax(logits, group, 1)  # type: ignore[arg-type]
    assert torch.equal(found, whole.argmax(dim=-1))
    assert logits.shape == logits.size() == whole.shape
    assert [logits.size(dim) for dim in (0, 1, -1)] == [whole.size(dim) for dim in (0, 1, -1)]
    with pytest.raises(UsageError, match=r"uses its logits \(softmax\) outside its own loss.* Drop --swap-loss"):
        torch.softmax(logits, -1)  # type: ignore[call-overload]


@pytest.mark.parametrize("knows", [True, False])
def test_scaled_logits(group: Any, knows: bool) -> None:
    head, plain = Head(group, knows=knows), Head(group)
    logits, _ = deferred(head)
    losses = (logits * 0.25).losses(head.labels)
    scaled = torch.nn.functional.linear(plain.hidden, plain.weight) * 0.25
    expected = plain.loss_of(plain.labels, scaled)
    assert torch.equal(losses, expected)
    (of_hidden,) = torch.autograd.grad(losses, head.hidden, head.factors)
    (theirs,) = torch.autograd.grad(expected, plain.hidden, plain.factors)
    torch.testing.assert_close(of_hidden, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", WAYS)
def test_on_a_gpu(group: Any, fused: torch.dtype | None) -> None:
    """One chunk equals Megatron's to the bit, with its kernels; several are no worse than the whole."""
    if fused is not None and te_kernel() is None:
        pytest.skip("needs TransformerEngine")
    sizes: dict[str, Any] = {"tokens": 1024, "words": 32000, "wide": 1024, "device": "cuda"}
    whole, one, eight = (Head(group, fused=fused, **sizes) for _ in range(3))
    exact = Head(group, torch.float64, **sizes)
    truth, theirs = exact.results(exact.whole()), whole.results(whole.whole())
    if fused is not None:
        truth[2] = truth[2] + whole.before.double()
    assert_equal(one.results(one.in_chunks(1)), theirs)
    for mine, other, true in zip(eight.results(eight.in_chunks(8)), theirs, truth, strict=True):
        errors = [float((found.double() - true).square().mean().sqrt()) for found in (mine, other)]
        assert errors[0] <= 1.01 * errors[1], errors
