"""The examples for models outside Megatron, run as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.harness import CHECKED, ROOT


def output_of(example: str, folder: Path) -> str:
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


@pytest.mark.nightly
def test_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="requirements-dev.txt has it")
    plain, swapped, stats, verdict = output_of("swap_hugging_face.py", tmp_path).splitlines()
    assert plain.split()[1:] == swapped.split()[1:]
    assert len(set(plain.split()[2:])) == 3, "it does not train"
    assert stats.startswith("8 layers: ")
    assert_swapped(stats)
    assert verdict == "losses are equal"


@pytest.mark.nightly
def test_cnn(tmp_path: Path) -> None:
    lines = output_of("swap_cnn.py", tmp_path).splitlines()
    assert [line.split(":")[0] for line in lines[::2]] == ["channels first", "channels last"]
    for stats, losses in zip(lines[::2], lines[1::2], strict=True):
        assert " 8 blocks: " in stats
        assert_swapped(stats)
        assert losses.endswith(": equal")
        assert len(set(losses.split()[1:4])) == 3, "it does not train"


MOST_RISE = 0.3
"""Largest rise of a loss above the lowest one before it: the noise of batches is 0.12 here, a spike was 1.3."""
MOST_NORM = 10.0
"""Largest gradient norm: 3.5 here, 84 in the spike."""


@pytest.mark.nightly
def test_the_first_command() -> None:
    """The printed losses fall without a spike."""
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MODEL", "DATA_PATH", "NUM_GPUS", "SUMMARY")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / "pretrain_gpt_swap.sh"), "--swap-layers", "0-23"], cwd=ROOT,
        env={**inherited, **CHECKED, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "SWAP_CHECKED": ""},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    losses = [float(loss) for loss in re.findall(r"iteration .* lm loss: (\S+)", done.stdout)]
    norms = [float(norm) for norm in re.findall(r"grad norm: (\S+)", done.stdout)]
    assert len(losses) == len(norms) >= 20
    assert losses[-1] < losses[0] - 2
    assert max(loss - min(losses[:number]) for number, loss in enumerate(losses) if number) < MOST_RISE, losses
    assert max(norms) < MOST_NORM, norms
    assert re.search(r"^ swap: autograd held at most .*\n swap: next: ", done.stdout, flags=re.MULTILINE), done.stdout
