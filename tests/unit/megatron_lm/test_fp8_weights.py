"""``--swap-fp8-weights recompute``: layers are told to keep no copies, and told again at the end; what is refused."""

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
from megatron.swap.patches import registry
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


Linear, LayerNormLinear, GroupedLinear = (
    type(name, (Module,), {}) for name in ("Linear", "LayerNormLinear", "GroupedLinear")
)


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
    [pytest.param("--swap-memory-gib 78", H200, "recompute", marks=pytest.mark.slow),
     ("--swap-memory-gib 120", H200, "keep"),
     ("--swap-memory-gib 78", UNKNOWN, None), ("--swap-layers all", H200, None),
     ("--swap-memory-gib 78 --swap-fp8-weights keep", H200, "keep"),
     ("--swap-memory-gib 78 --num-experts 8", H200, None)],
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
    theirs = {"local_rank": 0, "world_size": 1, "gradient_accumulation_fusion": True}
    args = parsed(ours.removesuffix("--num-experts 8"), **IN_8_BITS | theirs)
    facts = MegatronFacts.of(vars(args))
    settings, line = choose_fp8_weights(facts, settings_of(args), f"{OF_3_5B} {ours}".split())
    assert settings.fp8_weights == chosen
    assert (line is not None) == (chosen == "recompute")


@pytest.mark.parametrize(
    ("others", "said"),
    [({"fp8": None}, "recompute needs --fp8-format:"), ({"transformer_impl": "local"}, "needs --transformer-impl"),
     ({"fp8_param_gather": True}, "with --fp8-param-gather: the weights themselves"),
     ({"fp8_recipe": "delayed"}, "with --fp8-recipe delayed: weights would enter"),
     ({"fp8_recipe": "mxfp8"}, "is made for --fp8-recipe tensorwise or blockwise, not mxfp8.")],
)  # fmt: skip
def test_what_has_no_copies_or_other_bits_is_refused(others: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        swap_config(parsed(RECOMPUTE, **IN_8_BITS | others))
    assert said in str(refused.value)


def test_it_is_a_setting_of_its_own() -> None:
    config = swap_config(parsed(RECOMPUTE, **IN_8_BITS))
    assert (config.recomputes_fp8_weights, config.attaches, config.acts) == (True, True, False)
    assert not swap_config(parsed("", **IN_8_BITS)).recomputes_fp8_weights
