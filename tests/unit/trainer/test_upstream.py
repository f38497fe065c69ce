"""What a run needs of upstream ends it if it does not fit; what it can do without is left out, with one line."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import attention
from torch import nn

from megatron.swap.common.types import PRODUCERS, UsageError
from megatron.swap.forecast.facts import MegatronFacts
from megatron.swap.megatron_lm.model_patches import patches_of_model
from megatron.swap.patches import registry, te_weight_copies
from megatron.swap.patches.registry import AppliedPatches, Patch, PatchError
from megatron.swap.trainer import prepare as preparation
from megatron.swap.trainer.command_line import swap_config
from megatron.swap.trainer.session import SwapSession, patches_of
from tests.unit.trainer.test_session import arguments

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="builds the emulated device")


@pytest.fixture
def unprepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which ``prepare`` has not run."""
    monkeypatch.setattr(preparation, "_applied", [])


@pytest.mark.usefixtures("unprepared")
@pytest.mark.parametrize("has_cuda", [True, False])
def test_patches_for_machines_without_cuda_never_stop_a_run_with_it(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool
) -> None:
    asked: dict[str, Sequence[Patch]] = {}

    def apply(needed: Sequence[Patch], optional: Sequence[Patch] = ()) -> AppliedPatches:
        asked.update(needed=needed, optional=optional)
        return AppliedPatches()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(registry, "apply", apply)
    preparation.prepare()
    assert bool(asked["needed"]) is not has_cuda
    assert all(patch.file.startswith("patches/cpu/") for patch in asked["needed"])
    assert not any(patch.file.startswith("patches/cpu/") for patch in asked["optional"])
    assert all(patch.feature for patch in asked["optional"])


def files(patches: Sequence[Patch]) -> set[str]:
    return {patch.file.removeprefix("patches/").removesuffix(".py") for patch in patches}


@pytest.mark.parametrize(
    ("flags", "kinds", "needs", "optional"),
    [
        ("--swap-summary x.json", (), {"train", "training_log"}, {"linear_weight_gradients"}),
        ("--swap-memory-gib 1", PRODUCERS, {"train", "training_log", "recompile_limit"},
         {"cross_entropy", "main_params", "linear_weight_gradients", "param_buffer", "fused_activations", "rotary"}),
        ("--swap-recompute rotary", ("rotary",), {"train", "training_log", "recompile_limit", "rotary"},
         {"cross_entropy", "main_params", "linear_weight_gradients", "param_buffer"}),
    ],
)  # fmt: skip
def test_what_a_run_needs(flags: str, kinds: tuple[str, ...], needs: set[str], optional: set[str]) -> None:
    args = arguments(*flags.split())
    patches = patches_of(MegatronFacts.of(vars(args)), swap_config(args), kinds, SimpleNamespace(**dict.fromkeys(
        ("hints", "on_begin", "on_finish", "on_iteration", "on_main_param_created", "on_optimizer_built")
    )))  # type: ignore[arg-type]  # fmt: skip
    assert (files(patches.needs), files(patches.optional)) == (needs, optional)
    assert all(patch.feature for patch in patches.optional)


def patches_in_8_bits(flags: str, monkeypatch: pytest.MonkeyPatch, has_gpu: bool = True, **changes: object) -> Any:
    """Return the patches of a model in 8 bits by TransformerEngine, unless ``changes`` say otherwise."""
    args = arguments(*flags.split())
    vars(args).update(
        fp8="hybrid", fp8_recipe="tensorwise", transformer_impl="transformer_engine", fp8_param_gather=False,
        apply_rope_fusion=True,
    )  # fmt: skip
    vars(args).update(changes)
    events = SimpleNamespace(around_checkpointed_forward=None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    return patches_of_model(MegatronFacts.of(vars(args)), swap_config(args), (), events)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "flags", "is_patched"),
    [({}, "--swap-layers all", True), ({"has_gpu": False}, "--swap-layers all", False),
     ({"transformer_impl": "local"}, "--swap-layers all", False), ({}, "--swap-summary x.json", False)],
)  # fmt: skip
@needs_no_gpu
def test_copies_of_weights_in_8_bits_have_memory_of_their_own(
    changes: dict, flags: str, is_patched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in runs that recompute nothing, and as patches that a run can do without."""
    patches = patches_in_8_bits(flags, monkeypatch, **changes)
    found = [patch for patch in patches.optional if patch.file == "patches/te_weight_copies.py"]
    assert len(found) == (len(te_weight_copies.MODULES) if is_patched else 0)
    assert "te_weight_copies" not in files(patches.needs)
    assert "te_quantize" not in files(patches.optional), "nothing is recorded that is not recomputed"
    assert ("rope_offsets" in files(patches.optional)) == is_patched


@pytest.mark.parametrize("is_fused", [True, False])
@needs_no_gpu
def test_fused_gradients_of_weights_without_copies_need_their_patch(
    is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    patches = patches_in_8_bits("--swap-fp8-weights recompute", monkeypatch, gradient_accumulation_fusion=is_fused)
    assert ("te_restored_weight" in files(patches.needs)) == is_fused


def of_another_source(function: Any) -> Any:
    def another(*given: Any, **named: Any) -> Any:
        return function(*given, **named)

    return another


@needs_no_gpu
def test_only_who_asks_for_rotary_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention, "apply_rotary_pos_emb", of_another_source(attention.apply_rotary_pos_emb))
    SwapSession.install(arguments("--swap-memory-gib", "1"), SimpleNamespace(pre_wrap_hooks=[])).close()
    lines = [line for line in capsys.readouterr().out.splitlines() if "without" in line]
    assert len(lines) == 1
    assert lines[0].startswith(" swap: without recomputation of rotary embeddings: patches/rotary.py")
    with pytest.raises(PatchError, match="Or run without recomputation of rotary embeddings"):
        SwapSession.install(arguments("--swap-recompute", "rotary"), SimpleNamespace(pre_wrap_hooks=[]))


@needs_no_gpu
def test_gradients_are_not_fused_where_they_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "LinearWithGradAccumulationAndAsyncCommunication"
    monkeypatch.setattr(layers, name, type(name, (getattr(layers, name),), {}))
    args, model_config = arguments("--swap-layers", "all"), SimpleNamespace(pre_wrap_hooks=[])
    model_config.gradient_accumulation_fusion = True
    session = SwapSession.install(args, model_config)
    try:
        assert not args.gradient_accumulation_fusion
        assert not model_config.gradient_accumulation_fusion
        chunk = nn.Linear(2, 2)
        chunk.config = SimpleNamespace(gradient_accumulation_fusion=True)  # type: ignore[assignment]
        with pytest.raises(UsageError, match="--no-gradient-accumulation-fusion"):
            session.attach([chunk])
        chunk.config = SimpleNamespace(gradient_accumulation_fusion=False)  # type: ignore[assignment]
        session.attach([chunk])
    finally:
        session.close()
