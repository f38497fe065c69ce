"""Layers as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.swap.common.layer_ranges import MOST_LAYERS, format_ranges, parse_ranges
from megatron.swap.common.types import UsageError


@given(st.sets(st.integers(0, MOST_LAYERS - 1), min_size=1))
def test_layers_round_trip(layers: set[int]) -> None:
    assert parse_ranges(format_ranges(layers), "here", "0-9") == layers


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0-99999999999999999999", "layer 24 is out of range, allowed are 0 to 23"),
        ("99999999999999999999", "layer 99999999999999999999 is out of range"),
        ("3-24", "layer 24 is out of range"),
        ("5-3", "'5-3' runs backwards. Write 3-5"),
        ("1,,2", "'' is neither a layer nor a range of layers. Write 0-9,12"),
        ("-1", "'-1' is neither a layer"),
    ],
)
def test_what_is_no_range_of_the_model_is_refused_at_once(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=f"^here: .*{words}"):
        parse_ranges(text, "here", "0-9,12", 24)
