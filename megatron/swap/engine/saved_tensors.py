"""The edge to autograd: what is packed into the graph for a saved tensor, and how it is unpacked."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from megatron.swap.common.site_paths import LOSS_PATH, MODEL_PATH
from megatron.swap.common.types import Action, Site
from megatron.swap.engine.decider import is_ineligible
from megatron.swap.engine.decision import RECOMPUTE
from megatron.swap.engine.handle import Group, Handle, check_version
from megatron.swap.engine.manager import SwapManager
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.engine.recompute_spec import RecomputeSpec
from megatron.swap.engine.settings import Instruments
from megatron.swap.engine.sites import SiteNames
from megatron.swap.planner.recording import NonLayerStorage, SavedStorage
from megatron.swap.profiling.footprint import FootprintMeter
from megatron.swap.profiling.observer import Hooks
from megatron.swap.profiling.recorder import Recorder

Record = SavedStorage | NonLayerStorage
"""A recorder's record of a saved storage."""

Where = Callable[[], tuple[Group, Site] | None]
"""Called for every saved tensor that is eligible; returns its group and site, or ``None`` to leave it alone."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How to see a tensor in its storage; ``offset`` and ``stride`` in elements."""

    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """Return the layout of ``tensor``."""
        return cls(tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor in ``storage``."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class HandledTensor:
    """A tensor whose storage has a handle: it is offloaded, or kept and within the guard's reach.

    ``index`` is the tensor's number among those on the handle.
    """

    handle: Handle
    group: Group
    index: int
    layout: Layout
    record: Record | None


@dataclass(frozen=True, slots=True)
class RecomputedTensor:
    """A tensor whose storage is not kept, but recomputed."""

    spec: RecomputeSpec
    layout: Layout
    record: Record | None


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor that stays, and the version that it had when autograd saved it.

    Not the tensor itself: a node that saves its own output would hold itself, and never be freed. And with hooks there
    is no check of autograd's for in-place changes, so the version is checked here.

    A tensor of a layer knows its group, so that backward is noticed even where nothing of a group has a handle and no
    boundary stands (the last segments of full recomputation): the prefetch of the next groups begins then.
    """

    tensor: torch.Tensor
    version: int
    group: Group | None = None
    record: Record | None = None


Packed = HandledTensor | RecomputedTensor | KeptTensor | torch.Tensor
"""What stands in the graph. The last one is for tensor subclasses, which are left untouched."""


def keep(tensor: torch.Tensor, group: Group | None = None, record: Record | None = None) -> KeptTensor | torch.Tensor:
    """Return what stands in the graph for a tensor that stays."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return tensor
    alias = tensor.detach()
    return KeptTensor(alias, alias._version, group, record)


class SavedTensors:
    """Pack and unpack of everything that autograd saves in the model.

    Args:
        manager: offloads and reloads storages.
        device: whose tensors are eligible.
        recomputer: recomputes storages; ``None``: nothing does.
        instruments: who counts and records what is saved.

    Attributes:
        footprint: counts what layers save.
    """

    def __init__(
        self, manager: SwapManager, device: torch.device, recomputer: Recomputer | None, instruments: Instruments
    ) -> None:
        self.footprint = FootprintMeter()
        self.recomputer = recomputer
        self.manager = manager
        self.device = device
        self.on_saved = instruments.on_saved
        self._recorder = instruments.recorder
        self._observer = instruments.observer
        hooks = Hooks(keep, self.unpack)
        self._unpack_input = (hooks if self._observer is None else self._observer.around(hooks)).unpack

    @property
    def active_recorder(self) -> Recorder | None:
        """The recorder, while it is on."""
        return self._recorder if self._recorder is not None and self._recorder.is_on else None

    def recording(self) -> AbstractContextManager[None]:
        """Return a context, around a layer's forward, in which producers record what they make."""
        return nullcontext() if self.recomputer is None else self.recomputer.recording()

    def called_with(self, group: Group, hidden: Any) -> None:
        """Note the hidden states that a layer begins with."""
        if self._recorder is not None:
            self._recorder.called_with(group.label, hidden)

    def hooks(self, where: Where, constants: Collection[int] = ()) -> AbstractContextManager[Any]:
        """Return a context in which saved tensors are kept, offloaded or recomputed.

        Args:
            where: gives the group and site of each.
            constants: addresses of storages that stay, whatever the policy says (parameters).
        """
        return self._enter(Hooks(LayerPacker(self, where, constants).pack, self.unpack))

    def keeping(self, group: Group, constants: Collection[int]) -> AbstractContextManager[Any]:
        """Return a context in which everything stays, and the bytes of it are counted; ``constants`` as above."""

        def pack(tensor: torch.Tensor) -> Packed:
            if not is_ineligible(tensor, self.device) and tensor.untyped_storage()._cdata not in constants:
                self.footprint.add(tensor.untyped_storage().nbytes())
                self.manager.offload.account_kept(tensor.untyped_storage(), group)
            return keep(tensor)

        return self._enter(Hooks(pack, self.unpack))

    @property
    def is_recorded(self) -> bool:
        """Whether what a forward saves now is recorded."""
        return self.active_recorder is not None and torch.is_grad_enabled()

    def outside_layers(self, names: SiteNames) -> AbstractContextManager[Any]:
        """Return a context around a chunk's forward, while recording: what its layers do not save stays, on record."""
        recorder = self._recorder
        assert recorder is not None
        names.begin()
        own = [tensor for module in names.modules for tensor in (*module.parameters(False), *module.buffers(False))]
        constants = {tensor.untyped_storage()._cdata for tensor in own}

        def pack(tensor: torch.Tensor) -> Packed:
            if is_ineligible(tensor, self.device) or tensor.untyped_storage()._cdata in constants:
                return keep(tensor)
            site = names.next_site(LOSS_PATH if recorder.is_past_layers else MODEL_PATH)
            return keep(tensor, record=recorder.saved_non_layer(site, tensor))

        return self._enter(Hooks(pack, self.unpack))

    def untouched(self, *, observed: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which everything stays, whatever hooks stand around it."""
        return self._enter(Hooks(keep, self.unpack), observed)

    def unpack(self, packed: Packed) -> torch.Tensor:
        """Return the tensor as it was saved: same bytes, offset, shape and stride.

        Raises:
            RuntimeError: it was changed in place since, as autograd raises without hooks.
        """
        if isinstance(packed, torch.Tensor):
            return packed
        if packed.record is not None:
            assert self._recorder is not None
            self._recorder.asked(packed.record)
        if isinstance(packed, KeptTensor):
            if packed.group is not None:
                self.manager.begin_backward(packed.group)
            check_version(packed.tensor, packed.version, "a saved tensor that stayed on the device")
            return packed.tensor
        if isinstance(packed, RecomputedTensor):
            assert self.recomputer is not None
            self.manager.begin_backward(packed.spec.group)
            storage = self.recomputer.recompute(packed.spec, self._unpack_input)
        else:
            storage = self.manager.reload.fetch(packed.handle, packed.group, packed.index)
        if self._recorder is not None:
            self._recorder.used(storage)
        return packed.layout.view(storage)

    def _enter(self, hooks: Hooks, observed: bool = True) -> AbstractContextManager[Any]:
        if observed and self._observer is not None:
            hooks = self._observer.around(hooks)
        return torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)


class LayerPacker:
    """Packs what autograd saves in one forward of a layer; it is also the ``Packing`` that the recomputer needs.

    Args:
        saved_tensors: who unpacks.
        where, constants: as in ``SavedTensors.hooks``.
    """

    def __init__(self, saved_tensors: SavedTensors, where: Where, constants: Collection[int]) -> None:
        self._where = where
        self._constants = constants
        self._device = saved_tensors.device
        self._footprint = saved_tensors.footprint
        self._offload = saved_tensors.manager.offload
        self._decider = saved_tensors.manager.decider
        self._on_saved = saved_tensors.on_saved
        self._recorder = saved_tensors.active_recorder
        recomputer = saved_tensors.recomputer
        self._recomputer = recomputer if recomputer is not None and recomputer.is_recording else None

    def pack(self, tensor: torch.Tensor) -> Packed:
        """Return what stands in the graph for ``tensor``: autograd saves it."""
        place = None if self.is_constant(tensor) else self._where()
        if place is None:
            return keep(tensor)
        group, site = place
        storage = tensor.untyped_storage()
        self._footprint.add(storage.nbytes())
        record = None if self._recorder is None else self._recorder.saved(site, group.label, tensor)
        spec = None if self._recomputer is None else self._recomputer.find(tensor, site)
        if spec is not None:
            packed, decision = self._join_spec(tensor, spec, record), RECOMPUTE
        else:
            handle = self._offload.find(storage)
            current = None if handle is None else handle.decision
            decision = self._decider.decide(site, storage, group.position, current, self._recomputer)
            if self._recomputer is not None and decision.action is Action.RECOMPUTE:
                packed = self._join_spec(tensor, self._recomputer.begin(tensor, site, group, self), record)
            else:
                if self._recomputer is not None:
                    self._recomputer.saved(storage)
                handle = handle or self._offload.begin(storage, site, group, decision)
                packed = self._join_handle(tensor, handle, group, record)
        if self._on_saved is not None:
            self._on_saved(site, storage, decision)
        return packed

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` stays whatever the policy says."""
        return is_ineligible(tensor, self._device) or tensor.untyped_storage()._cdata in self._constants

    def join(self, tensor: torch.Tensor, group: Group) -> Packed:
        """Return what stands in the graph for an input of a recomputed storage.

        It is one more tensor on what is saved of its storage already; an input that nobody saves is kept.
        """
        if self.is_constant(tensor):
            return keep(tensor)
        spec = None if self._recomputer is None else self._recomputer.find(tensor)
        if spec is not None:
            return self._join_spec(tensor, spec)
        storage = tensor.untyped_storage()
        handle = self._offload.find(storage)
        if handle is None:
            self._offload.account_kept(storage, group)
        return self._join_handle(tensor, handle, group)

    def hold(self, tensor: torch.Tensor, site: Site, group: Group) -> Packed:
        """Return what stands in the graph for a tensor that cannot be recomputed after all: decided once more."""
        storage = tensor.untyped_storage()
        handle = self._offload.find(storage)
        if handle is None:
            handle = self._offload.begin(storage, site, group, self._decider.decide(site, storage, group.position))
        return self._join_handle(tensor, handle, group)

    def _join_spec(self, tensor: torch.Tensor, spec: RecomputeSpec, record: Record | None = None) -> Packed:
        spec.num_packed += 1
        return RecomputedTensor(spec, Layout.of(tensor), record)

    def _join_handle(
        self, tensor: torch.Tensor, handle: Handle | None, group: Group, record: Record | None = None
    ) -> Packed:
        if self._recorder is not None:
            self._recorder.aliased(tensor)
        if handle is None:
            return keep(tensor, group, record)
        return HandledTensor(handle, group, self._offload.join(tensor, handle, group), Layout.of(tensor), record)
