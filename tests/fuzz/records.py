"""The results of a training run by name, and the first difference between two runs."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch


class Bits(NamedTuple):
    """A copy of a tensor, in memory that the emulated device does not count."""

    dtype: torch.dtype
    shape: torch.Size
    values: np.ndarray[Any, Any]  # [number of elements, bytes of an element]


Leaf = Bits | str


class Record:
    """Every result of a run, in the order in which it came about: name → bits, or the text of what is no tensor.
    ``digests``: keep a digest of each tensor in place of its bits."""

    def __init__(self, *, digests: bool = False) -> None:
        self._keep = _digest if digests else _bits
        self.leaves: dict[str, Leaf] = {}
        self._num_seen: dict[str, int] = {}

    def note(self, name: str, value: Any) -> None:
        """Keep a copy of all tensors and numbers in ``value``. The same name may come again: it is counted."""
        self._num_seen[name] = self._num_seen.get(name, 0) + 1
        for path, leaf in leaves_of(f"{name} {self._num_seen[name]}", value):
            self.leaves[path] = self._keep(leaf.detach()) if isinstance(leaf, torch.Tensor) else repr(leaf)


def _bits(tensor: torch.Tensor) -> Bits:
    flat = tensor.cpu().contiguous().reshape(-1, 1)
    return Bits(tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy().copy())


def _digest(tensor: torch.Tensor) -> str:
    bits = _bits(tensor)
    return f"{bits.dtype} {tuple(bits.shape)} {hashlib.sha1(bits.values).hexdigest()}"


def difference(one: Record, two: Record) -> str | None:
    """Return a line about the first result in which two runs differ by a bit; ``None``: they are equal.

    NaN equals itself, and 0 is not -0.
    """
    for name, value in one.leaves.items():
        if name not in two.leaves:
            return f"{name}: missing in the second run"
        if (line := _unlike(value, two.leaves[name])) is not None:
            return f"{name}: {line}"
    extra = [name for name in two.leaves if name not in one.leaves]
    return f"{extra[0]}: missing in the first run" if extra else None


def leaves_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves_of(f"{name}/{key}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from leaves_of(f"{name}/{index}", inner)
    elif hasattr(value, "getvalue"):  # an object that a rank wrote as bytes
        value.seek(0)
        yield from leaves_of(name, torch.load(value, weights_only=False))
    else:
        yield name, value


def _unlike(one: Leaf, two: Leaf) -> str | None:
    if isinstance(one, str) or isinstance(two, str):
        return None if one == two else f"{one} and {two}"
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return f"{one.dtype} {tuple(one.shape)} and {two.dtype} {tuple(two.shape)}"
    if np.array_equal(one.values, two.values):
        return None
    unequal = (one.values != two.values).any(1).nonzero()[0]
    first = int(unequal[0])
    a, b = (torch.from_numpy(bits.values[first]).view(bits.dtype).item() for bits in (one, two))
    return f"{len(unequal)} of {len(one.values)} elements differ, first number {first}: {a!r} and {b!r}"
