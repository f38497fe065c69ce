"""The settings: what is allowed, and that errors name the flag, the value and the remedy."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.swap.common.layer_ranges import MOST_LAYERS, format_ranges, parse_ranges
from megatron.swap.common.plan import Plan
from megatron.swap.common.settings import Settings, parse_layers
from megatron.swap.common.types import GIB, UsageError
from tests.unit.planner.cases import model


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("none", []),
        ("all", range(24)),
        ("0,4-7", [0, 4, 5, 6, 7]),
        (" 3 - 5 , 1 ", [1, 3, 4, 5]),
        ("every:10", [0, 10, 20]),
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
        ("5-3", ["5-3", "backwards", "3-5"]),
        ("1,,2", ["''", "every:2"]),
        ("every:0", ["every:0", "at least 1"]),
    ],
)
def test_a_wrong_list_of_layers_is_refused_with_words(text: str, words: list[str]):
    with pytest.raises(UsageError) as error:
        parse_layers(text, 24)
    assert all(word in str(error.value) for word in ["--swap-layers", *words])


@given(st.sets(st.integers(0, MOST_LAYERS - 1), min_size=1))
def test_layers_round_trip(layers: set[int]) -> None:
    assert parse_ranges(format_ranges(layers), "here", "0-9") == layers


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("min_mib", -0.5, "--swap-min-mib"),
        ("host_gib", 0, "--swap-host-gib"),
        ("cpu_memory_gib", float("nan"), "--swap-cpu-memory-gib"),
        ("log_level", "loud", "--swap-log-level"),
        ("prefetch_gib", 1e308, "--swap-prefetch-gib"),
        ("cpu_delay_ms", 1000.1, "--swap-cpu-delay-ms"),
    ],
)
def test_a_value_out_of_range_names_its_flag(field: str, value: object, flag: str):
    with pytest.raises(UsageError, match=flag) as error:
        Settings(**{field: value})
    assert str(value) in str(error.value)


@pytest.mark.parametrize(
    ("other", "flag", "field"),
    [("./plan.json", "--swap-save-profile", "save_profile"), ("link.json", "--swap-summary", "summary")],
)
def test_one_file_for_two_is_refused(
    other: str, flag: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.json").symlink_to(tmp_path / "plan.json")
    with pytest.raises(UsageError, match=f"{flag} {other}: must be another file than that of --swap-save-plan"):
        Settings(policy="auto", save_plan="plan.json", **{field: other})
    Settings(policy="auto", save_plan="plan.json", **{field: "other.json"})


@pytest.mark.parametrize(
    ("auto", "users", "plans", "window_gib"),
    [
        (False, None, None, None),  # the engine's own
        (True, None, None, 0.0),  # while steps are measured
        (True, 2.0, None, 2.0),
        (True, 2.0, 0.5, 2.0),
    ],
)
def test_whose_window_counts(auto: bool, users: float | None, plans: float | None, window_gib: float | None):
    config = Settings(prefetch_gib=users, memory_gib=80.0 if auto else None)
    plan = None if plans is None else Plan(model(8), None, None, None, (), plans)
    assert config.window_bytes(plan) == (None if window_gib is None else window_gib * GIB)
