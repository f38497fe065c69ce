"""What a layer's kernels have made: this tensor is that function of these tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.swap.handle import Alias, alias_of

Function = Callable[..., torch.Tensor]
"""Of tensors alone; whatever else it needs it has bound."""


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """What a producer has told. It holds the inputs until the output is saved or freed, or the layer ends."""

    producer: str
    function: Function
    inputs: tuple[Alias, ...]
    output: weakref.ref[torch.UntypedStorage]
    num_bytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    witness: Alias

    @property
    def address(self) -> int:
        """Of the output's storage, which lives."""
        storage = self.output()
        assert storage is not None
        return storage._cdata

    def input_changed(self) -> bool:
        """Whether anybody wrote into an input, or emptied it (selective recomputation does), since it was told."""
        return any(alias.changed() or _is_emptied(alias.tensor) for alias in self.inputs)

    def makes_the_same(self, storage: torch.UntypedStorage) -> bool:
        """Make the output again: whether it is laid out as before, and its bytes are those of ``storage``."""
        other = run_again(self.function, [alias.tensor for alias in self.inputs])
        if (other.shape, other.stride(), other.dtype) != (self.shape, self.stride, self.dtype):
            return False
        found = other.untyped_storage()
        return found.nbytes() == self.num_bytes and torch.equal(_words(found), _words(storage))


@dataclass
class Chain:
    """What has to be made again, or kept, for a storage of ``num_bytes``, because nobody saves it.

    Attributes:
        makers: each behind those of its own inputs.
        kept_bytes: of tensors that nothing is known to make: a table of angles, small beside what it makes.
    """

    num_bytes: int
    makers: list[Made] = field(default_factory=list)
    kept_bytes: int = 0


def witness_of(tensor: torch.Tensor) -> Alias:
    """The version of ``tensor`` without its memory: shows later in-place changes and keeps nothing alive."""
    alias = alias_of(tensor)
    alias.tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # the version counter remains
    return alias


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def of_tensors_alone(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    is_free: Callable[[Any], bool] = _is_tensor,
) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """``function`` with all but the tensors (those that ``is_free`` names) bound, and those tensors."""
    names = [name for name, value in options.items() if is_free(value)]
    places = [place for place, value in enumerate(arguments) if is_free(value)]
    others = [None if place in places else value for place, value in enumerate(arguments)]
    bound = {name: value for name, value in options.items() if name not in names}

    def again(*tensors: torch.Tensor) -> Any:
        full = list(others)
        for place, tensor in zip(places, tensors, strict=False):
            full[place] = tensor
        return function(*full, **bound, **dict(zip(names, tensors[len(places) :], strict=True)))

    return again, [*(arguments[place] for place in places), *(options[name] for name in names)]


def _is_emptied(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def run_again(function: Function, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    device = tensors[0].device.type
    with torch.no_grad(), torch.autocast(device, enabled=False):
        return function(*tensors)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _words(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage as numbers to compare: bits decide, also of NaN and of zeros; wide ones need less scratch memory."""
    view = bytes_of(storage)
    return view.view(torch.int64) if len(view) % 8 == 0 else view
