"""Producers, specs and saved storages of one running layer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatron.swap.common.types import Site
from megatron.swap.engine.handle import Group, alias_of
from megatron.swap.engine.producer_records import ProducerRecord, version_probe_of
from megatron.swap.engine.recompute_spec import RecomputeSpec

# Operators in a row. A layer of a transformer has about 20 elementwise operators in a row, fewer with eager attention.
MAX_DEPTH = 48


class Packing(Protocol):
    """Packs tensors into the autograd graph: a ``LayerPacker``, which describes these methods."""

    def is_constant(self, tensor: torch.Tensor) -> bool: ...
    def can_save(self, tensor: torch.Tensor) -> bool: ...
    def join(self, tensor: torch.Tensor, group: Group) -> Any: ...
    def hold(self, tensor: torch.Tensor, site: Site, group: Group) -> Any: ...


@dataclass(slots=True, eq=False)
class Undecided:
    """A saved storage whose inputs may still be saved, so that recomputation is not decided yet."""

    spec: RecomputeSpec
    record: ProducerRecord
    output: torch.Tensor  # keeps the storage alive
    packing: Packing


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources that an unsaved storage is recomputed from, for recorders."""

    spec: RecomputeSpec  # recomputes the storage
    tensors: tuple[torch.Tensor, ...]  # saved tensors at the beginning of the chain
    between: tuple[RecomputeSpec, ...]  # specs between `tensors` and `spec`


@dataclass
class LayerRecording:
    """Records, saved storages and specs of one forward of a layer, by a storage's address."""

    # Addresses are reused: an entry is valid only while its storage lives.
    records: dict[int, ProducerRecord] = field(default_factory=dict)
    saved: dict[int, weakref.ref[torch.UntypedStorage]] = field(default_factory=dict)
    specs: dict[int, RecomputeSpec] = field(default_factory=dict)
    undecided: list[Undecided] = field(default_factory=list)
    sources: dict[int, Sources] = field(default_factory=dict)
    used: set[int] | None = None  # addresses that specs compute or read; None if nobody asks

    def add_record(
        self, producer: str, function: Callable[..., Any], inputs: Sequence[torch.Tensor], output: torch.Tensor
    ) -> None:
        """Record that ``producer`` computed the whole storage of ``output`` as ``function(*inputs)``."""
        storage = output.untyped_storage()
        address = storage._cdata
        depth = 1
        for tensor in inputs:
            of_input = tensor.untyped_storage()._cdata
            known = self.records.get(of_input) or self.specs.get(of_input)
            if known is not None and known.depth >= depth:
                depth = known.depth + 1
        # Records hold their inputs, and a spec recomputes its inputs inside its own recomputation: end a long chain
        # here.
        if depth > MAX_DEPTH:
            return

        def freed(reference: weakref.ref[torch.UntypedStorage]) -> None:
            record = self.records.get(address)
            if record is not None and record.output is reference:
                del self.records[address]

        self.records[address] = ProducerRecord(
            producer, function, tuple(map(alias_of, inputs)), weakref.ref(storage, freed), storage.nbytes(),
            output.shape, output.stride(), output.dtype, version_probe_of(output), depth,
        )  # fmt: skip

    def add_saved(self, storage: torch.UntypedStorage) -> None:
        """Note that ``storage`` is kept or offloaded, and drop its record, which holds the inputs."""
        self.saved[storage._cdata] = weakref.ref(storage)
        self.records.pop(storage._cdata, None)

    def note_used(self, records: Iterable[ProducerRecord]) -> None:
        """Note the storages that the specs of ``records`` compute again, and those that they read."""
        assert self.used is not None
        for record in records:
            self.used.add(record.address)
            self.used.update(alias.tensor.untyped_storage()._cdata for alias in record.inputs)

    def spec(self, address: int) -> RecomputeSpec | None:
        """Return the spec of the living storage at ``address``, or None."""
        spec = self.specs.get(address)
        return spec if spec is not None and spec.output() is not None else None

    def is_saved(self, address: int) -> bool:
        """Whether the living storage at ``address`` is kept or offloaded."""
        reference = self.saved.get(address)
        return reference is not None and reference() is not None

    def is_in_graph(self, tensor: torch.Tensor) -> bool:
        """Whether the graph has an entry for the storage of ``tensor``."""
        address = tensor.untyped_storage()._cdata
        return self.is_saved(address) or self.spec(address) is not None

    def sources_of(
        self, record: ProducerRecord, packing: Packing
    ) -> tuple[tuple[torch.Tensor, ...], tuple[RecomputeSpec, ...]]:
        """Return the saved tensors at the start of the chain to ``record``, and the specs between."""
        tensors: list[torch.Tensor] = []
        specs: list[RecomputeSpec] = []
        for tensor in (alias.tensor for alias in record.inputs if not packing.is_constant(alias.tensor)):
            address = tensor.untyped_storage()._cdata
            known = self.sources.get(address)
            if known is not None and self.spec(address) is known.spec:
                tensors += known.tensors
                specs += [known.spec, *known.between]
            else:
                tensors.append(tensor)
        return tuple(tensors), tuple(specs)

    def clear(self) -> None:
        """Drop all entries when the layer ends: records hold device memory, which must not wait for the collector."""
        self.records.clear()
        self.saved.clear()
        self.specs.clear()
        self.undecided.clear()
        self.sources.clear()
