"""The examples for models outside Megatron, run as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def output_of(example: str, folder: Path) -> str:
    """Return the output of an example, run in an empty folder without access to Hugging Face's hub."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_swapped(line: str) -> None:
    found = re.search(r": ([\d.]+) MiB out, ([\d.]+) MiB in, \d+ late, [\d.]+ ms waited, at most [\d.]+ MiB in", line)
    assert found is not None, line
    assert float(found[1]) > 1
    assert float(found[2]) > 1


def test_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="requirements-dev.txt has it")
    plain, swapped, stats, verdict = output_of("swap_hugging_face.py", tmp_path).splitlines()
    assert plain.split()[1:] == swapped.split()[1:]
    assert len(set(plain.split()[2:])) == 3, "it does not train"
    assert stats.startswith("8 layers: ")
    assert_swapped(stats)
    assert verdict == "losses are equal"


def test_cnn(tmp_path: Path) -> None:
    lines = output_of("swap_cnn.py", tmp_path).splitlines()
    assert [line.split(":")[0] for line in lines[::2]] == ["channels first", "channels last"]
    for stats, losses in zip(lines[::2], lines[1::2], strict=True):
        assert " 8 blocks: " in stats
        assert_swapped(stats)
        assert losses.endswith(": equal")
        assert len(set(losses.split()[1:4])) == 3, "it does not train"


def test_checkpointing_of_hugging_face_layers() -> None:
    """The checkpoint is inside the layers' forward, so the layers' input is swapped."""
    transformers = pytest.importorskip("transformers", reason="requirements-dev.txt has it")
    torch = pytest.importorskip("torch")
    from megatron import swap

    def train(swaps: bool) -> tuple[list[float], int]:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            num_hidden_layers=6, hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=256
        )
        model = transformers.LlamaForCausalLM(config).train()
        model.activation_checkpointing_enable()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.randint(256, (2, 64))
        losses = []
        swapped = swap.activations(model, min_mib=0, cpu_delay_ms=0.5) if swaps else None
        for _ in range(3):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if swapped is None:
            return losses, 0
        swapped.close()
        return losses, swapped.stats().in_bytes

    plain, _ = train(swaps=False)
    losses, in_bytes = train(swaps=True)
    assert losses == plain
    assert in_bytes >= 2 * 2 * 64 * 64 * 4, "a layer's input at least, twice"
