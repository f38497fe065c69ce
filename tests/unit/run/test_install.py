"""``install`` on a model that exists: what it refuses, and that it leaves nothing behind."""

import copy
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron import swap
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron.swap.common.plan import PlanClass, SitePlan, load_plan, save_plan
from megatron.swap.common.types import UsageError
from megatron.swap.patches import cpu, registry

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="builds a model for machines without CUDA")
TOKENS = torch.arange(33)[None].expand(2, -1) % 64
POSITIONS = torch.arange(32)[None].expand(2, -1)
MASK = torch.ones(32, 32).triu(1).bool()[None, None]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SGD = torch.optim.SGD([nn.Parameter(torch.ones(1))])
SMALL = {"min_mib": 0.0001, "host_gib": 0.25, "host_unchecked": True, "log_level": "quiet"}


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    """A process group of one rank, and torch.cuda's calls in Megatron."""
    with registry.apply(cpu.CORE_PATCHES):
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        yield
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def config_of(**options: Any) -> TransformerConfig:
    return TransformerConfig(
        hidden_size=32, num_attention_heads=4, use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False, bias_dropout_fusion=False,
        bias_activation_fusion=False, persist_layer_norm=False, **{"num_layers": 4, **options},
    )  # fmt: skip


def model_of(**options: Any) -> GPTModel:
    return GPTModel(config_of(**options), get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=64)


def model_with(**options: Any) -> GPTModel:
    """Return a model whose config says what its layers need TransformerEngine or a GPU for."""
    model = model_of()
    vars(model.config).update(options)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(TOKENS[:, :-1], POSITIONS, MASK, labels=TOKENS[:, 1:]).mean().backward()
        optimizer.step()


def untouched(model: nn.Module) -> bool:
    return not any("forward" in vars(module) or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "nothing is to be swapped. Give memory_gib, layers or plan"),
        ({"layers": "0-9"}, "layers='0-9'"),
        ({"layers": "all", "memory_gib": 1.0}, "cannot be combined"),
        ({"memory_gib": 1e6}, "memory_gib=1e\\+06: must be at most what the device has"),
        ({"plan": "nowhere.json"}, "nowhere.json"),
        ({"layers": "all", "config": {"min_mb": 1}}, "min_mb: there is no such setting. The nearest is min_mib"),
        ({"layers": "all", "config": {"min_mib": "few"}}, r'config\["min_mib"\]=.few.: must be a number of MiB'),
        ({"layers": "all", "config": {"summary": "x.json"}}, "summary: is a setting of runs of Megatron's trainer"),
        ({"layers": "all", "config": {"modules": ["mlpp"]}}, "'mlpp' is not a submodule"),
        ({"layers": "all", "config": {"optimizer": 0.5}}, "optimizer 0.5: there is no optimizer"),
        ({"layers": [0, None]}, "must be text .* or numbers"),
        ({"layers": "0-1", "config": {"layers": "2"}}, "layers is given twice"),
        ({"layers": "all", "config": "min_mib"}, "config 'min_mib': must be a mapping"),
        ({"layers": "all", "config": {"oom_guard": "yes"}}, "oom_guard: 'yes' is given; it must be True or False"),
        ({"memory_gib": -1e-5}, "memory_gib=-1e-05: must be a number of GiB above 0"),
        ({"layers": "all", "optimizer": [1]}, "optimizer: list has no step. Pass the optimizer that was made for"),
        ({"layers": "all", "optimizer": SGD}, "optimizer: SGD steps 1 parameters, and none of them is this model's"),
        ({"layers": "all", "optimizer": torch.optim.SGD}, "optimizer: SGD is a class"),
    ],
)
def test_refused_arguments(arguments: Mapping[str, Any], words: str) -> None:
    model, before = model_of(), set(registry._in_place)
    with pytest.raises(UsageError, match=words) as found:
        swap.install(model, **arguments)
    assert "--swap-" not in str(found.value)
    assert untouched(model)
    assert set(registry._in_place) == before


def hybrid_stack() -> nn.Module:
    """Return the stack of a hybrid model, of attention and MLP: Mamba's kernels need a GPU."""
    layer = get_gpt_layer_local_spec()
    return MambaStack(
        config_of(), MambaStackSubmodules(attention_layer=layer, mlp_layer=layer), layer_type_list=["*", "-"],
        post_layer_norm=False, pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )  # fmt: skip


class FullyShardedDataParallel(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2)), "Sequential has no TransformerBlock of Megatron.*swap.activations"),
        (lambda: None, "NoneType is no module. Pass this rank's model chunks"),
        (lambda: FullyShardedDataParallel(model_of()), "wrapped in FullyShardedDataParallel"),
        (lambda: model_with(cpu_offloading=True, cpu_offloading_num_layers=1), "--cpu-offloading-num-layers 1"),
        (lambda: model_with(cuda_graph_impl="local"), "--cuda-graph-impl local: a captured layer"),
        (lambda: model_with(overlap_moe_expert_parallel_comm=True), "--overlap-moe-expert-parallel-comm: layers run"),
        (hybrid_stack, r"the model is a (Hybrid|Mamba)Stack of 2 layers, which is not swapped"),
        (lambda: model_of(**FULL), "cannot be combined with --recompute-granularity full"),
    ],
    ids=["other", "none", "fsdp", "megatrons-offload", "graphs", "layers-in-parts", "hybrid", "full-recomputation"],
)
def test_refused_models(model: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        swap.install(model(), memory_gib=0.01, config=SMALL)


class OwnBlock(TransformerBlock):
    """As mcore-bridge's block: full recomputation is a method, which Megatron's function does not call."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor, **options: Any) -> Any:
        return self.final_layernorm(self._checkpointed_forward(hidden_states, attention_mask))

    def _checkpointed_forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = tensor_parallel.checkpoint(lambda x, layer=layer: layer(x, mask)[0], False, hidden)
        return hidden


def test_full_recomputation_may_be_a_method_of_the_block() -> None:
    model = model_of(**FULL)
    model.decoder.__class__ = OwnBlock
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with swap.install(model, optimizer, layers="all", config=SMALL) as swapped:
        train(model, optimizer, 2)
        assert swapped.stats().out_bytes > 0
    assert "_checkpointed_forward" not in vars(model.decoder)


def test_a_checkpoint_that_is_not_megatrons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As verl's, whose backward empties saved inputs: nothing is recomputed through it."""
    theirs = tensor_parallel.random.CheckpointFunction.backward

    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return theirs(ctx, *gradients)

    monkeypatch.setattr(tensor_parallel.random.CheckpointFunction, "backward", staticmethod(backward))
    with pytest.raises(UsageError, match=f"needs Megatron's checkpoint, whose backward {__name__} has replaced"):
        swap.install(model_of(**FULL), layers="all", config=SMALL)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    saved = str(tmp_path / "plan.json")
    with swap.install(model, optimizer, layers="all", config=SMALL | {"save_plan": saved}):
        train(model, optimizer, 2)
    plan = load_plan(saved)
    own = replace(plan, classes=(replace(plan.classes[0], sections=("layer",)), *plan.classes[1:]))
    save_plan(own, saved)
    with pytest.raises(UsageError, match="which is to be recomputed whole, needs Megatron's checkpoint"):
        swap.install(model, optimizer, plan=saved, config=SMALL)


def test_a_plan_is_written_and_carried_out(tmp_path: Path) -> None:
    """Its model knows the batches only once they were seen."""
    path = str(tmp_path / "plan.json")
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with swap.install(model, optimizer, layers="0-1", config=SMALL | {"save_plan": path}):
        train(model, optimizer, 2)
    with swap.install(model, optimizer, plan=path, config=SMALL) as swapped:
        train(model, optimizer)
    assert swapped.stats().out_bytes > 0
    longer = torch.arange(64)[None] % 64
    with (
        pytest.raises(UsageError, match="seq_length is 32 there, 64 here"),
        swap.install(model, optimizer, plan=path, config=SMALL),
    ):
        model(longer, torch.arange(64)[None], torch.ones(64, 64).triu(1).bool()[None, None], labels=longer)
    with pytest.raises(UsageError, match="made for another model: num_layers is 4 there"):
        swap.install(model_of(num_layers=3), plan=path)


@pytest.mark.parametrize("action", ["keep", "swap"])
def test_a_layer_that_runs_again_and_whose_input_needs_no_gradient_any_more(tmp_path: Path, action: str) -> None:
    """As where word embeddings are frozen, at a step or in a batch without images. Its weights are still trained."""
    path = str(tmp_path / "plan.json")
    plain, model = model_of(), model_of()
    with swap.install(model, layers="all", config=SMALL | {"save_plan": path}):
        train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
    plain.load_state_dict(model.state_dict())
    sites = {"checkpoint/0": SitePlan(action)}  # type: ignore[arg-type]
    save_plan(replace(load_plan(path), classes=(PlanClass("0-3", sites, ("layer",)),)), path)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (plain, model)]
    with swap.install(model, optimizers[1], plan=path, config=SMALL | {"verify": True}) as swapped:
        for step in range(3):
            for one, optimizer in zip((plain, model), optimizers, strict=True):
                one.embedding.requires_grad_(step != 1)
                train(one, optimizer)
            assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert (swapped.stats().out_bytes > 0) == (action == "swap")


def test_a_model_swaps_once(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    swapped = swap.install(model, optimizer, layers="all", config=SMALL)
    with pytest.raises(UsageError, match=r"this model or its optimizer swaps already. Call close\(\)"):
        swap.install(model, optimizer, layers="all", config=SMALL)
    for copied in copy.deepcopy, pickle.dumps, torch.optim.swa_utils.AveragedModel:
        with pytest.raises(UsageError, match="neither copied nor pickled"):
            copied(model)
    train(model, optimizer)
    swapped.close()
    assert untouched(model)
    assert "__reduce_ex__" not in vars(model)
    caplog.clear()  # Megatron's own
    with swap.install(model, optimizer, layers="all", config=SMALL | {"log_level": "info"}):
        train(model, optimizer)
    assert caplog.messages[0] == "chosen           layers 0-3 of 4: all modules"
    assert capfd.readouterr() == ("", "")


def test_only_optimizers_of_the_model_end_its_steps() -> None:
    model, other = model_of(), nn.Linear(2, 2)
    optimizer, others = (torch.optim.SGD(one.parameters(), 0.1) for one in (model, other))
    with swap.install(model, layers="all", config=SMALL) as swapped:
        for _ in range(3):
            for _ in range(2):  # micro-batches
                model(TOKENS[:, :-1], POSITIONS, MASK, labels=TOKENS[:, 1:]).mean().backward()
                other(torch.ones(2)).sum().backward()
                others.step()
            optimizer.step()
    assert swapped.stats().num_steps == 2  # the third ends with the next forward
