"""``SwapCallback``: as the handler of transformers' ``Trainer`` calls it, and with the trainer where it runs."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from transformers.trainer_callback import CallbackHandler

from megatron.swap.common.plan import Infeasible
from megatron.swap.common.types import UsageError
from megatron.swap.integrations.transformers import SwapCallback
from tests.planned_loop import NUM_STEPS, QUIET
from tests.transformers_models import llama, text


def settings(model: torch.nn.Module, **more: Any) -> Any:
    state = transformers.TrainerState(), transformers.TrainerControl()
    return state, CallbackHandler([SwapCallback(**QUIET, **more)], model, None, None, None)


def trained(model: torch.nn.Module, handler: CallbackHandler | None, state: Any) -> list[torch.Tensor]:
    """Train as the trainer does, and tell the callbacks what it tells them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if handler is not None:
        handler.on_train_begin(None, *state)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(**text(step)).loss
        loss.backward()
        optimizer.step()
        model.zero_grad()
        losses.append(loss.detach())
        if handler is not None:
            handler.on_step_end(None, *state)
    if handler is not None:
        handler.on_train_end(None, *state)
    return losses


@pytest.mark.parametrize("more", [{"memory_gib": 1e-4}, pytest.param({"layers": "0-1"}, marks=pytest.mark.slow)])
def test_as_the_trainer_calls_it(more: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = llama()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    plain = trained(model, None, None)
    model.load_state_dict(start)
    state, handler = settings(model, **more)
    assert all(map(torch.equal, trained(model, handler, state), plain))
    swapped = handler.callbacks[0].swapped
    assert swapped is not None
    stats = swapped.stats()
    assert stats.out_bytes > 0
    assert not any("forward" in vars(module) for module in model.modules())
    if "memory_gib" in more:
        assert stats.num_steps == NUM_STEPS
        assert stats.stage == "stable"
        assert stats.peak_gib is not None
        assert stats.peak_gib <= more["memory_gib"]


def test_without_a_plan_the_model_is_as_before() -> None:
    """Training ends with the error, and no other call tells the callback so."""
    model = llama()
    state, handler = settings(model, memory_gib=1e-6)
    with pytest.raises(Infeasible, match="smallest budget"):
        trained(model, handler, state)
    assert not any("forward" in vars(module) for module in model.modules())
    trained(model, None, None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"n_gpu": 2}, r"n_gpu=2 .*Start with torchrun, or set CUDA_VISIBLE_DEVICES"),
        ({"n_gpu": 1, "torch_compile": True}, r"torch_compile=True .*Leave it out"),
        ({"deepspeed": "ds.json"}, r"deepspeed='ds.json' .*ZeRO-3"),
        ({"fsdp": ["full_shard"]}, r"fsdp=\['full_shard'\] .*torchrun"),
    ],
)
def test_what_the_trainer_wraps_around_the_model_is_refused(given: dict[str, Any], said: str) -> None:
    model = llama()
    with pytest.raises(UsageError, match=said):
        SwapCallback(memory_gib=1.0).on_train_begin(SimpleNamespace(**given), None, None, model=model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="transformers' Trainer needs accelerate")
def test_the_trainer(tmp_path: Path) -> None:
    """Accelerate's optimizer skips steps between micro-batches. Its autocast is a forward of the model's instance."""

    def losses(*callbacks: SwapCallback) -> list[float]:
        transformers.set_seed(1)
        data = [{name: value[0] for name, value in text(step).items()} for step in range(2 * NUM_STEPS)]
        args = transformers.TrainingArguments(
            tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=NUM_STEPS, bf16=True,
            logging_steps=1, use_cpu=True, report_to=[], save_strategy="no", gradient_checkpointing=True,
            disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(llama(), args, train_dataset=data, callbacks=list(callbacks))
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    callback = SwapCallback(memory_gib=1e-4, **QUIET)
    assert losses(callback) == losses()
    assert callback.swapped is not None
    stats = callback.swapped.stats()
    assert (stats.stage, stats.num_steps) == ("stable", NUM_STEPS)
