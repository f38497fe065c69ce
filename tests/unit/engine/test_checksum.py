"""Checksums: equal bytes agree, changed ones do not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.swap.engine.checksum import checksum

BLOCK = 64 << 10
SIZES = [1, 7, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 12345]


def data(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("num_bytes", SIZES)
def test_equal_bytes_have_equal_sums_wherever_they_lie(num_bytes: int):
    assert torch.equal(checksum(data(num_bytes)), checksum(data(num_bytes).clone()))


@pytest.mark.parametrize("num_bytes", SIZES)
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_one_changed_bit_shows(num_bytes: int, draw: st.DataObject):
    place = draw.draw(st.integers(0, num_bytes - 1))
    changed = data(num_bytes)
    changed[place] ^= 1 << draw.draw(st.integers(0, 7))
    assert not torch.equal(checksum(changed), checksum(data(num_bytes)))


def test_exchanged_blocks_show():
    original = data(3 * BLOCK)
    first, second, third = original.split(BLOCK)
    assert not torch.equal(checksum(torch.cat([second, first, third])), checksum(original))


def test_the_poison_of_lost_memory_shows():
    poison = torch.full((2 * BLOCK,), 0xFF, dtype=torch.uint8)
    assert not torch.equal(checksum(poison), checksum(data(2 * BLOCK)))
    assert not torch.equal(checksum(torch.zeros(2 * BLOCK, dtype=torch.uint8)), checksum(data(2 * BLOCK)))


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_a_view_at_any_offset_is_summed(offset: int):
    whole = data(2 * BLOCK + offset)
    assert checksum(whole[offset:]).numel() == 3
    changed = whole.clone()
    changed[offset] ^= 1
    assert not torch.equal(checksum(changed[offset:]), checksum(whole[offset:]))


def test_large_values_do_not_overflow():
    sums = checksum(torch.full((BLOCK,), 0x7F, dtype=torch.uint8))
    assert sums[0].item() == 0x7F7F7F7F * (BLOCK // 4)
