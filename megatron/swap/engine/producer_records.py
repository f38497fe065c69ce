"""Records of a layer's kernels: the output, the function that computed it, and its input tensors."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.swap.devices.base import bytes_of
from megatron.swap.engine.handle import Alias, alias_of

Function = Callable[..., torch.Tensor]  # of tensors only: other arguments are bound


@dataclass(slots=True, eq=False)  # frozen, it would take three times as long to make
class ProducerRecord:
    """One output of a producer. It holds the inputs until the output is saved or freed, or the layer ends."""

    producer: str  # kind of kernel, one of PRODUCERS
    function: Function  # computes the output from `inputs`
    inputs: tuple[Alias, ...]
    output: weakref.ref[torch.UntypedStorage]
    num_bytes: int  # of the whole storage
    shape: torch.Size  # of the output in its storage, as are stride and dtype
    stride: tuple[int, ...]
    dtype: torch.dtype
    version_probe: Alias  # detects in-place changes of the output
    depth: int = 1  # longest chain of records and specs from saved tensors to the output

    @property
    def address(self) -> int:
        """Address of the output's storage, which must still be alive."""
        storage = self.output()
        assert storage is not None
        return storage._cdata

    def input_changed(self) -> bool:
        """Whether an input was changed in place, or emptied (by selective recomputation), since it was recorded."""
        for alias in self.inputs:  # noqa: SIM110 - a generator takes longer, several times for every output
            if alias.changed() or _is_emptied(alias.tensor):
                return True
        return False

    def is_unchanged(self, storage: torch.UntypedStorage | None) -> bool:
        """Whether ``storage`` is the output's, and neither it nor an input was changed in place."""
        if storage is None or self.output() is not storage or storage.nbytes() != self.num_bytes:
            return False
        return not self.version_probe.changed() and not self.input_changed()

    def recomputes_same_bytes(self, storage: torch.UntypedStorage) -> bool:
        """Recompute the output. Return whether its layout is the same and its bits equal those of ``storage``."""
        other = run_again(self.function, [alias.tensor for alias in self.inputs])
        if (other.shape, other.stride(), other.dtype) != (self.shape, self.stride, self.dtype):
            return False
        found = other.untyped_storage()
        if storage.device.type == "meta":  # no bytes: a dry run
            return found.nbytes() == self.num_bytes
        return found.nbytes() == self.num_bytes and torch.equal(_words(found), _words(storage))


@dataclass
class Chain:
    """Unsaved direct and indirect inputs of a storage of ``num_bytes``: they are recomputed or kept."""

    num_bytes: int
    # Records of the inputs to recompute, each after the records of its own inputs.
    makers: list[ProducerRecord] = field(default_factory=list)
    kept_bytes: int = 0  # kept inputs without a producer: small ones, such as a table of rotary angles
    sources: list[int] = field(default_factory=list)  # addresses of inputs that are saved for it
    not_made: set[int] = field(default_factory=set)  # addresses of inputs that were tried and are not recomputed

    def mark(self) -> tuple[int, int, int]:
        """Return the present state, for ``reset``."""
        return len(self.makers), self.kept_bytes, len(self.sources)

    def reset(self, mark: tuple[int, int, int]) -> None:
        """Drop what was added since ``mark``."""
        num_makers, self.kept_bytes, num_sources = mark
        del self.makers[num_makers:], self.sources[num_sources:]


def version_probe_of(tensor: torch.Tensor) -> Alias:
    """Return an alias of ``tensor`` without its memory: it detects in-place changes and keeps no memory alive."""
    alias = alias_of(tensor)
    alias.tensor.data = _empty(tensor.dtype, tensor.device)  # the version counter remains
    return alias


@functools.cache
def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def of_tensors_alone(
    function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any],
    is_free: Callable[[Any], bool] = _is_tensor,
) -> tuple[Callable[..., Any], list[torch.Tensor]]:  # fmt: skip
    """Bind all arguments of ``function`` except its tensors (those with ``is_free``). Return function and tensors."""
    indices, tensors = [], []
    others = list(arguments)
    for index, value in enumerate(arguments):
        if is_free(value):
            indices.append(index)
            tensors.append(value)
            others[index] = None
    names = [name for name, value in options.items() if is_free(value)]
    bound = {name: value for name, value in options.items() if name not in names}
    num_arguments = len(indices)

    def again(*tensors: torch.Tensor) -> Any:
        full = list(others)
        for index, tensor in zip(indices, tensors, strict=False):
            full[index] = tensor
        return function(*full, **bound, **dict(zip(names, tensors[num_arguments:], strict=True)))

    return again, [*tensors, *(options[name] for name in names)]


def _is_emptied(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def run_again(function: Function, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``function(*tensors)``, computed without gradients and outside autocast."""
    device = tensors[0].device.type
    # The meta device has no autocast.
    plain = torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()
    with torch.no_grad(), plain:
        return function(*tensors)


def _words(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the storage as integers, so that NaN and -0 compare by bits. Wide ones need less scratch memory."""
    view = bytes_of(storage)
    return view.view(torch.int64) if len(view) % 8 == 0 else view
