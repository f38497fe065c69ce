"""A Hugging Face model whose activations are swapped, in a training loop of one's own.

    pip install transformers
    PYTHONPATH=. python examples/swap_hugging_face.py

GPT-2, small, with random weights: nothing is downloaded. On a GPU if there is one; without, RAM plays the GPU. Prints
(figures differ from machine to machine, the last line does not):

    plain:   losses 5.5291 5.6079 5.6090
    swapped: losses 5.5291 5.6079 5.6090
    8 layers: 94 MiB out, 92 MiB in, 0 late, 53.1 ms waited, at most 31 MiB in host memory
    losses are equal
"""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # so that two runs on a GPU are equal at all

import torch
from megatron import swap
from transformers import GPT2Config, GPT2LMHeadModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=8, n_embd=128, n_head=4, n_positions=128, vocab_size=256, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config).to(DEVICE)


def train(model: GPT2LMHeadModel, num_steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    losses = []
    for step in range(num_steps):
        torch.manual_seed(step)  # data, and dropout
        tokens = torch.randint(256, (2, 128), device=DEVICE)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.use_deterministic_algorithms(True)
    plain = train(gpt2())
    print("plain:   losses", *(f"{loss:.4f}" for loss in plain))

    model = gpt2()
    # Real layers save tensors of many MiB; of these tiny ones most are below the default min_mib=1.
    with swap.activations(model, "all", min_mib=0.01) as swapped:
        losses = train(model)

    print("swapped: losses", *(f"{loss:.4f}" for loss in losses))
    print(f"{len(swapped.chosen)} layers: {swapped.stats()}")
    print("losses are", "equal" if losses == plain else "DIFFERENT")


if __name__ == "__main__":
    main()
