"""Checksums: equal bytes agree, changed ones do not."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.swap.engine.checksum import checksum, fingerprint

BLOCK = 64 << 10


def data(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("num_bytes", [1, 7, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 12345])
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_equal_bytes_agree_wherever_they_lie_and_one_changed_bit_shows(num_bytes: int, draw: st.DataObject) -> None:
    changed = data(num_bytes)
    assert torch.equal(checksum(changed), checksum(data(num_bytes)))
    changed[draw.draw(st.integers(0, num_bytes - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    assert not torch.equal(checksum(changed), checksum(data(num_bytes)))


def test_exchanged_blocks_the_poison_of_lost_memory_and_zeros_show() -> None:
    original = data(3 * BLOCK)
    first, second, third = original.split(BLOCK)
    for changed in (torch.cat([second, first, third]), torch.full_like(original, 0xFF), torch.zeros_like(original)):
        assert not torch.equal(checksum(changed), checksum(original))
    assert checksum(torch.full((BLOCK,), 0x7F, dtype=torch.uint8))[0] == 0x7F7F7F7F * (BLOCK // 4), "it overflows"


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda data: data,
    "bf16": lambda data: data.view(torch.bfloat16),
    "transposed": lambda data: data.view(torch.int64).view(-1, 8).t(),
    "at an odd place": lambda data: data[1:],
    "with gaps": lambda data: data.view(torch.int16).view(-1, 4)[:, :3],
    "complex": lambda data: data.view(torch.complex64),
    "conjugated": lambda data: data.view(torch.complex64).conj(),
    "bool": lambda data: data > 100,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_bytes", [64, 4096, 64 * 1024])
def test_every_byte_of_a_fingerprint_counts(form: str, num_bytes: int) -> None:
    original = FORMS[form](data(num_bytes))
    first = fingerprint(original)
    assert torch.equal(first, fingerprint(original.clone(memory_format=torch.preserve_format)))
    size = original.numel()
    for place in {0, size // 3, size // 2, size - 1}:
        changed = original.clone(memory_format=torch.preserve_format)
        index = torch.unravel_index(torch.tensor(place), changed.shape)
        changed[index] = 1 if changed[index] == 0 else 0
        assert not torch.equal(first, fingerprint(changed)), place


SHAPES = [
    (512, 12, 256), (127, 1024), (127, 2, 1024), (129 * 127, 16), (64, 2, 64), (128, 4, 132), (126, 2048), (128, 2048),
    (508, 252), (8, 4, 127, 127), (1000, 1000), (5, 7, 11, 13), (65536, 8), (40000, 20), (128, 16, 60), (86, 192),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_fingerprint_shows_what_changes_places(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    numbers = torch.Generator().manual_seed(2)
    original = torch.randn(shape, generator=numbers).to(dtype)
    first = fingerprint(original)
    for dim, size in enumerate(shape):
        order = torch.randperm(size, generator=numbers).roll(1) if size > 2 else torch.tensor([1, 0])
        moved = [original.roll(by, dim) for by in (1, 2, size // 2, size // 3, 127 % size, 129 % size) if by % size]
        moved += [original.flip(dim), original.index_select(dim, order)]
        for one in moved:
            assert not torch.equal(first, fingerprint(one)), dim
        for one, other in ((0, size - 1), (0, size // 2), (size // 4, size // 2)):
            if one != other:
                order = torch.arange(size)
                order[one], order[other] = other, one
                assert not torch.equal(first, fingerprint(original.index_select(dim, order))), (dim, one, other)
    if shape[0] == shape[-1]:
        assert not torch.equal(first, fingerprint(original.transpose(0, -1).contiguous()))
