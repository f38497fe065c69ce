"""Layers as text: `0-9,12` names layers 0 to 9 and 12."""

import re
from collections.abc import Iterable

from megatron.swap.common.types import UsageError

MOST_LAYERS = 100_000  # bound of layer numbers where the model is not known
RANGE = re.compile(r"\s*(\d{1,20})\s*(?:-\s*(\d{1,20})\s*)?")


def parse_ranges(text: str, where: str, syntax: str, num_layers: int = MOST_LAYERS) -> frozenset[int]:
    """Return the layers that ``text`` names, or raise ``UsageError``, from ``where`` to ``syntax``."""
    layers: set[int] = set()
    for part in text.split(","):
        match = RANGE.fullmatch(part)
        if match is None:
            raise UsageError(f"{where}: {part!r} is neither a layer nor a range of layers. Write {syntax}.")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"{where}: the range {part.strip()!r} runs backwards. Write {last}-{first}.")
        if last >= num_layers:  # before the range is built: it may be huge
            beyond, allowed = max(first, num_layers), f"0 to {num_layers - 1}"
            raise UsageError(f"{where}: layer {beyond} is out of range, allowed are {allowed}.")
        layers.update(range(first, last + 1))
    return frozenset(layers)


def format_ranges(layers: Iterable[int], separator: str = ",") -> str:
    """Return ``layers`` as text that ``parse_ranges`` reads; empty if there are none."""
    ranges: list[list[int]] = []
    for layer in sorted(layers):
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    return separator.join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
