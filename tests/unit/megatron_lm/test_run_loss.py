"""The number of chunks of a run's loss, and the line that tells of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.swap.common.plan import Model
from megatron.swap.common.settings import Settings
from megatron.swap.megatron_lm.run_loss import RunLoss

MODEL = Model(32, 4096, 14336, 32, 8, 8192, 1, 128256, "transformer_engine", "bf16", gated=True)


def run_loss(model: Model = MODEL, **settings: object) -> RunLoss:
    return RunLoss(Settings(**settings), lambda: model, lambda: False)  # type: ignore[arg-type]


def test_the_number_stays_from_the_first_forward_with_gradients_on() -> None:
    model = replace(MODEL, seq_length=1)
    loss = RunLoss(Settings(loss_chunks="auto"), lambda: model, lambda: False)
    with torch.no_grad():
        assert loss.num_chunks == 1  # the batch is not known yet
    model = MODEL
    assert loss.num_chunks == 11
    model = replace(MODEL, seq_length=131072)
    assert loss.num_chunks == 11


@pytest.mark.parametrize(
    ("settings", "model", "budget_gib", "line"),
    [
        ({"loss_chunks": "auto"}, MODEL, None, "auto: the loss runs in 11 chunks and takes 675 MiB"),
        ({"loss_chunks": "auto"}, replace(MODEL, padded_vocab_size=1024), 80.0, "the loss runs as a whole and takes"),
        ({"loss_chunks": 8}, MODEL, 80.0, None),
        ({}, MODEL, None, None),
        ({}, MODEL, 80.0, "the loss takes 2.57 GiB. --swap-loss-chunks 11 would take 675 MiB and compute the logits"),
        ({}, MODEL, 400.0, None),
        ({}, replace(MODEL, padded_vocab_size=1024), 80.0, None),
    ],
)  # fmt: skip
def test_the_line(settings: dict[str, object], model: Model, budget_gib: float | None, line: str | None) -> None:
    loss = run_loss(model, **settings)
    said = loss.step_ended(budget_gib)
    assert (said is None) == (line is None), said
    assert line is None or line in str(said)
    assert loss.step_ended(budget_gib) is None, "said once"


def test_a_sum_in_fp32_is_told() -> None:
    """Without fused gradients it takes 2 GiB here: of half the tokens, chunks would save less."""
    auto = Settings(loss_chunks="auto")
    line = RunLoss(auto, lambda: MODEL, lambda: True).step_ended(None)
    assert line == "--swap-loss-chunks auto: the loss runs in 32 chunks and takes 2.21 GiB"
    short = replace(MODEL, seq_length=4096)
    assert "as a whole" in str(RunLoss(auto, lambda: short, lambda: True).step_ended(None))
