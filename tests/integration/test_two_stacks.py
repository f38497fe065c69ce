"""A model with two stacks of layers (Megatron's T5): it trains swapped to the bit, and is not planned."""

from pathlib import Path

import pytest

from tests.integration.harness import SWAP_SMALL, Trainer, assert_same_training, recorded

pytestmark = pytest.mark.nightly
TWO_STACKS = Path(__file__).with_name("two_stacks_script.py")
SHAPE = "--num-layers 4 ^--no-create-attention-mask-in-dataloader"


def test_it_trains_swapped_to_the_bit(trainer: Trainer) -> None:
    plain = trainer.run(f"{SHAPE} --swap-layers none {recorded('torch')}", program=TWO_STACKS)
    run = trainer.run(f"{SHAPE} --swap-layers all {SWAP_SMALL} {recorded('torch')}", program=TWO_STACKS)
    assert_same_training(plain, run)
    assert run.summary["saved_peak_bytes"] < plain.summary["saved_peak_bytes"]


def test_a_plan_for_it_is_refused_before_training(trainer: Trainer) -> None:
    run = trainer.failing(f"{SHAPE} --swap-memory-gib 1 {SWAP_SMALL}", program=TWO_STACKS)
    assert run.error == (
        "--swap-memory-gib, --swap-memory-fraction and --swap-policy auto plan one stack of layers, and this model has "
        "2: encoder (layers 0-3), decoder (layers 0-3). Choose the layers instead: --swap-layers all, or numbers, "
        "which count in each stack."
    )
    assert "iteration        1/" not in run.output
