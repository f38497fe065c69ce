"""The registry: patches are applied together or not at all, are reverted completely, and report what does not fit."""

import importlib
import re
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from megatron.swap.cli import doctor
from megatron.swap.common.types import UsageError
from megatron.swap.patches import (
    checkpointed_forward,
    compile_helpers,
    empty_part,
    fused_activations,
    get_megatron_optimizer,
    linear_weight_gradients,
    main_params,
    param_buffer,
    recompile_limit,
    rope_offsets,
    train,
    training_log,
)
from megatron.swap.patches.cpu import CPU_PATCHES
from megatron.swap.patches.registry import (
    BUILT_ONLY,
    UNCHECKED_VARIABLE,
    VERSIONS,
    Patch,
    PatchError,
    apply,
    lost_features,
    source_hash,
    verify,
)
from megatron.swap.trainer.inputs import refuse_empty_part
from tests.pages import ROOT


class Base:
    def inherited(self) -> str:
        return "base"


class Thing(Base):
    @staticmethod
    def static() -> str:
        return "original"


def function() -> str:
    return "original"


@pytest.fixture
def upstream() -> Iterator[types.ModuleType]:
    module = types.ModuleType("an_upstream")
    module.function, module.other, module.Thing = function, function, Thing  # type: ignore[attr-defined]
    sys.modules["an_upstream"] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VERSIONS, "upstream", ("1.0", "1.1"))
        yield module
    del sys.modules["an_upstream"]


def replace_by(text: str) -> Callable[[Any], Any]:
    return lambda original: lambda *arguments: text


def make(attribute: str, *hashes: str, text: str = "patched", feature: str = "") -> Patch:
    sources = {f"upstream 1.{minor}": source for minor, source in enumerate(hashes or [None])}
    return Patch("an_upstream", attribute, replace_by(text), "a reason", sources, feature)


def test_apply_and_revert(upstream: Any) -> None:
    static = vars(Thing)["static"]
    attributes = ["function", "Thing.static", "Thing.inherited"]
    applied = apply([make("function", source_hash(function)), *map(make, attributes[1:])])
    assert upstream.function() == Thing().inherited() == Thing.static() == "patched"
    assert applied.symbols == tuple(f"an_upstream.{attribute}" for attribute in attributes)
    applied.revert()
    assert upstream.function is function
    assert vars(Thing)["static"] is static
    assert "inherited" not in vars(Thing)
    applied.revert()  # nothing left to do


def test_torchs_own_settings_come_back() -> None:
    settings = importlib.import_module("torch._dynamo.config")
    for users, ours in ((8, 64), (100, 100)):
        with settings.patch(recompile_limit=users):
            with apply([recompile_limit.PATCH]):
                assert settings.recompile_limit == ours
            assert settings.recompile_limit == users


OTHER = "0" * 64
"""A hash of no source."""


def test_all_symbols_that_do_not_fit_are_named_before_anything_is_changed(upstream: Any) -> None:
    upstream.third = lambda: "third"
    patches = [make("other"), make("function", OTHER), make("third", OTHER, "1" * 64)]
    with pytest.raises(PatchError) as error:
        apply(patches)
    first, *others = str(error.value).splitlines()
    assert "this upstream" in first
    assert not re.search(r"[0-9a-f]{64}", first)
    for symbol in ("an_upstream.function", "an_upstream.third"):
        assert any(symbol in line and "a reason" in line and "tests/unit/test_patches.py" in line for line in others)
    for part in (
        "upstream==1.1 (1.0 fit too)",
        f"{UNCHECKED_VARIABLE}=an_upstream.function,an_upstream.third",
        source_hash(function),
    ):
        assert part in others[-1]
    assert upstream.other is function


def test_a_run_goes_on_without_optional_patches_that_do_not_fit(upstream: Any) -> None:
    optional = [
        make("function", OTHER, feature="one thing"), make("missing", feature="one thing"),
        make("Thing.static", OTHER, feature="another"), make("Thing.inherited", feature="a third"),
    ]  # fmt: skip
    with apply([make("other")], optional) as applied:
        assert upstream.other() == Thing().inherited() == "patched"
        assert (upstream.function, Thing.static()) == (function, "original")
        one, another = lost_features(applied.left_out)
    assert one.startswith("without one thing: ")
    assert "upstream's function, missing" in one
    assert another.startswith("without another: ")
    assert upstream.other is function


@pytest.mark.parametrize("number", [1, 2], ids=["in two calls", "in one"])
def test_a_symbol_is_patched_once(upstream: Any, number: int) -> None:
    with (
        apply([make("function")] if number == 1 else []),
        pytest.raises(PatchError, match=re.escape("an_upstream.function is patched already")),
    ):
        apply([make("function", text="again")] * number)
    assert upstream.function is function
    apply([make("function")]).revert()


@pytest.mark.parametrize("attribute", ["missing", "Thing.missing", "missing.deeper"])
def test_a_missing_symbol_is_named(upstream: Any, attribute: str) -> None:
    with pytest.raises(PatchError, match=rf"(?s)an_upstream.{attribute} \(does not exist here.*upstream==1.1") as error:
        verify([make(attribute), make("function", OTHER)])
    assert UNCHECKED_VARIABLE not in str(error.value)
    assert "an_upstream.function (differs)" in str(error.value)


def test_a_failing_build_leaves_nothing_behind(upstream: Any) -> None:
    def fail(original: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        apply([make("other"), Patch("an_upstream", "function", fail, "", {"upstream 1.1": None})])
    assert upstream.other is function
    apply([make("other")]).revert()


ALL = (
    compile_helpers.PATCH,
    empty_part.empty_part_patch(refuse_empty_part),
    train.train_patch(lambda: None, lambda failure, model, optimizer: None),
    training_log.training_log_patch(lambda **news: None),
    checkpointed_forward.checkpointed_forward_patch(lambda block: nullcontext()),
    *fused_activations.fused_activations_patches(lambda function: function),
    linear_weight_gradients.PATCH,
    *main_params.main_params_patches(lambda param: None),
    param_buffer.param_buffer_patch(lambda params, num_bytes: nullcontext()),
    get_megatron_optimizer.get_megatron_optimizer_patch(lambda optimizer: None),
    *CPU_PATCHES,
)


def test_our_patches_fit_the_installed_upstream() -> None:
    verify(ALL)
    for patch in ALL:
        assert patch.reason
        if patch.module.startswith("megatron.") and patch.attribute != "print":
            assert None not in patch.sources.values(), f"{patch.symbol} has no source hash"


def test_the_versions_that_fit_are_required_and_tested() -> None:
    known = VERSIONS["megatron-core"]
    assert known == doctor.TESTED_MEGATRON_CORE
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of_megatron = project["optional-dependencies"]["megatron"]
    (required,) = (one for one in map(Requirement, of_megatron) if one.name == "megatron-core")
    assert BUILT_ONLY == doctor.BUILT_ONLY_MEGATRON_CORE
    assert all(version in required.specifier for version in (*BUILT_ONLY, *known))
    assert not any(version in required.specifier for version in ("0.16.0", "0.17.0", "0.18.0", "0.20.0"))
    assert f"\nmegatron-core=={known[-1]} " in (ROOT / "requirements.txt").read_text()


@pytest.mark.parametrize("patch", rope_offsets.PATCHES, ids=["sbhd", "thd"])
def test_rotary_embedding_of_too_many_values_is_refused(patch: Patch) -> None:
    too_long = torch.empty(2**31 + 1, dtype=torch.int8, device="meta").unsqueeze(1)
    with pytest.raises(ValueError, match="Add --no-rope-fusion"):
        patch.build(lambda t: t)(too_long)
    assert rope_offsets.last_offset(torch.empty(3, 1, 8)[..., :6]) == 21


def test_both_rotary_embeddings_are_reached_where_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's own function, with a stand-in for TransformerEngine's kernels: unpacked, and packed documents."""
    from megatron.core.models.common.embeddings import rope_utils

    seen: list[tuple[str, Any]] = []
    for patch in rope_offsets.PATCHES:
        stand_in = partial(lambda name, t, *rest, **more: seen.append((name, t)), patch.attribute)
        monkeypatch.setattr(rope_utils, patch.attribute, stand_in)
        monkeypatch.setenv(UNCHECKED_VARIABLE, ",".join(one.symbol for one in rope_offsets.PATCHES))
    monkeypatch.setattr(rope_offsets, "MOST_OFFSET", 200)
    config = types.SimpleNamespace(apply_rope_fusion=True, rotary_interleaved=False, mrope_section=None)
    group = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    keys = torch.empty(8, 1, 3, 16)[:, :, 1]
    with apply(rope_offsets.PATCHES):
        for given, documents in ((keys.unsqueeze(2), None), (keys, torch.tensor([0, 3, 8]))):
            rope_utils.apply_rotary_pos_emb(given, torch.empty(8, 1, 1, 16), config, documents, cp_group=group)
    assert [name for name, _ in seen] == [patch.attribute for patch in rope_offsets.PATCHES]
    assert all(tensor.is_contiguous() for _, tensor in seen), "copied, since 7 strides of 48 are more than 200"


@pytest.mark.skipif(torch.cuda.is_available(), reason="patches for machines without CUDA")
def test_cpu_patches_come_out_without_a_trace() -> None:
    names = [patch.attribute for patch in CPU_PATCHES if patch.module == "torch.cuda"]
    before = {name: getattr(torch.cuda, name) for name in names}
    tensor_attributes = set(vars(torch.Tensor))
    with apply(CPU_PATCHES):
        assert torch.zeros(1, device="cuda").cuda().type() == "torch.cuda.FloatTensor"
        assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(1).type(torch.float64).dtype is torch.float64
        assert not torch.cuda.is_available()
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert before == {name: getattr(torch.cuda, name) for name in names}
    assert set(vars(torch.Tensor)) == tensor_attributes


def test_data_without_tokens_ends_the_run() -> None:
    """Megatron would add nothing to nothing until it is enough."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, Split

    config = types.SimpleNamespace(split="1,1", sequence_length=4, add_extra_token_to_sequence=1)
    part = types.SimpleNamespace(
        config=config, dataset_path="some/data", index_split=Split.valid, indices=[], num_samples=2
    )
    with apply([empty_part.empty_part_patch(refuse_empty_part)]):
        assert GPTDataset._get_num_epochs(part, 3) == 3
        with pytest.raises(UsageError, match=r"some/data: the part for valid has 0 documents, by the split 1,1, and"):
            GPTDataset._get_num_epochs(part, 0)


def test_main_parameters_are_copied_once() -> None:
    """A 16-bit parameter is not cloned before it is copied in single precision. Every other clone stays a clone."""
    parameter = torch.nn.Parameter(torch.randn(8, dtype=torch.bfloat16))
    made: list[torch.Tensor] = []

    def as_megatron_does() -> tuple[torch.Tensor, torch.Tensor]:
        made.append(parameter.detach().clone())
        return made[0].float(), torch.ones(2).clone()

    created: list[torch.Tensor] = []
    main, other = main_params._build(as_megatron_does, created.append)()
    assert created == [main]
    assert made[0].data_ptr() == parameter.data_ptr() != main.data_ptr()
    assert torch.equal(main, parameter.float())
    assert torch.equal(other, torch.ones(2))
    assert parameter.detach().clone().data_ptr() != parameter.data_ptr()
