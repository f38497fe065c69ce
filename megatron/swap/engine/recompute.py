"""Recompute: storages that a cheap kernel can compute again from other saved tensors are not kept.

While a layer runs, producers (``megatron_lm/producers.py``) record each output with its function and input tensors.
Where autograd saves the output and the policy says RECOMPUTE, the graph gets a ``RecomputeSpec``: the function and its
packed inputs. Each input is one more saved tensor on its storage's entry. Unpack calls the same function again.

An input may be saved later than the output: attention saves queries and keys before the values, and all three come from
one storage. An input that is never saved is recomputed too, if its own producer has recorded it. So a spec stays
undecided, and holds the output, until a tensor is saved under another path. No memory is freed later for this: the
module's own frame holds its saved tensors until then.

Producers record only functions without randomness. The first use of each site tries whether the function reproduces the
bits, while the original exists. A site that fails is refused for the rest of the run.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from megatron.swap.common.counters import Counters
from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.types import LINEAR, Site, SwapError
from megatron.swap.devices.base import Device, bytes_of
from megatron.swap.devices.plain_tensors import is_plain
from megatron.swap.engine.checksum import VerifyError, checksum
from megatron.swap.engine.decider import Decider
from megatron.swap.engine.decision import Reason, Refusal
from megatron.swap.engine.handle import Group
from megatron.swap.engine.layer_recording import LayerRecording, Packing, Sources, Undecided
from megatron.swap.engine.producer_records import Chain, ProducerRecord, of_tensors_alone, run_again
from megatron.swap.engine.recompute_spec import RecomputeSpec
from megatron.swap.engine.recomputed_run import RunChecks
from megatron.swap.profiling.recorder import Recorder
from megatron.swap.profiling.recording import TRIAL


class Recomputer:
    """Finds and recomputes storages. ``checks`` compares one in each forward, ``verify`` all by checksums."""

    def __init__(
        self, device: Device, decider: Decider, counters: Counters, ranges: Ranges, checks: RunChecks,
        verify: bool = False, recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        # The first reason for each site that the policy recomputes but that cannot be recomputed.
        self.refused: dict[Site, str] = {}
        self.spared_bytes: Counter[str] = Counter()  # recomputed instead of kept, by producer, since the start
        # While the running layer's operators are watched, makes a context for operators that do not count.
        self.unwatched: Callable[[], AbstractContextManager[None]] | None = None
        self._device = device
        self._decider = decider
        self._counters = counters
        self._ranges = ranges
        self._checks = checks
        self._verify = verify
        self._recorder = recorder
        self._recording: LayerRecording | None = None
        # Whether the n-th function of a site's chain reproduced the bits.
        self._trials: dict[tuple[Site, int], bool] = {}

    # ------------------------------------------------------------------ what producers record

    @contextmanager
    def recording(self, on_end: Callable[[Collection[int]], None] | None = None) -> Iterator[None]:
        """Return a context around a layer's forward. ``on_end`` gets the addresses, maybe freed, that specs use."""
        outer, recording = self._recording, LayerRecording(used=None if on_end is None else set())
        self._recording = recording
        try:
            yield
            self._settle(recording)
            if on_end is not None and recording.used is not None:
                on_end(recording.used)
        finally:
            recording.clear()
            self._recording = outer

    def recorded(
        self, producer: str, function: Callable[..., Any], part: int | None = None,
        context_of: Callable[[], Callable[[], AbstractContextManager[Any]] | None] = lambda: None,
    ) -> Callable[..., Any]:  # fmt: skip
        """Return ``function`` so that each call with gradients records its output: item ``part`` if it returns a tuple.

        ``context_of`` is called after a recorded call. It returns a maker of the context in which the function would
        compute the same in backward, or None if any context will do.
        """
        makes = function if part is None else lambda *given, **named: function(*given, **named)[part]

        @functools.wraps(function)
        def records(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            if self.is_recording and torch.is_grad_enabled():
                again = _within(context_of(), makes)
                self.record(producer, again, arguments, options, result if part is None else result[part])
            return result

        return records

    def record(
        self, producer: str, function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any],
        output: Any,
    ) -> None:  # fmt: skip
        """Record that ``function(*arguments, **options)`` gives ``output``, and would give the same bits again."""
        if self._recording is not None:
            self.record_made(producer, *of_tensors_alone(function, arguments, options), output)

    def record_made(
        self, producer: str, function: Callable[..., Any], inputs: Sequence[torch.Tensor], output: Any
    ) -> None:
        """Record that ``function(*inputs)`` gives ``output``, and would give the same bits again."""
        recording = self._recording
        if recording is None or type(output) is not torch.Tensor or is_cast_automatically(output.device.type):
            return
        if not inputs or not is_plain(output) or not all(map(is_plain, inputs)):
            return
        storage = output.untyped_storage()
        if output.storage_offset() or output.numel() * output.element_size() != storage.nbytes():
            return  # not the whole of its storage: the rest would not be recomputed
        if storage._cdata in [tensor.untyped_storage()._cdata for tensor in inputs]:
            return  # an in-place function, or one that returns its input
        recording.add_record(producer, function, inputs, output)

    # ------------------------------------------------------------------ what autograd saves

    @property
    def is_recording(self) -> bool:
        """Whether a layer is running whose producers record."""
        return self._recording is not None

    @property
    def specs(self) -> Mapping[int, RecomputeSpec]:
        """The specs of the running layer by the addresses of their storages, which may be dead."""
        assert self._recording is not None
        return self._recording.specs

    def is_in_graph(self, tensor: torch.Tensor) -> bool:
        """Whether the graph has an entry for the storage of ``tensor``, which the running layer saved."""
        return self._recording is not None and self._recording.is_in_graph(tensor)

    def find(self, tensor: torch.Tensor, site: Site | None = None) -> RecomputeSpec | None:
        """Return the spec of the storage of ``tensor``, or None if it has none or was changed since."""
        recording = self._recording
        if recording is None:
            return None
        # Autograd saves at `site` now: no more inputs of other paths' specs will be saved.
        if site is not None and recording.undecided:
            self._settle(recording, site.path)
        spec = recording.spec(tensor.untyped_storage()._cdata)
        return None if spec is None or spec.version_probe.changed() else spec

    def producer_of(self, storage: torch.UntypedStorage) -> str | None:
        """Return the kind of kernel that produced ``storage``, or None if it is unknown."""
        assert self._recording is not None
        record = self._recording.records.get(storage._cdata)
        return None if record is None else record.producer

    def obstacle(self, site: Site, storage: torch.UntypedStorage) -> Reason | None:
        """Return why ``storage``, saved at ``site``, cannot be recomputed, and count the refusal. None if it can."""
        assert self._recording is not None
        reason = self._obstacle(self._recording, site, storage)
        if reason is not None:
            self._refuse(site, Refusal(reason))
        return reason

    def begin(self, tensor: torch.Tensor, site: Site, group: Group, packing: Packing) -> RecomputeSpec:
        """Return a new spec for the storage of ``tensor``, which was decided to be recomputed."""
        recording = self._recording
        assert recording is not None
        record = recording.records[tensor.untyped_storage()._cdata]
        undecided = Undecided(self._spec(site, group, record, recording), record, tensor.detach(), packing)
        if all(recording.is_in_graph(alias.tensor) or packing.is_constant(alias.tensor) for alias in record.inputs):
            self._decide(undecided, recording)
        else:
            recording.undecided.append(undecided)
        return undecided.spec

    def begin_again(
        self, record: ProducerRecord, tensor: torch.Tensor, site: Site, group: Group, packing: Packing
    ) -> Undecided:
        """Begin as in an earlier run, in which ``record`` was tried; its output and its inputs are unchanged."""
        assert self._recording is not None
        return Undecided(self._spec(site, group, record, self._recording), record, tensor.detach(), packing)

    def decide_again(self, undecided: Undecided, makers: Sequence[ProducerRecord]) -> None:
        """Recompute the output as in an earlier run: ``makers`` were found, and tried. All are unchanged."""
        assert self._recording is not None
        self._complete(undecided, makers, self._recording)

    def hold(self, undecided: Iterable[Undecided]) -> None:
        """Keep or offload the outputs of ``undecided`` after all."""
        for one in undecided:
            one.spec.fallback = one.packing.hold(one.output, one.spec.site, one.spec.group)

    def saved(self, storage: torch.UntypedStorage) -> None:
        """Note that ``storage`` is kept or offloaded."""
        if self._recording is not None:
            self._recording.add_saved(storage)

    def _obstacle(self, recording: LayerRecording, site: Site, storage: torch.UntypedStorage) -> Reason | None:
        address = storage._cdata
        if recording.is_saved(address):
            return Reason.SAVED_BEFORE
        if recording.spec(address) is not None:
            return Reason.OUTPUT_CHANGED  # else its spec would have been found
        record = recording.records.get(address)
        if record is None:
            return Reason.NO_PRODUCER
        if self._trials.get((site, 0)) is False:
            return Reason.NOT_REPRODUCED
        if record.version_probe.changed() or storage.nbytes() != record.num_bytes:
            return Reason.OUTPUT_CHANGED
        if record.input_changed():
            return Reason.INPUT_CHANGED
        return None if self._reproduces(site, 0, record) else Reason.NOT_REPRODUCED

    def _spec(
        self, site: Site, group: Group, record: ProducerRecord, recording: LayerRecording, number: int = 0
    ) -> RecomputeSpec:
        spec, storage = RecomputeSpec(site, group, record, number), record.output()
        assert storage is not None
        if self._verify:
            spec.checksum = checksum(bytes_of(storage))
        spec.fingerprint = self._checks.print_in_turn(site, number, storage)
        recording.specs[storage._cdata] = spec
        recording.records.pop(storage._cdata, None)  # a repeated run has its records elsewhere
        return spec

    def _refuse(self, site: Site, refusal: Refusal) -> None:
        self._counters.num_not_recomputed += 1
        self.refused.setdefault(site, str(refusal))

    def _reproduces(self, site: Site, number: int, record: ProducerRecord) -> bool:
        """Whether ``record`` reproduces the bits: tried once for each site, while the original exists."""
        storage = record.output()
        assert storage is not None
        if (site, number) not in self._trials:
            recording, self._recording = self._recording, None  # records made by the trial are not the layer's
            with self._ranges.mark(f"{TRIAL} {site}"):
                self._trials[site, number] = record.recomputes_same_bytes(storage)
            self._recording = recording
        return self._trials[site, number]

    def forget_trials(self, layer: int) -> None:
        """Forget the trials in ``layer``: it runs other kernels now."""
        self._trials = {key: passed for key, passed in self._trials.items() if key[0].layer != layer}

    def _settle(self, recording: LayerRecording, path: str | None = None) -> None:
        """Decide all undecided specs except those of ``path``, where more tensors may be saved."""
        ready = [one for one in recording.undecided if one.spec.site.path != path]
        recording.undecided = [one for one in recording.undecided if one.spec.site.path == path]
        for one in ready:
            self._decide(one, recording)

    def _decide(self, undecided: Undecided, recording: LayerRecording) -> None:
        """Find the unsaved inputs to recompute, or fall back to keep or offload. No more inputs will be saved."""
        spec, packing = undecided.spec, undecided.packing
        chain = Chain(spec.num_bytes)
        problem = self._find_unsaved(spec.site, undecided.record, recording, packing, chain)
        trials = enumerate(() if problem else chain.makers, start=1)
        if not all(self._reproduces(spec.site, number, record) for number, record in trials):
            problem = Refusal(Reason.NOT_REPRODUCED)
        if problem:
            self._trials[spec.site, 0] = False
            self._refuse(spec.site, problem)
            spec.fallback = packing.hold(undecided.output, spec.site, spec.group)
            return
        self._complete(undecided, chain.makers, recording)

    def _complete(self, undecided: Undecided, makers: Sequence[ProducerRecord], recording: LayerRecording) -> None:
        """Join the inputs of an output that is recomputed, behind its unsaved inputs, which ``makers`` compute."""
        spec, packing = undecided.spec, undecided.packing
        recorder = self._recorder if self._recorder is not None and self._recorder.is_on else None
        for number, record in enumerate(makers, start=1):
            between = self._spec(spec.site, spec.group, record, recording, number)
            between.inputs = _joined(record, spec.group, packing)
            if recorder is not None:
                recording.sources[record.address] = Sources(between, *recording.sources_of(record, packing))
        spec.inputs = _joined(undecided.record, spec.group, packing)
        if recording.used is not None:
            recording.note_used((undecided.record, *makers))
        if recorder is not None:
            recorder.recomputed(spec, undecided.record.producer, *recording.sources_of(undecided.record, packing))
        self.spared_bytes[undecided.record.producer] += spec.num_bytes
        self._counters.layers[spec.site.layer].recomputed_bytes += spec.num_bytes

    def _find_unsaved(
        self, site: Site, record: ProducerRecord, recording: LayerRecording, packing: Packing, chain: Chain
    ) -> Refusal | None:
        """Add the unsaved inputs of ``record`` to ``chain``. Return why one is unavailable, or None."""
        if record.input_changed():
            return Refusal(Reason.INPUT_CHANGED)
        for tensor in (alias.tensor for alias in record.inputs):
            storage = tensor.untyped_storage()
            source = recording.records.get(storage._cdata)
            if recording.is_in_graph(tensor) or packing.is_constant(tensor) or source in chain.makers:
                continue
            if packing.can_save(tensor):
                if storage._cdata in chain.sources or self._is_made(site, source, recording, packing, chain):
                    continue
                chain.sources.append(storage._cdata)
            elif source is not None:
                if not self._decider.may_recompute(site, source.num_bytes, source.producer):
                    return Refusal(Reason.INPUT_NOT_CHOSEN, source.producer)
                if source.version_probe.changed():
                    return Refusal(Reason.INPUT_CHANGED)
                if problem := self._find_unsaved(site, source, recording, packing, chain):
                    return problem
                chain.makers.append(source)
                continue
            chain.kept_bytes += storage.nbytes()
            if chain.kept_bytes >= chain.num_bytes:
                return Refusal(Reason.INPUT_NOT_SAVED)
        return None

    def _is_made(
        self, site: Site, source: ProducerRecord | None, recording: LayerRecording, packing: Packing, chain: Chain
    ) -> bool:
        """Add ``source`` to ``chain`` if it can be made from less than its own bytes. Otherwise saving it is better."""
        # Saving is better for matrix products, too: a plan can offload them.
        if source is None or source.producer == LINEAR or source.version_probe.changed():
            return False
        if not self._decider.may_recompute(site, source.num_bytes, source.producer):
            return False
        if source.address in chain.not_made:
            return False
        mark = chain.mark()
        problem = self._find_unsaved(site, source, recording, packing, chain)
        if problem is not None or chain.kept_bytes - mark[1] >= source.num_bytes:
            chain.reset(mark)
            chain.not_made.add(source.address)
            return False
        chain.makers.append(source)
        return True

    # ----------------------------------------------------------------- backward

    def recompute(self, spec: RecomputeSpec, unpack: Callable[[Any], torch.Tensor]) -> torch.UntypedStorage:
        """Return the recomputed storage of ``spec``, because autograd unpacks a tensor on it.

        All saved tensors on the storage share the recomputed one, as in forward. ``unpack`` returns the tensor of a
        packed input. Raises a ``RuntimeError`` if the storage or an input was changed in place since. Raises a
        ``SwapError`` if the size differs, and with ``verify`` a ``VerifyError`` if the bytes differ.
        """
        spec.version_probe.check(str(spec.site))
        if spec.is_undecided:  # the layer takes a gradient while it runs
            output = spec.output()
            assert output is not None
            return output
        stream = self._device.current_stream()
        storage = spec.storage
        # Another stream recomputes its own copy: nothing orders it behind the first stream's kernel.
        if storage is None or spec.stream != stream:
            if spec.fallback is not None:
                storage = unpack(spec.fallback).untyped_storage()
            else:
                inputs = [unpack(packed) for packed in spec.inputs]  # outside the range: it excludes their waits
                with self._ranges.storage("recompute", spec, spec.num_bytes):
                    storage = run_again(spec.function, inputs).untyped_storage()
                    self._ranges.arrived(spec, storage)
                del inputs
                self._check(spec, storage)
                if spec.fingerprint is not None:
                    self._checks.check_in_turn(spec.fingerprint, storage)
                self._counters.num_recomputed += 1
            spec.storage, spec.stream = storage, stream
        spec.num_unpacked += 1
        if spec.num_unpacked >= spec.num_packed:
            # From here on only its user holds it. A second backward over a retained graph recomputes it.
            spec.storage, spec.num_unpacked = None, 0
        return storage

    def _check(self, spec: RecomputeSpec, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() != spec.num_bytes:
            raise SwapError(
                f"{spec.site}: the recomputed storage has {storage.nbytes()} bytes instead of {spec.num_bytes}: its "
                "kernel has changed since forward. Recompute nothing, and report this."
            )
        if spec.checksum is not None and not torch.equal(checksum(bytes_of(storage)), spec.checksum):
            raise VerifyError(
                f"{spec.site} ({spec.num_bytes} bytes) was recomputed and is different from what autograd saved. "
                "Either something wrote to one of its inputs, or its kernel is not deterministic. Please report this; "
                "until then recompute nothing."
            )


def _within(context: Callable[[], AbstractContextManager[Any]] | None, function: Callable[..., Any]) -> Any:
    """Return ``function``, called in a context that ``context`` makes."""
    if context is None:
        return function

    def within(*arguments: Any, **options: Any) -> Any:
        with context():
            return function(*arguments, **options)

    return within


def is_cast_automatically(device_type: str) -> bool:
    """Whether autocast may cast inputs of the running function: its result then depends on more than its inputs."""
    return _has_autocast(device_type) and torch.is_autocast_enabled(device_type)


_has_autocast = functools.cache(torch.amp.is_autocast_available)  # which takes ten times as long as a look-up


def _joined(record: ProducerRecord, group: Group, packing: Packing) -> tuple[Any, ...]:
    return tuple(packing.join(alias.tensor, group) for alias in record.inputs)
