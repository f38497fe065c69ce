"""The settings: what is allowed, and that errors name the flag, the value and the remedy."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.swap.common.layer_ranges import MOST_LAYERS, format_ranges, parse_ranges
from megatron.swap.common.plan import Plan
from megatron.swap.common.settings import Settings, parse_layers
from megatron.swap.common.types import GIB, UsageError
from megatron.swap.forecast.facts import MegatronFacts
from megatron.swap.megatron_lm.checks import _check_recompute
from tests.unit.planner.cases import model


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("none", []),
        ("all", range(24)),
        ("0-23", range(24)),
        ("0", [0]),
        ("0,4-7", [0, 4, 5, 6, 7]),
        (" 3 - 5 , 1 ", [1, 3, 4, 5]),
        ("2,2,1-3", [1, 2, 3]),
        ("every:1", range(24)),
        ("every:10", [0, 10, 20]),
        ("every:99", [0]),
    ],
)
def test_layers_are_parsed(text: str, layers: list[int]):
    assert parse_layers(text, 24) == frozenset(layers)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("24", ["24", "0 to 23"]),
        ("0-99999999999999999999", ["layer 24 is out of range, allowed are 0 to 23"]),
        ("99999999999999999999", ["layer 99999999999999999999 is out of range"]),
        ("0-30", ["24", "0 to 23"]),
        ("5-3", ["5-3", "backwards", "3-5"]),
        ("a", ["'a'", "0-23 | 0,4-7 | every:2 | all | none"]),
        ("1,,2", ["''", "every:2"]),
        ("", ["''"]),
        ("-1", ["'-1'"]),
        ("1-2-3", ["'1-2-3'"]),
        ("ALL", ["'ALL'"]),
        ("every:0", ["every:0", "at least 1"]),
        ("every:-1", ["every:-1"]),
        ("every:", ["every:"]),
    ],
)
def test_a_wrong_list_of_layers_is_refused_with_words(text: str, words: list[str]):
    with pytest.raises(UsageError) as error:
        parse_layers(text, 24)
    assert all(word in str(error.value) for word in ["--swap-layers", *words])


@given(st.sets(st.integers(0, MOST_LAYERS - 1), min_size=1))
def test_layers_round_trip(layers: set[int]) -> None:
    assert parse_ranges(format_ranges(layers), "here", "0-9") == layers


@given(st.text(max_size=12), st.integers(1, 8))
def test_no_text_is_read_out_of_range_or_breaks_the_parser(text: str, num_layers: int):
    try:
        layers = parse_layers(text, num_layers)
    except UsageError:
        return
    assert layers <= set(range(num_layers))


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("min_mib", -0.5, "--swap-min-mib"),
        ("host_gib", 0, "--swap-host-gib"),
        ("host_gib", -1, "--swap-host-gib"),
        ("prefetch_gib", 0.0, "--swap-prefetch-gib"),
        ("cpu_delay_ms", -1, "--swap-cpu-delay-ms"),
        ("cpu_memory_gib", 0, "--swap-cpu-memory-gib"),
        ("cpu_memory_gib", float("nan"), "--swap-cpu-memory-gib"),
        ("log_level", "loud", "--swap-log-level"),
        ("min_mib", float("nan"), "--swap-min-mib"),
        ("min_mib", 1e308, "--swap-min-mib"),
        ("host_gib", 1e308, "--swap-host-gib"),
        ("prefetch_gib", 1e308, "--swap-prefetch-gib"),
        ("cpu_delay_ms", 1e308, "--swap-cpu-delay-ms"),
        ("cpu_delay_ms", 1000.1, "--swap-cpu-delay-ms"),
    ],
)
def test_a_value_out_of_range_names_its_flag(field: str, value: object, flag: str):
    with pytest.raises(UsageError, match=flag) as error:
        Settings(**{field: value})
    assert str(value) in str(error.value)


@pytest.mark.parametrize("other", ["plan.json", "./plan.json", "a/../plan.json", "link.json"])
@pytest.mark.parametrize(("flag", "field"), [("--swap-save-profile", "save_profile"), ("--swap-summary", "summary")])
def test_one_file_for_two_is_refused(
    other: str, flag: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "plan.json")
    with pytest.raises(UsageError, match=f"{flag} {other}: must be another file than that of --swap-save-plan"):
        Settings(policy="auto", save_plan="plan.json", **{field: other})
    Settings(policy="auto", save_plan="plan.json", **{field: "other.json"})


def test_where_no_file_can_be_made_is_told_at_once():
    """File permissions are no sufficient test: root has all of them in /proc."""
    with pytest.raises(UsageError, match=r"--swap-save-plan /proc/x/plan.json: must be a file that can be written"):
        Settings(policy="auto", save_plan="/proc/x/plan.json")


def test_bounds_are_allowed_and_nothing_changes_afterwards():
    config = Settings(layers="1", min_mib=0, host_gib=0.1, prefetch_gib=0.1, cpu_delay_ms=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.min_mib = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("auto", "users", "plans", "window_gib"),
    [
        (False, None, None, None),  # the engine's own
        (False, 2.0, None, 2.0),
        (True, None, None, 0.0),  # while steps are measured
        (True, 2.0, None, 2.0),
        (True, None, 0.5, 0.5),
        (True, 2.0, 0.5, 2.0),
    ],
)
def test_whose_window_counts(auto: bool, users: float | None, plans: float | None, window_gib: float | None):
    config = Settings(prefetch_gib=users, memory_gib=80.0 if auto else None)
    plan = None if plans is None else Plan(model(8), None, None, None, (), plans)
    assert config.window_bytes(plan) == (None if window_gib is None else window_gib * GIB)


def test_a_kind_that_cannot_be_recomputed_is_named():
    assert Settings(recompute=("norm", "activation")).acts
    assert not Settings().acts
    kinds = "norm or activation or rotary or quantized or residual or linear"
    with pytest.raises(UsageError, match=f"--swap-recompute dropout: must be {kinds}"):
        Settings(recompute=("norm", "dropout"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fp8": "hybrid"}, ["--fp8-recipe delayed", "scaling factors", "Drop linear"]),
        ({"fp8": "hybrid", "fp8_recipe": "custom"}, ["--fp8-recipe custom", "scaling factors"]),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, []),
        ({"fp4": "e2m1"}, ["--fp4-format e2m1", "scaling factors"]),
        ({"sequence_parallel": True, "tensor_model_parallel_size": 2}, ["--sequence-parallel", "from all ranks"]),
        ({"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}, ["--recompute-modules layernorm"]),
        ({}, []),
        ({"sequence_parallel": True}, []),
        ({"tensor_model_parallel_size": 2}, []),
    ],
)
def test_what_a_linear_layer_that_runs_again_would_disturb(changes: dict, words: list[str]):
    facts = MegatronFacts.of(
        {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8, "micro_batch_size": 1,
         "hidden_dropout": 0.0, **changes}
    )  # fmt: skip
    if words:
        with pytest.raises(UsageError) as refusal:
            _check_recompute(facts, ("linear",))
        assert [word for word in words if word not in str(refusal.value)] == []
    else:
        _check_recompute(facts, ("linear",))
    _check_recompute(facts, ("rotary",))
    of_sum = changes.get("tensor_model_parallel_size", 1) > 1 or bool(words and "recompute_modules" not in changes)
    with pytest.raises(UsageError, match="Drop residual") if of_sum else contextlib.nullcontext():
        _check_recompute(facts, ("residual",))
    if "fp8" not in changes:
        with pytest.raises(UsageError, match=r"without --fp8-format. Add --fp8-format, or drop quantized"):
            _check_recompute(facts, ("quantized",))
