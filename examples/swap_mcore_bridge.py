"""mcore-bridge's Qwen3 in a training loop of your own, with swapping: what ms-swift trains, without ms-swift.

    pip install mcore-bridge 'transformer-engine[pytorch]'
    PYTHONPATH=. torchrun --nproc-per-node 1 examples/swap_mcore_bridge.py                       # without swapping
    PYTHONPATH=. torchrun --nproc-per-node 1 examples/swap_mcore_bridge.py --memory-gib 22

Weights and data are random; nothing is downloaded. Needs a GPU. With --deterministic, runs with and without swapping
print the same losses and gradient norms, to the last digit.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

import mcore_bridge  # first: it patches Megatron
import torch
from megatron import swap
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

BATCH, NUM_MICRO_BATCHES, VOCABULARY = 2, 4, 32_768


def build(seq_length: int, deterministic: bool) -> tuple[list[Any], Any, Any]:
    """Return the model chunks, the optimizer and the model's config."""
    config = mcore_bridge.ModelConfig(
        hf_model_type="qwen3", num_layers=16, hidden_size=2048, ffn_hidden_size=6144, num_attention_heads=16,
        num_query_groups=8, kv_channels=128, qk_layernorm=True, add_qkv_bias=False, rotary_base=1_000_000,
        padded_vocab_size=VOCABULARY, max_position_embeddings=seq_length, params_dtype=torch.bfloat16, bf16=True,
        perform_initialization=True, deterministic_mode=deterministic,
    )  # fmt: skip
    of_ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    chunks = [
        DistributedDataParallel(config, of_ddp, Float16Module(config, chunk.cuda()))
        for chunk in mcore_bridge.get_mcore_model(config)
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=3e-4, bf16=True, use_distributed_optimizer=True), chunks
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return chunks, optimizer, config


def batches(seq_length: int) -> Iterator[torch.Tensor]:
    while True:
        yield torch.randint(VOCABULARY, (BATCH, seq_length + 1), device="cuda")


def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(data)
    positions = torch.arange(tokens.shape[1] - 1, device="cuda").expand(BATCH, -1)
    losses = model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous())
    return losses, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory-gib", type=float, help="budget; the planner chooses what to swap")
    parser.add_argument("--layers", help="layers to swap, in place of a budget")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--deterministic", action="store_true", help="slower: equal runs print equal losses")
    options = parser.parse_args()
    if options.deterministic:
        os.environ |= {
            "NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        }  # fmt: skip
        torch.use_deterministic_algorithms(True)

    torch.distributed.init_process_group("nccl")
    torch.cuda.set_device(torch.distributed.get_rank() % torch.cuda.device_count())
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    chunks, optimizer, _ = build(options.seq_length, options.deterministic)

    swapped = None
    if options.memory_gib is not None or options.layers is not None:
        swapped = swap.install(chunks, optimizer, memory_gib=options.memory_gib, layers=options.layers)
    data = batches(options.seq_length)
    for step in range(1, options.steps + 1):
        began = time.perf_counter()
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=data, model=chunks, num_microbatches=NUM_MICRO_BATCHES,
            seq_length=options.seq_length, micro_batch_size=BATCH, forward_only=False,
        )  # fmt: skip
        grad_norm = float(optimizer.step()[1])
        loss = sum(float(one["loss"]) for one in losses) / len(losses)
        ms = (time.perf_counter() - began) * 1000
        reserved = torch.cuda.memory_reserved() / 2**30
        print(f"step {step}: loss {loss}, gradient norm {grad_norm}, {ms:.0f} ms, {reserved:.1f} GiB", flush=True)
    if swapped is not None:
        print(swapped.stats())
        swapped.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
