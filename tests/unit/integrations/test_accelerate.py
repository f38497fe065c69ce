"""``swap.activations(model, memory_gib=…)`` around a loop of Hugging Face's accelerate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from megatron import swap

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import accelerate
from accelerate.state import AcceleratorState, GradientState, PartialState

from tests.planned_loop import NUM_STEPS, QUIET
from tests.transformers_models import llama, text

ACCUMULATED = 2


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    """Accelerate's state is global."""
    yield
    for kind in (AcceleratorState, GradientState, PartialState):
        kind._shared_state.clear()


@pytest.mark.slow
def test_accumulation_by_accelerate() -> None:
    """Its optimizer skips steps between micro-batches. Its autocast is a forward of the model's instance."""

    def trained(memory_gib: float | None) -> tuple[list[torch.Tensor], swap.Stats | None]:
        accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATED
        )
        torch.manual_seed(1)
        model = llama()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        forward = model.forward
        swapped = None if memory_gib is None else swap.activations(model, memory_gib=memory_gib, **QUIET)
        losses = []
        for number in range(NUM_STEPS * ACCUMULATED):
            with accelerator.accumulate(model):
                loss = model(**text(number)).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        if swapped is None:
            return losses, None
        swapped.step()  # otherwise the last step ends with the next forward
        stats = swapped.stats()
        swapped.close()
        assert model.forward == forward
        return losses, stats

    losses, stats = trained(1e-4)
    expected, _ = trained(None)
    assert all(torch.equal(one, other) for one, other in zip(losses, expected, strict=True))
    assert stats is not None
    assert (stats.stage, stats.num_steps) == ("stable", NUM_STEPS)
    assert stats.out_bytes > 0
    assert stats.peak_gib is not None
    assert stats.peak_gib <= 1e-4
