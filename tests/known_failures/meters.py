"""What a run takes, measured without asking the engine: bytes of live tensors, and Python objects."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.swap.devices.emulated import POISON
from megatron.swap.native.guarding import native
from tests.engine import TOKENS, Engine, batch, forward, loss_of, stack
from tests.lazy_device import LazyDevice


class TensorMemory:
    """Memory of the tensors made since the meter began. Host memory of the pool is mapped, so it does not count."""

    @property
    def in_use(self) -> int:
        """Bytes of live tensors now."""
        return int(native().ram_in_use())

    @property
    def peak(self) -> int:
        """Most bytes of live tensors at once."""
        return int(native().ram_peak())


@contextmanager
def tensor_memory() -> Iterator[TensorMemory]:
    """Measure the memory of all tensors that are made inside."""
    native("a meter of tensors needs").limit_ram(1 << 40)
    try:
        yield TensorMemory()
    finally:
        native().unlimit_ram()


def group_bytes(num_tokens: int = TOKENS) -> int:
    """The bytes that one layer offloads of so many tokens."""
    layers = stack(2)
    with Engine(layers, ends_in_loss=False) as engine:
        loss_of(forward(layers, batch(tokens=num_tokens))).backward()
        return engine.manager.release_budget.largest_group_bytes


def num_objects() -> int:
    """Number of Python objects that the garbage collector knows, after a collection."""
    gc.collect()
    return len(gc.get_objects())


class Link(LazyDevice):
    """A link without chance in it, for figures that are equal in every run. Released memory is freed.

    Args:
        stalls: no copy ends before somebody waits for it; else each ends at once.
    """

    def __init__(self, *, stalls: bool) -> None:
        super().__init__(eager=() if stalls else ("out", "in"))

    def discard(self, storage: torch.UntypedStorage) -> None:
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(POISON)
