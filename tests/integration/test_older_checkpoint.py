"""A checkpoint that an earlier version wrote, with offloaded optimizer state, goes on.

``data/checkpoint-a29e111.tar.xz`` was written by the code of commit a29e111:
``pretrain_gpt_swap.py`` with ``FLAGS``, ``--exit-interval 3 --swap-min-mib 0 --swap-layers all --swap-optimizer 0.5``.
"""

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

NEAR = 1e-5


def difference(one: Any, two: Any) -> float:
    """Return by how much two entries of checkpoints differ, in parts of the largest value; no numbers: 0 or 1."""
    if not isinstance(one, torch.Tensor):
        return float(repr(one) != repr(two))
    if not one.is_floating_point():
        return float(not torch.equal(one, two))
    return float((one - two).abs().max() / two.abs().max().clamp(min=1e-30))


def test_an_earlier_versions_checkpoint(trainer: Trainer, tmp_path: Path) -> None:
    """Three steps of that version and three of this one equal six steps of this one.

    To the bit with and without swapping. The three steps of that version ran on another processor, where MKL may give
    other last bits.
    """
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    earlier = tmp_path / "checkpoint"
    plain = trainer.run(f"{FLAGS} --swap-layers none")
    unswapped = trainer.run(f"{FLAGS} --swap-layers none --load {earlier}")
    swapped = trainer.run(
        f"{FLAGS} --swap-layers all --swap-optimizer 1 --swap-min-mib 0 --swap-host-gib 0.05 --load {earlier}"
    )
    whole, one, two = (load_checkpoint(run.directory / "checkpoint") for run in (plain, unswapped, swapped))
    assert unswapped.summary["losses"] == swapped.summary["losses"]
    assert unswapped.summary["grad_norms"] == swapped.summary["grad_norms"]
    assert whole.keys() == one.keys() == two.keys()
    assert {name for name in one if difference(one[name], two[name])} == set()
    far = {name: difference(one[name], whole[name]) for name in one}
    assert {name: value for name, value in far.items() if value > NEAR} == {}
    losses = [[float.fromhex(loss) for loss in run.summary["losses"]] for run in (unswapped, plain)]
    assert losses[0] == pytest.approx(losses[1][3:], rel=NEAR)
