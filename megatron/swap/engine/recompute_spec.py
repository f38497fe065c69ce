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
    """The graph's entry for a storage that is recomputed."""

    __slots__ = (
        "__weakref__", "checksum", "depth", "fallback", "fingerprint", "function", "group", "inputs", "num_bytes",
        "num_packed", "num_unpacked", "number", "output", "site", "storage", "stream", "version_probe",
    )  # fmt: skip

    def __init__(self, site: Site, group: Group, record: ProducerRecord, number: int = 0) -> None:
        self.site = site  # saved the storage first
        self.number = number  # 0: a saved storage; n > 0: the n-th unsaved storage that is recomputed before it
        self.group = group  # saved the storage first
        self.num_bytes = record.num_bytes  # of the storage
        self.depth = record.depth  # as in ProducerRecord
        self.function = record.function
        self.inputs: tuple[Any, ...] = ()  # packed inputs of `function`
        self.fallback: Any = None  # the packed storage itself, if it turned out that it cannot be recomputed
        self.output = record.output  # the storage of forward, while it is alive
        self.version_probe = record.version_probe  # detects in-place changes of `output`
        self.checksum: torch.Tensor | None = None  # in forward; None if it is not compared
        self.fingerprint: Print | None = None  # as `checksum`
        # Recomputed; from the first until the last unpack of a backward.
        self.storage: torch.UntypedStorage | None = None
        self.stream: Stream | None = None  # of `storage`
        self.num_packed = 0  # saved tensors on the storage
        self.num_unpacked = 0  # unpacked since the storage was recomputed

    @property
    def is_undecided(self) -> bool:
        """Whether the inputs of the recomputation are not known yet. Until then the storage is alive."""
        return not self.inputs and self.fallback is None

    @property
    def label(self) -> str:
        """The spec's name in ranges and recordings."""
        unsaved = f"+{self.number}" if self.number else ""
        return f"{self.site}{unsaved} mb{self.group.micro_batch}"
