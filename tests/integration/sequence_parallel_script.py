"""The end of a model of Megatron's on two tensor-parallel ranks, with and without sequence parallelism.

Without TransformerEngine no whole model trains so: torch's norms refuse it. Prints ``equal`` if chunks give what
Megatron gives.
"""

# ruff: noqa: E402

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from megatron.swap.patches import cpu, registry

registry.apply(cpu.CORE_PATCHES)  # torch.cuda's calls in Megatron, on this machine without CUDA

from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.swap.megatron_lm.cross_entropy import chunked_cross_entropy
from megatron.swap.megatron_lm.loss_chunks import DeferredLogits, chunk_loss
from megatron.swap.patches.cross_entropy import cross_entropy_patch

RANKS, TOKENS, BATCH, WIDTH, WORDS = 2, 22, 3, 16, 64


class Head(LanguageModule):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.pre_process, self.post_process = False, True
        self.output_layer = ColumnParallelLinear(
            WIDTH, WORDS, config=config, init_method=config.init_method, bias=False, gather_output=False,
            tp_group=self.pg_collection.tp,
        )  # fmt: skip

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits, _ = self.output_layer(hidden)
        with torch.no_grad():
            self.words, self.is_deferred = logits.max(dim=-1)[1], isinstance(logits, DeferredLogits)
        return self.compute_language_model_loss(labels, logits)


def results(head: Head, *, is_parallel: bool) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, BATCH, WIDTH, generator=chance).to(head.output_layer.weight.dtype)
    labels = torch.randint(WORDS, (BATCH, TOKENS), generator=chance)
    factors = torch.randn(BATCH, TOKENS, generator=chance)
    if is_parallel:
        hidden = hidden.chunk(RANKS)[torch.distributed.get_rank()]
    hidden = hidden.clone().requires_grad_()
    head.output_layer.weight.grad = None
    losses = head(hidden, labels)
    losses.backward(factors)
    return [losses.detach(), hidden.grad, head.output_layer.weight.grad, head.words]  # type: ignore[list-item]


def check(dtype: torch.dtype, tolerance: float, *, is_parallel: bool) -> None:
    model_parallel_cuda_manual_seed(1)
    head = Head(TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=2, use_cpu_initialization=True,
        tensor_model_parallel_size=RANKS, sequence_parallel=is_parallel, gradient_accumulation_fusion=False,
        params_dtype=dtype, bf16=dtype == torch.bfloat16,
    ))  # fmt: skip
    whole = results(head, is_parallel=is_parallel)
    assert not head.is_deferred
    for num_chunks in (1, 4):
        undo = chunk_loss(head, lambda num=num_chunks: num)  # type: ignore[misc]
        found = results(head, is_parallel=is_parallel)
        assert head.is_deferred
        undo()
        for mine, theirs in zip(found, whole, strict=True):
            if num_chunks == 1:
                assert torch.equal(mine, theirs)
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance / 10)
    assert torch.equal(results(head, is_parallel=is_parallel)[2], whole[2])
    assert not head.is_deferred


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    registry.apply([cross_entropy_patch(chunked_cross_entropy)])  # as a run does; it is for logits of 16 bits
    for is_parallel in (False, True):
        check(torch.float32, 1e-5, is_parallel=is_parallel)
        check(torch.bfloat16, 1e-2, is_parallel=is_parallel)
    print("equal\n", end="", flush=True)  # one write: two ranks share the log
