"""A checkpoint that an earlier version wrote, with offloaded optimizer state, goes on to the bit.

``data/checkpoint-a29e111.tar.xz`` was written by the code of commit a29e111:
``pretrain_gpt_swap.py`` with ``FLAGS``, ``--exit-interval 3 --swap-min-mib 0 --swap-layers all --swap-optimizer 0.5``.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.harness import Trainer, load_checkpoint

ARCHIVE = Path(__file__).with_name("data") / "checkpoint-a29e111.tar.xz"
FLAGS = (
    "--num-layers 3 --hidden-size 8 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--train-iters 6 --vocab-size 63 --make-vocab-size-divisible-by 8 --bf16 --attention-dropout 0.1 "
    "--hidden-dropout 0.1 --save checkpoint --save-interval 1000 --ckpt-format torch --swap-summary summary.json"
)


def is_same(one: Any, two: Any) -> bool:
    return torch.equal(one, two) if isinstance(one, torch.Tensor) else repr(one) == repr(two)


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize(
    "swap", ["--swap-layers none", "--swap-layers all --swap-optimizer 1 --swap-min-mib 0 --swap-host-gib 0.05"]
)
def test_an_earlier_versions_checkpoint(trainer: Trainer, earlier: Path, swap: str) -> None:
    """Three steps of that version and three of this one equal six steps without swapping."""
    plain = trainer.run(f"{FLAGS} --swap-layers none")
    run = trainer.run(f"{FLAGS} {swap} --load {earlier}")
    assert run.summary["losses"] == plain.summary["losses"][3:]
    assert run.summary["grad_norms"] == plain.summary["grad_norms"][3:]
    one, two = (load_checkpoint(of.directory / "checkpoint") for of in (plain, run))
    assert one.keys() == two.keys()
    assert [name for name in one if not is_same(one[name], two[name])] == []
