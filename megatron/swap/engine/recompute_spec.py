"""The spec of a storage that is recomputed in backward."""

from __future__ import annotations

from typing import Any

import torch

from megatron.swap.common.types import Site
from megatron.swap.devices.base import Stream
from megatron.swap.engine.handle import Group
from megatron.swap.engine.producer_records import ProducerRecord
from megatron.swap.engine.recomputed_run import Print


class RecomputeSpec:
    """The graph's entry for a storage that is recomputed.

    Attributes:
        site, group: the site and group that saved the storage first.
        number: 0 for a saved storage; n > 0 for the n-th unsaved storage that is recomputed before it.
        num_bytes: size of the storage.
        depth: as in ``ProducerRecord``.
        function, inputs: the function that recomputes the storage, and its packed input tensors.
        fallback: the packed storage itself, if it turned out that it cannot be recomputed.
        output: the storage of forward, while it is alive.
        version_probe: detects in-place changes of ``output``.
        storage, stream: the recomputed storage and its stream, from the first until the last unpack of a backward.
        checksum, fingerprint: of the storage in forward; ``None``: it is not compared.
        num_packed: number of saved tensors on the storage.
        num_unpacked: how many of them were unpacked since the storage was recomputed.
    """

    __slots__ = (
        "__weakref__", "checksum", "depth", "fallback", "fingerprint", "function", "group", "inputs", "num_bytes",
        "num_packed", "num_unpacked", "number", "output", "site", "storage", "stream", "version_probe",
    )  # fmt: skip

    def __init__(self, site: Site, group: Group, record: ProducerRecord, number: int = 0) -> None:
        self.site = site
        self.number = number
        self.group = group
        self.num_bytes = record.num_bytes
        self.depth = record.depth
        self.function = record.function
        self.inputs: tuple[Any, ...] = ()
        self.fallback: Any = None
        self.output = record.output
        self.version_probe = record.version_probe
        self.checksum: torch.Tensor | None = None
        self.fingerprint: Print | None = None
        self.storage: torch.UntypedStorage | None = None
        self.stream: Stream | None = None
        self.num_packed = 0
        self.num_unpacked = 0

    @property
    def is_undecided(self) -> bool:
        """Whether it is not known yet what the storage is recomputed from. Until then the storage is alive."""
        return not self.inputs and self.fallback is None

    @property
    def label(self) -> str:
        """The spec's name in ranges and recordings."""
        unsaved = f"+{self.number}" if self.number else ""
        return f"{self.site}{unsaved} mb{self.group.micro_batch}"
