"""The interface to autograd: packs saved tensors into the graph, and unpacks them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron.swap.common.site_paths import LOSS_PATH, MODEL_PATH
from megatron.swap.common.types import Action, Site
from megatron.swap.devices.plain_tensors import PLAIN, addresses_of, has_names
from megatron.swap.engine.decider import is_ineligible
from megatron.swap.engine.decision import CACHE, RECOMPUTE
from megatron.swap.engine.function_transforms import in_transform
from megatron.swap.engine.handle import Group, Handle, check_version
from megatron.swap.engine.layer_state import LayerState
from megatron.swap.engine.manager import SwapManager
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.engine.recompute_spec import RecomputeSpec
from megatron.swap.engine.recomputed_run import CheckedRun, Contexts, RunChecks
from megatron.swap.engine.settings import Instruments
from megatron.swap.engine.sites import SiteNames
from megatron.swap.engine.wrapper_tensors import WrapperRules, apart
from megatron.swap.profiling.footprint import FootprintMeter
from megatron.swap.profiling.recorder import Recorder
from megatron.swap.profiling.recording import NonLayerStorage, SavedStorage
from megatron.swap.profiling.saved_tensor_hooks import Hooks, HooksContext

Record = SavedStorage | NonLayerStorage  # a recorder's record of a saved storage

# Called for every eligible saved tensor. Returns its group and site, or None to leave the tensor alone.
Where = Callable[[], tuple[Group, Site] | None]


# One or two of these are made for every saved tensor. Frozen, they would take three times as long to make.


@dataclass(slots=True)
class Layout:
    """The layout of a tensor in its storage; ``offset`` and ``stride`` are in elements."""

    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """Return the layout of ``tensor``."""
        return cls(tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[arg-type]

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor in ``storage``."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


@dataclass(slots=True)
class HandledTensor:
    """A tensor whose storage has a handle: it is offloaded, or kept and evictable by the guard."""

    handle: Handle
    group: Group
    index: int  # of the tensor among those on the handle
    layout: Layout
    record: Record | None


@dataclass(slots=True)
class RecomputedTensor:
    """A tensor whose storage is recomputed."""

    spec: RecomputeSpec
    layout: Layout
    record: Record | None


@dataclass(slots=True)
class KeptTensor:
    """A kept tensor, as an alias, with the version that it had when autograd saved it."""

    # An alias: a node that saves its own output would hold itself and never be freed.
    tensor: torch.Tensor
    # Autograd does not check for in-place changes where hooks are, so the version is checked at unpack.
    version: int
    # Of the layer that saves it. Shows that backward has reached the group, and starts the next prefetches, even if the
    # group has no handle and no boundary (the last segments of full recomputation).
    group: Group | None = None
    record: Record | None = None


# The graph's entry for a saved tensor. Tensor subclasses are saved as they are.
Packed = HandledTensor | RecomputedTensor | KeptTensor | torch.Tensor


def keep(tensor: torch.Tensor, group: Group | None = None, record: Record | None = None) -> KeptTensor | torch.Tensor:
    """Return the packed form of a kept tensor."""
    if type(tensor) is torch.nn.Parameter and tensor.is_leaf:  # no node has made it
        return KeptTensor(tensor, tensor._version, group, record)
    if type(tensor) not in PLAIN:
        return tensor if tensor.grad_fn is None else tensor.detach()  # their versions are their classes' matter
    alias = tensor.detach()
    return KeptTensor(alias, alias._version, group, record)


class SavedTensors:
    """Packs and unpacks tensors that layers save. Those of other devices, and unnamed wrappers, are kept whole."""

    def __init__(
        self, manager: SwapManager, device: torch.device, recomputer: Recomputer | None, checks: RunChecks,
        instruments: Instruments, wrappers: WrapperRules | None = None,
    ) -> None:  # fmt: skip
        self.footprint = FootprintMeter()  # counts the bytes that layers save
        self.checks = checks
        self._check_contexts = Contexts(self.unwatched, partial(self.untouched, observed=False))
        # The running layer has saved a tensor that a second run would make differently. A nested tensor would be ragged
        # in another way, and backward knows no named tensors.
        self.must_run_once = False
        self.recomputer = recomputer
        self.manager = manager
        self.device = device
        self.on_saved = instruments.on_saved
        self._recorder = instruments.recorder
        self.observer = instruments.observer
        self._wrappers = wrappers
        hooks = Hooks(keep, self.unpack)
        self._unpack_input = (hooks if self.observer is None else self.observer.around(hooks)).unpack

    @property
    def active_recorder(self) -> Recorder | None:
        """The recorder, while it is on."""
        return self._recorder if self._recorder is not None and self._recorder.is_on else None

    def checked_run(self, key: Hashable, name: str, state: LayerState, **options: Any) -> CheckedRun:
        """Return a callable that runs a layer in forward and in backward; arguments as for ``RunChecks.run``."""
        return self.checks.run(key, name, state, contexts=self._check_contexts, **options)

    def recording(
        self, layer: int, on_end: Callable[[Collection[int]], None] | None = None
    ) -> AbstractContextManager[None]:
        """Return a context, around a forward of ``layer``, in which producers record: see ``Recomputer.recording``."""
        if self.recomputer is None or in_transform() or not self.manager.decider.recomputes_layer(layer):
            return nullcontext()
        return self.recomputer.recording(on_end)

    def not_repeatable(self, group: Group) -> None:
        """Record that a layer's state changed in its run, or before its backward: it must run once."""
        if self._recorder is not None and self._recorder.is_on:
            self._recorder.not_repeatable(group.label)

    def hooks(
        self, where: Where, constants: Collection[int] = (), weight_shapes: Collection[torch.Size] = (),
        sources: Mapping[int, Site] | None = None, make_packer: Callable[..., LayerPacker] | None = None,
    ) -> AbstractContextManager[Any]:  # fmt: skip
        """Return a context in which saved tensors are kept, offloaded or recomputed.

        ``constants``: addresses of storages that are always kept (parameters). ``sources`` is given where operators are
        followed, and packing must not be: it maps addresses of storages that recomputation reads to the sites at which
        they are saved if autograd saves them nowhere, and grows while the layer runs. ``make_packer`` makes the packer.
        """
        self.must_run_once = False
        packer = (make_packer or LayerPacker)(self, where, constants, {} if sources is None else sources)
        pack = packer.pack if sources is None else packer.pack_unwatched
        unpack = self.unpack if sources is None else self._unpack_unwatched
        return self._enter(Hooks(pack, unpack), Hooks(packer.pack_cache, unpack), weight_shapes)

    def keeping(
        self, group: Group, constants: Collection[int], weight_shapes: Collection[torch.Size]
    ) -> AbstractContextManager[Any]:
        """Return a context in which all tensors are kept and their bytes counted; arguments as for ``hooks``."""

        def pack(tensor: torch.Tensor) -> Packed:
            if not is_ineligible(tensor, self.device) and tensor.untyped_storage()._cdata not in constants:
                self.footprint.add(tensor.untyped_storage().nbytes())
                self.manager.offload.account_kept(tensor.untyped_storage(), group)
            return keep(tensor)

        hooks = Hooks(pack, self.unpack)
        return self._enter(hooks, hooks, weight_shapes)

    @property
    def is_repeatable(self) -> bool:
        """Whether a layer that begins may repeat an earlier run's decisions: nobody watches them or asks for others."""
        is_watched = self.on_saved is not None or self.active_recorder is not None
        return not is_watched and not self.manager.guard.is_on and self.manager.decider.is_repeatable

    @property
    def is_recorded(self) -> bool:
        """Whether tensors that a forward saves at this moment are recorded."""
        return self.active_recorder is not None and torch.is_grad_enabled()

    def outside_layers(self, names: SiteNames) -> AbstractContextManager[Any]:
        """Return a context around a chunk's forward that keeps and records the tensors saved outside its layers."""
        recorder = self._recorder
        assert recorder is not None
        names.begin()
        own = [tensor for module in names.modules for tensor in (*module.parameters(False), *module.buffers(False))]
        constants = addresses_of(own)

        def pack(tensor: torch.Tensor) -> Packed:
            if is_ineligible(tensor, self.device) or tensor.untyped_storage()._cdata in constants:
                return keep(tensor)
            site = names.next_site(LOSS_PATH if recorder.is_past_layers else MODEL_PATH)
            return keep(tensor, record=recorder.saved_non_layer(site, tensor))

        return self._enter(Hooks(pack, self.unpack))

    def untouched(self, *, observed: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which all tensors are kept, whatever the outer hooks are."""
        return self._enter(Hooks(keep, self.unpack), observed=observed)

    def counting(self) -> AbstractContextManager[Any]:
        """Return a context that counts the bytes held by the present hooks: a checkpoint's, while it recomputes."""
        return nullcontext() if self.observer is None else self.observer.counting()

    def unwatched(self) -> AbstractContextManager[None]:
        """Return a context whose operators are hidden from watchers of the running layer."""
        if self.recomputer is None or self.recomputer.unwatched is None:
            return nullcontext()
        return self.recomputer.unwatched()

    def _unpack_unwatched(self, packed: Packed) -> torch.Tensor:
        """Return the same as ``unpack``, hidden from watchers of the running layer, which may take a gradient."""
        if self.recomputer is None or self.recomputer.unwatched is None:
            return self.unpack(packed)
        with self.recomputer.unwatched():
            return self.unpack(packed)

    def unpack(self, packed: Packed) -> torch.Tensor:
        """Return the tensor as it was saved, or raise a ``RuntimeError`` if it was changed in place since."""
        if isinstance(packed, torch.Tensor):
            return packed
        if packed.record is not None:
            assert self._recorder is not None
            self._recorder.asked(packed.record)
        if isinstance(packed, KeptTensor):
            if packed.group is not None and not packed.group.backward_begun:
                self.manager.begin_backward(packed.group)
            if packed.tensor._version != packed.version:
                check_version(packed.tensor, packed.version, "a saved tensor that stayed on the device")
            return packed.tensor
        if isinstance(packed, RecomputedTensor):
            assert self.recomputer is not None
            if not packed.spec.group.backward_begun:
                self.manager.begin_backward(packed.spec.group)
            storage = self.recomputer.recompute(packed.spec, self._unpack_input)
        else:
            storage = self.manager.reload.fetch(packed.handle, packed.group, packed.index)
        return packed.layout.view(storage)

    def _enter(
        self, hooks: Hooks, keeping: Hooks | None = None, weight_shapes: Collection[torch.Size] = (), *,
        observed: bool = True,
    ) -> AbstractContextManager[Any]:  # fmt: skip
        """Return a context with ``hooks``. With ``keeping``, wrapper tensors are taken apart."""
        if observed and self.observer is not None and self.observer.is_on:
            hooks = self.observer.around(hooks)
            keeping = None if keeping is None else self.observer.around(keeping)
        if keeping is not None and self._wrappers is not None:
            hooks = apart(self._wrappers, hooks, keeping, weight_shapes)
        return HooksContext(hooks)


class LayerPacker:
    """Packs the tensors that autograd saves in one forward of a layer. Arguments as for ``SavedTensors.hooks``."""

    def __init__(
        self, saved_tensors: SavedTensors, where: Where, constants: Collection[int], sources: Mapping[int, Site]
    ) -> None:
        self._saved_tensors = saved_tensors
        self._where = where
        self._sources = sources
        self._constants = constants
        self._device = saved_tensors.device
        self._footprint = saved_tensors.footprint
        self._offload = saved_tensors.manager.offload
        self._decider = saved_tensors.manager.decider
        self._on_saved = saved_tensors.on_saved
        self._recorder = saved_tensors.active_recorder
        self._observer = saved_tensors.observer
        recomputer = saved_tensors.recomputer
        self._recomputer = recomputer if recomputer is not None and recomputer.is_recording else None

    def pack_unwatched(self, tensor: torch.Tensor) -> Packed:
        """Return the packed form of ``tensor``. Watchers of the layer's operators do not see the engine's own."""
        if self._recomputer is None or self._recomputer.unwatched is None or type(tensor) not in PLAIN:
            return self.pack(tensor)
        with self._recomputer.unwatched():
            return self.pack(tensor)

    def pack(self, tensor: torch.Tensor) -> Packed:
        """Return the packed form of ``tensor``, which autograd saves."""
        if is_ineligible(tensor, self._device) or tensor.untyped_storage()._cdata in self._constants:
            self._saved_tensors.must_run_once |= tensor.is_nested or has_names(tensor)
            return keep(tensor)
        found = self._where()
        return keep(tensor) if found is None else self.pack_at(tensor, *found)

    def pack_at(self, tensor: torch.Tensor, group: Group, site: Site) -> Packed:
        """Decide about ``tensor``, which ``group`` saves at ``site``, and return its packed form."""
        storage, recomputer = tensor.untyped_storage(), self._recomputer
        packed: Packed
        self._footprint.add(storage.nbytes())
        record = None if self._recorder is None else self._recorder.saved(site, group.label, tensor)
        spec = None if recomputer is None else recomputer.find(tensor, site)
        if spec is not None:
            packed, decision = self._join_spec(tensor, spec, record), RECOMPUTE
        else:
            handle = self._offload.find(storage)
            current = None if handle is None else handle.decision
            decision = self._decider.decide(site, storage, group.position, current, recomputer)
            if recomputer is not None and decision.action is Action.RECOMPUTE:
                packed = self._join_spec(tensor, recomputer.begin(tensor, site, group, self), record)
            else:
                if recomputer is not None:
                    recomputer.saved(storage)
                handle = handle or self._offload.new_handle(storage, site, group, decision)
                packed = self._join_handle(tensor, handle, group, record)
        if self._on_saved is not None:
            self._on_saved(site, storage, decision)
        return packed

    def pack_cache(self, tensor: torch.Tensor) -> Packed:
        """Return the packed form of a wrapper's cache, which is kept."""
        found = None if self.is_constant(tensor) else self._where()
        if found is None:
            return keep(tensor)
        group, site = found
        storage = tensor.untyped_storage()
        self._footprint.add(storage.nbytes())
        record = None if self._recorder is None else self._recorder.saved(site, group.label, tensor)
        self._offload.account_kept(storage, group)
        if self._on_saved is not None:
            self._on_saved(site, storage, CACHE)
        return keep(tensor, group, record)

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is kept whatever the policy says."""
        return is_ineligible(tensor, self._device) or tensor.untyped_storage()._cdata in self._constants

    def can_save(self, tensor: torch.Tensor) -> bool:
        """Whether ``join`` puts an unsaved ``tensor`` into the graph at a site of its own."""
        return tensor.untyped_storage()._cdata in self._sources

    def join(self, tensor: torch.Tensor, group: Group) -> Packed:
        """Return the packed form of an input of a recomputed storage: one more tensor on its storage's entry."""
        if self.is_constant(tensor):
            return keep(tensor)
        spec = None if self._recomputer is None else self._recomputer.find(tensor)
        if spec is not None:
            return self._join_spec(tensor, spec)
        storage, record = tensor.untyped_storage(), None
        handle = self._offload.find(storage)
        if handle is None and (site := self._sources.get(storage._cdata)) is not None:
            record = None if self._recorder is None else self._recorder.saved(site, group.label, tensor)
            handle = self._new_handle(storage, site, group)
            if self._recomputer is not None:
                self._recomputer.saved(storage)
        elif handle is None:
            # An unsaved input is kept.
            self._offload.account_kept(storage, group)
        return self._join_handle(tensor, handle, group, record)

    def hold(self, tensor: torch.Tensor, site: Site, group: Group) -> Packed:
        """Decide once more about a tensor that turned out not to be recomputable, and return its packed form."""
        storage = tensor.untyped_storage()
        handle = self._offload.find(storage)
        return self._join_handle(tensor, handle or self._new_handle(storage, site, group), group)

    def _new_handle(self, storage: torch.UntypedStorage, site: Site, group: Group) -> Handle | None:
        return self._offload.new_handle(storage, site, group, self._decider.decide(site, storage, group.position))

    def _join_spec(self, tensor: torch.Tensor, spec: RecomputeSpec, record: Record | None = None) -> RecomputedTensor:
        spec.num_packed += 1
        return RecomputedTensor(spec, Layout.of(tensor), record)

    def _join_handle(
        self, tensor: torch.Tensor, handle: Handle | None, group: Group, record: Record | None = None
    ) -> Packed:
        if self._recorder is not None:
            self._recorder.aliased(tensor)
        if self._observer is not None:
            self._observer.note(tensor)  # recomputation reads it, and maybe autograd does not save it
        if handle is None:
            return keep(tensor, group, record)
        return HandledTensor(handle, group, self._offload.join(tensor, handle, group), Layout.of(tensor), record)
