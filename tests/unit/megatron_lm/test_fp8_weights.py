"""``--swap-fp8-weights recompute``: layers are told to keep no copies, and told again at the end; what is refused."""

from __future__ import annotations

import re
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from megatron.swap.common.flags import settings_of
from megatron.swap.common.types import UsageError
from megatron.swap.forecast.facts import MegatronFacts
from megatron.swap.megatron_lm.fp8_weights import PACKAGE, recompute_weights
from megatron.swap.patches import registry, te_restored_weight
from megatron.swap.trainer.command_line import swap_config
from megatron.swap.trainer.fp8_weights import choose_fp8_weights
from tests.megatron_args import parsed

RECOMPUTE = "--swap-fp8-weights recompute"
IN_8_BITS = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": False,
             "transformer_impl": "transformer_engine"}  # fmt: skip


class Module(nn.Module):
    """As much of TransformerEngine's module as concerns its copies of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self._fp8_workspaces: dict[str, Any] = {"weight": "a copy"}

    @property
    def is_fsdp2(self) -> bool:
        if not hasattr(self, "_is_fsdp2"):
            self._is_fsdp2 = False
        return self._is_fsdp2


class Linear(Module):
    pass


class LayerNormLinear(Module):
    pass


class GroupedLinear(Module):
    pass


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    package = types.ModuleType(PACKAGE)
    package.Linear, package.LayerNormLinear = Linear, LayerNormLinear  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, PACKAGE, package)
    return package


def test_linear_layers_keep_no_copies_until_the_end(upstream: types.ModuleType) -> None:
    asked, fresh, of_fsdp2, experts = Linear(), LayerNormLinear(), Linear(), GroupedLinear()
    assert not asked.is_fsdp2
    of_fsdp2._is_fsdp2 = True
    keep = recompute_weights(nn.ModuleList([asked, fresh, of_fsdp2, experts]))
    assert [one.is_fsdp2 for one in (asked, fresh, of_fsdp2, experts)] == [True, True, True, False]
    assert not asked._fp8_workspaces
    assert experts._fp8_workspaces, "experts keep theirs"
    keep()
    assert [one.is_fsdp2 for one in (asked, fresh, of_fsdp2)] == [False, False, True]
    recompute_weights(nn.ModuleList([nn.Embedding(2, 2)]))()  # a stage without layers


def test_a_library_that_always_keeps_them_is_refused(upstream: types.ModuleType) -> None:
    upstream.Linear = nn.Linear  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"needs transformer_engine>=2\.17"):
        recompute_weights(nn.ModuleList([Linear()]))


H200, UNKNOWN = "NVIDIA H200", "NVIDIA T4"
OF_3_5B = (
    "--transformer-impl transformer_engine --bf16 --num-layers 16 --hidden-size 4096 --ffn-hidden-size 11008 --swiglu "
    "--num-attention-heads 32 --vocab-size 32000 --seq-length 4096 --micro-batch-size 4 --global-batch-size 8 "
    "--untie-embeddings-and-output-weights --disable-bias-linear --normalization RMSNorm --fp8-format hybrid "
    "--fp8-recipe tensorwise"
)


@pytest.mark.parametrize(
    ("ours", "gpu", "chosen"),
    [("--swap-memory-gib 78", H200, "recompute"), ("--swap-memory-fraction 0.55", H200, "recompute"),
     ("--swap-memory-gib 120", H200, "keep"), ("--swap-memory-gib 78", UNKNOWN, None),
     ("--swap-memory-gib 78", None, None), ("--swap-layers all", H200, None),
     ("--swap-memory-gib 78 --swap-fp8-weights keep", H200, "keep"),
     pytest.param("--swap-memory-gib 78 --swap-optimizer auto", H200, "recompute", marks=pytest.mark.slow),
     ("--swap-memory-gib 78 --num-experts 8", H200, None), ("--swap-memory-gib 78 --mtp-num-layers 1", H200, None),
     ("--swap-memory-gib 78 --pipeline-model-parallel-size 2", H200, None)],
)  # fmt: skip
def test_a_run_that_plans_itself_keeps_copies_or_not(
    ours: str, gpu: str | None, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By figures of the GPU; where the planner has none, or the user has said it, nothing changes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    total = types.SimpleNamespace(total_memory=int(139.8 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: total)
    monkeypatch.setattr(registry, "find_misfits", lambda patches: [])
    of_megatron = r"--(num-experts|mtp-num-layers|pipeline-model-parallel-size) \d"
    theirs = {"local_rank": 0, "world_size": 2 if "pipeline" in ours else 1, "gradient_accumulation_fusion": True}
    args = parsed(re.sub(of_megatron, "", ours), **IN_8_BITS | theirs)
    facts = MegatronFacts.of(vars(args))
    settings, line = choose_fp8_weights(facts, settings_of(args), f"{OF_3_5B} {ours}".split())
    assert settings.fp8_weights == chosen
    assert (line is not None) == (chosen == "recompute")


@pytest.mark.slow
def test_a_library_that_cannot_drop_copies_is_not_asked_to(
    upstream: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice is the planner's: it must not end a run that trains with copies."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: H200)
    ours = "--swap-memory-gib 78"

    def chosen(*, misfits: list[str], is_fused: bool) -> str | None:
        monkeypatch.setattr(registry, "find_misfits", lambda patches: misfits)
        settings = {"local_rank": 0, "world_size": 1, "gradient_accumulation_fusion": is_fused}
        args = parsed(ours, **IN_8_BITS | settings)
        facts = MegatronFacts.of(vars(args))
        return choose_fp8_weights(facts, settings_of(args), f"{OF_3_5B} {ours}".split())[0].fp8_weights

    assert chosen(misfits=[], is_fused=True) == "recompute"
    assert chosen(misfits=["a patch"], is_fused=True) is None
    assert chosen(misfits=["a patch"], is_fused=False) == "recompute"
    upstream.Linear = nn.Linear  # type: ignore[attr-defined]
    assert chosen(misfits=[], is_fused=False) is None


class Quantizer:
    """Makes copies of weights in the layouts that it was told to make."""

    def set_usage(self, *, rowwise: bool, columnwise: bool) -> None:
        self.layouts = (rowwise, columnwise)

    def __call__(self, weight: torch.Tensor) -> Any:
        return "copy", self.layouts, weight


class InEightBits(nn.Parameter):
    pass


def test_backward_has_a_copy_before_it_asks_for_the_gradients_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's ``main_grad_func() if weight is not None``: without the copy a fused gradient has no buffer."""
    name = te_restored_weight.PATCH.module
    for parent in ("transformer_engine", "transformer_engine.pytorch", name.rpartition(".")[0]):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    module = types.ModuleType(name)
    module.restore_from_func_ctx = lambda ctx: ctx.saved  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv(registry.UNCHECKED_VARIABLE, te_restored_weight.PATCH.symbol)

    def copy_of(copy: Any, weight: Any, quantizer: Any) -> Any:
        ctx = types.SimpleNamespace(saved=("input", copy, weight, "bias"), weight_quantizer=quantizer)
        before, found, *after = module.restore_from_func_ctx(ctx)
        assert (before, after) == ("input", [weight, "bias"])
        return found

    weight, in_8_bits = nn.Parameter(torch.ones(2)), InEightBits(torch.ones(2))
    with registry.apply([te_restored_weight.PATCH]):
        assert copy_of(None, weight, Quantizer()) == ("copy", (True, True), weight)
        assert copy_of("kept", weight, Quantizer()) == "kept"
        assert copy_of(None, in_8_bits, Quantizer()) is None, "the weight is its own copy"
        assert copy_of(None, weight, None) is None, "the layer is in bf16"


@pytest.mark.parametrize(
    ("others", "said"),
    [({"fp8": None}, "recompute needs --fp8-format:"), ({"transformer_impl": "local"}, "needs --transformer-impl"),
     ({"fp8_param_gather": True}, "with --fp8-param-gather: the weights themselves"),
     ({"fp8_recipe": "delayed"}, "with --fp8-recipe delayed: weights would enter"),
     ({"use_transformer_engine_op_fuser": True}, "with --use-transformer-engine-op-fuser: its layers keep copies."),
     ({"fp8_recipe": "mxfp8"}, "is made for --fp8-recipe tensorwise or blockwise, not mxfp8.")],
)  # fmt: skip
def test_what_has_no_copies_or_other_bits_is_refused(others: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        swap_config(parsed(RECOMPUTE, **IN_8_BITS | others))
    assert said in str(refused.value)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_it_is_a_setting_of_its_own(recipe: str) -> None:
    config = swap_config(parsed(RECOMPUTE, **IN_8_BITS | {"fp8_recipe": recipe}))
    assert config.recomputes_fp8_weights
    assert config.attaches
    assert not config.acts
    assert not swap_config(parsed("", **IN_8_BITS)).recomputes_fp8_weights
