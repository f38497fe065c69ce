"""A GPT in Qwen3's shape, trained by Megatron-Bridge's own trainer, with swapping.

    pip install megatron-bridge 'transformer-engine[pytorch]'
    PYTHONPATH=. torchrun --nproc-per-node 1 examples/swap_megatron_bridge.py                    # without swapping
    PYTHONPATH=. torchrun --nproc-per-node 1 examples/swap_megatron_bridge.py --memory-gib 22
    PYTHONPATH=. torchrun --nproc-per-node 1 examples/swap_megatron_bridge.py --layers 0-11

Weights and data are random; nothing is downloaded. Needs a GPU. With --deterministic, runs with and without swapping
print the same losses and gradient norms, to the last digit. The last line has the figures of the swapping.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import os
import time

import torch
import torch.nn.functional as F

from megatron.swap.prepare import prepare

prepare()  # before Bridge is imported: it would run `make` in megatron-core, where PyPI's wheel has no Makefile

from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    GPTDatasetConfig,
    LoggerConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

from megatron.swap.integrations.megatron_bridge import SwapCallback


class ShowSteps(Callback):
    """Prints what Bridge's own lines round or leave out."""

    def on_train_step_start(self, context: CallbackContext) -> None:
        self._began = time.perf_counter()

    def on_train_step_end(self, context: CallbackContext) -> None:
        loss = float(context.loss_dict["lm loss"])  # waits for the GPU
        ms = (time.perf_counter() - self._began) * 1000
        reserved = torch.cuda.memory_reserved() / 2**30
        step, grad_norm = context.state.train_state.step, float(context.grad_norm)
        print(f"step {step}: loss {loss}, gradient norm {grad_norm}, {ms:.0f} ms, {reserved:.1f} GiB", flush=True)


def config_of(num_steps: int, seq_length: int, deterministic: bool) -> ConfigContainer:
    return ConfigContainer(
        model=GPTModelProvider(
            num_layers=16, hidden_size=2048, ffn_hidden_size=6144, num_attention_heads=16, num_query_groups=8,
            kv_channels=128, qk_layernorm=True, normalization="RMSNorm", activation_func=F.silu, gated_linear_unit=True,
            add_bias_linear=False, position_embedding_type="rope", rotary_base=1_000_000, seq_length=seq_length,
            vocab_size=32_768, share_embeddings_and_output_weights=False, attention_dropout=0.0, hidden_dropout=0.0,
            deterministic_mode=deterministic, cross_entropy_loss_fusion=not deterministic,
            gradient_accumulation_fusion=False,  # Bridge's default needs apex for the output layer
        ),
        train=TrainingConfig(train_iters=num_steps, global_batch_size=8, micro_batch_size=2),
        validation=ValidationConfig(eval_interval=None, eval_iters=0),
        optimizer=OptimizerConfig(
            optimizer="adam", lr=3e-4, min_lr=3e-5, weight_decay=0.1, use_distributed_optimizer=True
        ),
        scheduler=SchedulerConfig(
            lr_decay_style="cosine", lr_warmup_iters=2, start_weight_decay=0.1, end_weight_decay=0.1,
            weight_decay_incr_style="constant",
        ),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        dataset=GPTDatasetConfig(
            random_seed=1234, seq_length=seq_length, split="100,0,0", dataloader_type="single",
            reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, num_workers=1,
        ),  # no data path: random tokens
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=32_000),
        checkpoint=CheckpointConfig(save=None),
        mixed_precision="bf16_mixed",
    )  # fmt: skip


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
    swapping = SwapCallback(memory_gib=options.memory_gib, layers=options.layers)
    asked = options.memory_gib is not None or options.layers is not None
    config = config_of(options.steps, options.seq_length, options.deterministic)
    pretrain(config, forward_step, callbacks=[ShowSteps(), swapping] if asked else [ShowSteps()])
    if swapping.swapped is not None:
        print(swapping.swapped.stats())


if __name__ == "__main__":
    main()
