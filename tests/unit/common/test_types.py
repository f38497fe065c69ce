"""Sites, positions of layers in a chunk, byte formatting."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.swap.common.types import GIB, KIB, MIB, Site, SwapError, UsageError, format_bytes, layer_positions


def test_a_site_reads_as_layer_path_and_ordinal():
    assert str(Site(3, "mlp.linear_fc2", 0)) == "layers.3/mlp.linear_fc2/0"


def test_records_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Site(0, "a", 0).layer = 1  # type: ignore[misc]


def test_a_usage_error_is_both_ours_and_a_value_error():
    assert issubclass(UsageError, SwapError)
    assert issubclass(UsageError, ValueError)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0.0 KiB"),
        (1536, "1.5 KiB"),
        (MIB // 2, "0.50 MiB"),
        (3 * MIB, "3.00 MiB"),
        (412 * MIB, "412 MiB"),
        (GIB + GIB // 2, "1.50 GiB"),
        (64 * KIB, "64.0 KiB"),
    ],
)
def test_bytes_are_formatted_as_a_person_reads_them(num_bytes: int, text: str):
    assert format_bytes(num_bytes) == text


class TestPlaces:
    def test_all_swapped_and_ending_in_the_loss_keeps_only_the_last(self):
        here = layer_positions([True] * 4, ends_in_loss=True)
        assert [place.is_trailing_kept(0) for place in here] == [False, False, False, True]

    def test_the_window_keeps_as_many_layers_more_as_it_holds_groups(self):
        here = layer_positions([True] * 4, ends_in_loss=True)
        assert [place.is_trailing_kept(2) for place in here] == [False, True, True, True]
        assert [place.is_trailing_kept(99) for place in here] == [True] * 4

    def test_a_chunk_that_ends_elsewhere_has_no_tail(self):
        here = layer_positions([True] * 3, ends_in_loss=False)
        assert not any(place.is_trailing_kept(5) for place in here)

    def test_a_last_layer_that_stays_anyway_ends_the_tail(self):
        here = layer_positions([True, True, False], ends_in_loss=True)
        assert not any(place.is_trailing_kept(5) for place in here)

    def test_a_gap_ends_the_tail(self):
        here = layer_positions([True, False, True, True], ends_in_loss=True)
        assert [place.num_after for place in here] == [3, 2, 1, 0]
        assert [place.is_trailing_kept(9) for place in here] == [False, False, True, True]


@pytest.mark.parametrize(("num_layers", "is_early"), [(1, True), (7, True), (8, False), (96, False)])
def test_layers_of_deep_chunks_have_no_slack_while_they_run(num_layers: int, is_early: bool) -> None:
    assert {place.early_release for place in layer_positions([False] * num_layers, ends_in_loss=True)} == {is_early}
