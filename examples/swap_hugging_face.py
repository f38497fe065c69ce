"""A Hugging Face model whose activations are swapped, in a custom training loop.

    pip install transformers
    PYTHONPATH=. python examples/swap_hugging_face.py            # tiny: seconds, without a GPU too
    PYTHONPATH=. python examples/swap_hugging_face.py --large    # 1.3B in bf16, on a GPU: time and memory as well

GPT-2 has random weights; nothing is downloaded. Runs on a GPU if there is one, else emulates it in RAM. Prints (figures
differ from machine to machine, the last line does not):

    plain:   losses 5.5291 5.6079 5.6090
    swapped: losses 5.5291 5.6079 5.6090
    8 layers: 94 MiB out, 92 MiB in, 0 late, 53.1 ms waited, at most 31 MiB in host memory
    losses are equal
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS: two runs on a GPU are equal

import torch
from megatron import swap
from transformers import GPT2Config, GPT2LMHeadModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = GPT2Config(n_layer=8, n_embd=128, n_head=4, n_positions=128, vocab_size=256, bos_token_id=0, eos_token_id=0)
LARGE = GPT2Config(
    n_layer=24, n_embd=2048, n_head=16, n_positions=2048, vocab_size=32000, bos_token_id=0, eos_token_id=0,
    dtype=torch.bfloat16,
)  # fmt: skip


def gpt2(config: GPT2Config) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).to(DEVICE, config.dtype)


def train(model: GPT2LMHeadModel, name: str, num_steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if model.config is TINY else 1e-5)
    model.train()
    losses = []
    for step in range(num_steps):
        start = time.perf_counter()
        torch.manual_seed(step)  # data, and dropout
        tokens = torch.randint(model.config.vocab_size, (2, model.config.n_positions), device=DEVICE)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds = time.perf_counter() - start  # last step: the first ones reserve memory and record the order
    print(f"{name} losses", *(f"{loss:.4f}" for loss in losses))
    if model.config is LARGE:
        print(f"{name} {seconds * 1e3:.0f} ms a step, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of the GPU")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="A Hugging Face model whose activations are swapped.")
    parser.add_argument("--large", action="store_true", help="1.3B parameters, on a large GPU")
    is_large = parser.parse_args().large
    if is_large and DEVICE == "cpu":
        parser.error("--large needs a GPU")
    config = LARGE if is_large else TINY
    torch.use_deterministic_algorithms(True)
    plain = train(gpt2(config), "plain:  ")
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()

    model = gpt2(config)
    # Real layers save tensors of many MiB; of tiny ones most are below the default min_mib=1.
    with swap.activations(model, "all", min_mib=1.0 if is_large else 0.01) as swapped:
        losses = train(model, "swapped:")

    print(f"{len(swapped.chosen)} layers: {swapped.stats()}")
    print("losses are", "equal" if losses == plain else "DIFFERENT")


if __name__ == "__main__":
    main()
