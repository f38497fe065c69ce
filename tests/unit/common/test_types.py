"""Sites, positions of layers in a chunk, byte formatting."""

import pytest

from megatron.swap.common.types import GIB, MIB, format_bytes, layer_positions


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0.0 KiB"),
        (1536, "1.5 KiB"),
        (412 * MIB, "412 MiB"),
        (GIB + GIB // 2, "1.50 GiB"),
    ],
)
def test_bytes_are_formatted_as_a_person_reads_them(num_bytes: int, text: str):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("swaps", "ends_in_loss", "window", "kept"),
    [
        ("1111", True, 0, "0001"),
        ("1111", True, 2, "0111"),  # as many more as the window holds groups
        ("1111", True, 99, "1111"),
        ("111", False, 5, "000"),  # the chunk ends elsewhere
        ("110", True, 5, "000"),  # the last layer stays anyway
        ("1011", True, 9, "0011"),  # a gap ends the tail
    ],
)
def test_trailing_layers_before_the_loss_are_kept(swaps: str, ends_in_loss: bool, window: int, kept: str) -> None:
    places = layer_positions([one == "1" for one in swaps], ends_in_loss=ends_in_loss)
    assert "".join(str(int(place.is_trailing_kept(window))) for place in places) == kept
    assert [place.num_after for place in places] == list(reversed(range(len(swaps))))


@pytest.mark.parametrize(("num_layers", "is_early"), [(1, True), (7, True), (8, False), (96, False)])
def test_layers_of_deep_chunks_have_no_slack_while_they_run(num_layers: int, is_early: bool) -> None:
    assert {place.early_release for place in layer_positions([False] * num_layers, ends_in_loss=True)} == {is_early}
