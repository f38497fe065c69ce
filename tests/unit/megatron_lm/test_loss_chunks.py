"""``--swap-loss-chunks``: which models and flags run in chunks, how many, and what is told; nothing is left behind."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import nn

from megatron.swap.common.plan import Model
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import UsageError
from megatron.swap.megatron_lm.loss_chunks import DeferredLogits, chunk_loss
from megatron.swap.megatron_lm.run_loss import RunLoss
from megatron.swap.trainer.command_line import swap_config
from tests.megatron_args import parsed


def output_layer(num_ranks: int = 1, **more: Any) -> ColumnParallelLinear:
    """Return an output layer that was not built: the seam reads its attributes alone."""
    layer = ColumnParallelLinear.__new__(ColumnParallelLinear)
    nn.Module.__init__(layer)
    layer.weight = nn.Parameter(torch.zeros(8, 4))
    group = SimpleNamespace(size=lambda: num_ranks)
    usual = {"bias": None, "gather_output": False, "grad_output_buffer": None, "tp_group": group}
    for name, value in (usual | more).items():
        setattr(layer, name, value)
    return layer


class End(nn.Module):
    """A model's end."""

    def __init__(self, layer: nn.Module | None, *, post_process: bool = True) -> None:
        super().__init__()
        self.post_process = post_process
        if layer is not None:
            self.output_layer = layer

    def compute_language_model_loss(self, labels: Any, logits: Any) -> tuple[Any, Any]:
        return labels, logits


def test_nothing_is_left_on_the_model_and_other_logits_are_megatrons() -> None:
    model, stage = End(output_layer()), End(None, post_process=False)
    undo = chunk_loss(model, lambda: 2)
    logits = torch.zeros(1)
    assert model.compute_language_model_loss("labels", logits) == ("labels", logits)
    assert isinstance(model.output_layer(torch.zeros(3, 1, 4))[0], DeferredLogits)
    undo()
    assert "forward" not in vars(model.output_layer)
    chunk_loss(stage, lambda: 2)()
    assert not any("compute_language_model_loss" in vars(one) for one in (model, stage))


def test_generation_gathers_the_words_of_all_ranks() -> None:
    layer = output_layer(num_ranks=2)
    layer.forward = lambda hidden, **options: (hidden, options)  # type: ignore[assignment]
    chunk_loss(End(layer), lambda: 2)
    hidden, options = torch.zeros(3, 1, 4), {"weight": None, "runtime_gather_output": True}
    assert layer(hidden, **options) == (hidden, options)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: End(None), "End has no output_layer, as"),
        (lambda: End(nn.Linear(1, 1)), "is a Linear; it must be Megatron's ColumnParallelLinear"),
        (lambda: End(output_layer(bias=torch.zeros(8))), "has a bias, which does not run in chunks"),
        (lambda: End(output_layer(2, gather_output=True)), "gathers the words of all tensor-parallel ranks"),
        (lambda: End(output_layer(grad_output_buffer=[])), "--defer-embedding-wgrad-compute"),
    ],
)
def test_models_that_are_refused(make: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        chunk_loss(make(), lambda: 2)
    assert str(refused.value).endswith("Drop --swap-loss-chunks.")


@pytest.mark.parametrize(
    ("flags", "theirs", "why"),
    [
        ("0", {}, "--swap-loss-chunks 0: must be 1 to 1024, or auto"),
        ("4", {"use_megatron_fsdp": True}, "cannot be combined with --use-megatron-fsdp"),
        ("auto", {"cuda_graph_impl": "full_iteration"}, "auto cannot be combined with --cuda-graph-impl full_iter"),
    ],
)
def test_flags_that_are_refused(flags: str, theirs: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        swap_config(parsed(f"--swap-loss-chunks {flags}", **theirs))


@pytest.mark.parametrize(("given", "found"), [("1024", 1024), ("auto", "auto")])
def test_settings(given: str, found: object) -> None:
    config = swap_config(parsed(f"--swap-loss-chunks {given}"))
    assert (config.loss_chunks, config.attaches, config.does_anything, config.acts) == (found, True, True, False)


MODEL = Model(32, 4096, 14336, 32, 8, 8192, 1, 128256, "transformer_engine", "bf16", gated=True)


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
        ({}, MODEL, 80.0, "the loss takes 2.57 GiB. --swap-loss-chunks 11 would take 675 MiB and compute the logits"),
        ({}, MODEL, 400.0, None),
        ({}, replace(MODEL, padded_vocab_size=1024), 80.0, None),
    ],
)  # fmt: skip
def test_the_line(settings: dict[str, object], model: Model, budget_gib: float | None, line: str | None) -> None:
    loss = RunLoss(Settings(**settings), lambda: model, lambda: False)  # type: ignore[arg-type]
    said = loss.step_ended(budget_gib)
    assert (said is None) == (line is None), said
    assert line is None or line in str(said)
    assert loss.step_ended(budget_gib) is None, "said once"
