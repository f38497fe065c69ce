"""The third action: what a cheap kernel makes again from tensors that are saved anyway is not held at all.

While a layer runs, producers (``producers.py``) tell what they made: this output is that function of these tensors.
Where autograd then saves the output and the policy says RECOMPUTE, the graph holds a ``Recipe``: the function and its
inputs, each as one more saved tensor on what stands in the graph for it already (swapped, kept, or itself a recipe).
Unpack runs the very same function again.

Only functions without randomness may be told. Whether one really makes the same bits is not believed but tried, at the
first use of each site, while the original is still there; a site that fails is refused for the rest of the run.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.swap.checksum import checksum
from megatron.swap.devices.base import Device, Stream
from megatron.swap.group import Group
from megatron.swap.handle import Alias, alias_of
from megatron.swap.manager import VerifyError
from megatron.swap.recording import COMPARISON, TRIAL
from megatron.swap.trace import Counters, Ranges
from megatron.swap.types import Action, Site, SwapError

NOT_THE_SAME = "made again, it was not the same to the bit"

Function = Callable[..., torch.Tensor]
"""Of tensors alone; whatever else it needs it has bound."""


def _witness(tensor: torch.Tensor) -> Alias:
    """The version of ``tensor`` without its memory: shows later in-place changes and keeps nothing alive."""
    alias = alias_of(tensor)
    alias.tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # the version counter remains
    return alias


@dataclass(frozen=True, slots=True)
class _Made:
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

    def again(self) -> torch.Tensor:
        """Make the output again."""
        return _run(self.function, [alias.tensor for alias in self.inputs])

    def is_same(self, other: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether ``other`` is laid out as the output was, and its bytes are those of ``storage``."""
        if (other.shape, other.stride(), other.dtype) != (self.shape, self.stride, self.dtype):
            return False
        found = other.untyped_storage()
        return found.nbytes() == self.num_bytes and torch.equal(_words(found), _words(storage))


class Recipe:
    """How to make a storage again that is not held.

    Attributes:
        site, group: where it was saved first.
        num_bytes: size of the storage.
        function, inputs: what makes it, and what stands in the graph for each tensor it needs.
        output: the storage as forward had it, while that lives.
        witness: shows in-place changes of it.
        storage, stream: made again, and on which stream, from the first until the last unpack of a backward.
        num_packed, num_unpacked: saved tensors on it, and how many of them were asked back since it was made again.
    """

    __slots__ = (
        "__weakref__", "checksum", "function", "group", "inputs", "num_bytes", "num_packed", "num_unpacked", "output",
        "site", "storage", "stream", "witness",
    )  # fmt: skip

    def __init__(self, site: Site, group: Group, made: _Made, inputs: tuple[Any, ...]) -> None:
        self.site = site
        self.group = group
        self.num_bytes = made.num_bytes
        self.function = made.function
        self.inputs = inputs
        self.output = made.output
        self.witness = made.witness
        self.checksum: torch.Tensor | None = None
        self.storage: torch.UntypedStorage | None = None
        self.stream: Stream | None = None
        self.num_packed = 0
        self.num_unpacked = 0

    @property
    def label(self) -> str:
        return f"{self.site} mb{self.group.micro_batch}"


@dataclass
class _Run:
    """What is known while one layer runs, by the address of a storage. An entry counts while that storage lives."""

    made: dict[int, _Made] = field(default_factory=dict)
    saved: dict[int, weakref.ref[torch.UntypedStorage]] = field(default_factory=dict)
    recipes: dict[int, Recipe] = field(default_factory=dict)

    def recipe(self, address: int) -> Recipe | None:
        recipe = self.recipes.get(address)
        return recipe if recipe is not None and recipe.output() is not None else None

    def forget(self) -> None:
        """The layer is through. Nothing may wait for the garbage collector: ``made`` holds device memory."""
        self.made.clear()
        self.saved.clear()
        self.recipes.clear()

    def is_saved(self, address: int) -> bool:
        reference = self.saved.get(address)
        return reference is not None and reference() is not None


class Recipes:
    """Decides which saved tensors become recipes, and makes their storages again.

    Args:
        device: its streams.
        choose: the policy: what to do with a storage (of so many bytes) saved at a site, made by that producer.
        counters, ranges: where work is counted, and told to a profiler.
        verify: compare checksums of every storage that is made again.

    Attributes:
        refused: sites that should be recomputed and are not: the first reason for each.
        spared_bytes: what each producer's recipes have kept from being held, since the start.
    """

    def __init__(
        self,
        device: Device,
        choose: Callable[[Site, int, str | None], Action],
        counters: Counters,
        ranges: Ranges,
        verify: bool = False,
    ) -> None:
        self.refused: dict[Site, str] = {}
        self.spared_bytes: Counter[str] = Counter()
        self._device = device
        self._choose = choose
        self._counters = counters
        self._ranges = ranges
        self._verify = verify
        self._run: _Run | None = None
        self._tried: dict[Site, bool] = {}

    # ------------------------------------------------------------------ forward

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a layer's forward: what producers tell counts until its end."""
        outer, self._run = self._run, _Run()
        try:
            yield
        finally:
            self._run.forget()
            self._run = outer

    def watched(self, producer: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which tells what it makes wherever gradients are wanted."""

        @functools.wraps(function)
        def tells(*arguments: Any, **options: Any) -> Any:
            output = function(*arguments, **options)
            if torch.is_grad_enabled():
                self.tell(producer, function, arguments, options, output)
            return output

        return tells

    def tell(
        self,
        producer: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        output: Any,
    ) -> None:
        """A producer made ``output`` as ``function(*arguments, **options)``, and would make the same bits again."""
        run = self._run
        if run is None or type(output) is not torch.Tensor or torch.is_autocast_enabled(output.device.type):
            return
        again, inputs = _of_tensors_alone(function, arguments, options)
        if not inputs or any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in inputs):
            return
        storage = output.untyped_storage()
        address = storage._cdata
        if output.storage_offset() or output.numel() * output.element_size() != storage.nbytes():
            return  # not the whole of its storage: the rest would not be made again
        if any(tensor.untyped_storage()._cdata == address for tensor in inputs):
            return  # in place, or nothing made at all

        def freed(reference: weakref.ref[torch.UntypedStorage]) -> None:
            made = run.made.get(address)
            if made is not None and made.output is reference:
                del run.made[address]

        run.made[address] = _Made(
            producer,
            again,
            tuple(alias_of(tensor) for tensor in inputs),
            weakref.ref(storage, freed),
            storage.nbytes(),
            output.shape,
            output.stride(),
            output.dtype,
            _witness(output),
        )

    def take(
        self,
        tensor: torch.Tensor,
        site: Site | None,
        group: Group,
        is_constant: Callable[[torch.Tensor], bool],
        join: Callable[[torch.Tensor], Any],
    ) -> Recipe | None:
        """Autograd saves ``tensor``: the recipe to hold instead, or ``None`` if its storage is to be had otherwise.

        Args:
            site: where; ``None`` for a recipe's input, which joins a recipe that is there and starts none.
            is_constant: whether a tensor stays on the device anyway (parameters).
            join: what stands in the graph for an input, as one more saved tensor on what is saved of it already.
        """
        run = self._run
        if run is None:
            return None
        storage = tensor.untyped_storage()
        address = storage._cdata
        recipe = run.recipe(address)
        if recipe is not None and recipe.witness.changed():
            recipe = None  # those who saved it before will hear of that
        elif recipe is None and site is not None:
            recipe = self._begin(site, group, storage, run, is_constant, join)
        if recipe is not None:
            recipe.num_packed += 1
        elif site is not None:
            run.saved[address] = weakref.ref(storage)
        return recipe

    def _begin(
        self,
        site: Site,
        group: Group,
        storage: torch.UntypedStorage,
        run: _Run,
        is_constant: Callable[[torch.Tensor], bool],
        join: Callable[[torch.Tensor], Any],
    ) -> Recipe | None:
        """A recipe for a storage that is saved for the first time, if the policy wants one and there can be one."""
        address, num_bytes = storage._cdata, storage.nbytes()
        made = run.made.get(address)
        if self._choose(site, num_bytes, None if made is None else made.producer) is not Action.RECOMPUTE:
            return None
        problem = "it is not known what makes it"
        if made is None or (problem := self._problem(site, storage, made, run, is_constant)):
            self._counters.num_not_recomputed += 1
            self.refused.setdefault(site, problem)
            return None
        recipe = Recipe(site, group, made, tuple(join(alias.tensor) for alias in made.inputs))
        if self._verify:
            recipe.checksum = checksum(_bytes(storage))
        run.recipes[address] = recipe
        del run.made[address]
        self.spared_bytes[made.producer] += num_bytes
        self._counters.layers[site.layer].recomputed_bytes += num_bytes
        return recipe

    def _problem(
        self,
        site: Site,
        storage: torch.UntypedStorage,
        made: _Made,
        run: _Run,
        is_constant: Callable[[torch.Tensor], bool],
    ) -> str:
        """Why the storage cannot be recomputed; empty if it can."""
        if self._tried.get(site) is False:
            return NOT_THE_SAME
        if run.is_saved(storage._cdata):
            return "another site has saved it before, and holds it"
        if made.witness.changed() or storage.nbytes() != made.num_bytes:
            return "it was changed in place after it was made"
        for alias in made.inputs:
            if alias.changed():
                return "what it was made from was changed in place"
            address = alias.tensor.untyped_storage()._cdata
            if not (is_constant(alias.tensor) or run.is_saved(address) or run.recipe(address) is not None):
                return "what it was made from is not saved by anybody: keeping that instead would save nothing"
        if site not in self._tried:
            with self._ranges.mark(f"{TRIAL} {site}"):
                other = made.again()
            with self._ranges.mark(f"{COMPARISON} {site}"):
                self._tried[site] = made.is_same(other, storage)
                del other  # before the range ends: what a listener sees of memory afterwards is the layer's own
        return "" if self._tried[site] else NOT_THE_SAME

    def source(
        self, tensor: torch.Tensor, site: Site, is_constant: Callable[[torch.Tensor], bool], try_again: bool
    ) -> tuple[str, list[torch.Tensor]] | None:
        """What makes a tensor that is about to be saved first, whatever the policy says; for a recorder.

        Args:
            try_again: also where it was tried before, so that a listener to ranges can time it.

        Returns:
            Its producer and what that reads, constants aside; ``None``: there is no recipe.
        """
        storage = tensor.untyped_storage()
        run = self._run
        made = None if run is None else run.made.get(storage._cdata)
        if run is None or made is None or run.recipe(storage._cdata) is not None:
            return None
        if try_again and self._tried.get(site):
            del self._tried[site]
        if self._problem(site, storage, made, run, is_constant):
            return None
        return made.producer, [alias.tensor for alias in made.inputs if not is_constant(alias.tensor)]

    # ----------------------------------------------------------------- backward

    def make(self, recipe: Recipe, unpack: Callable[[Any], torch.Tensor]) -> torch.UntypedStorage:
        """Autograd asks for a saved tensor of ``recipe``: the storage, made again.

        All saved tensors on it share one storage, as they did in forward.

        Raises:
            RuntimeError: the storage, or what it is made from, was changed in place after autograd saved it.
            SwapError: what was made again is of another size.
            VerifyError: with ``verify``, the bytes are not those that were saved.
        """
        recipe.witness.check(str(recipe.site))
        stream = self._device.current_stream()
        storage = recipe.storage
        # Another stream makes its own: nothing orders it behind the first one's kernel.
        if storage is None or recipe.stream != stream:
            with self._ranges.storage("recompute", recipe, recipe.num_bytes):
                storage = _run(recipe.function, [unpack(packed) for packed in recipe.inputs]).untyped_storage()
                self._ranges.arrived(recipe, storage)
            self._check(recipe, storage)
            recipe.storage, recipe.stream = storage, stream
            self._counters.num_recomputed += 1
        recipe.num_unpacked += 1
        if recipe.num_unpacked >= recipe.num_packed:
            # From here on its user alone keeps it. A second backward over a retained graph makes it again.
            recipe.storage, recipe.num_unpacked = None, 0
        return storage

    def _check(self, recipe: Recipe, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() != recipe.num_bytes:
            raise SwapError(
                f"{recipe.site}: made again, it has {storage.nbytes()} bytes instead of {recipe.num_bytes}. The kernel "
                "that made it is not what it was in forward. Leave --swap-recompute away, and report this."
            )
        if recipe.checksum is not None and not torch.equal(checksum(_bytes(storage)), recipe.checksum):
            raise VerifyError(
                f"--swap-verify: {recipe.site} ({recipe.num_bytes} bytes) was made again and is different from what "
                "autograd saved. Either something wrote to what it is made from, or its kernel does not give the same "
                "bits twice. Please report this with the model's flags; until then leave --swap-recompute away."
            )


def _of_tensors_alone(
    function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Function, list[torch.Tensor]]:
    """``function`` with all but the tensors bound, and those tensors."""
    names = [name for name, value in options.items() if isinstance(value, torch.Tensor)]
    places = [place for place, value in enumerate(arguments) if isinstance(value, torch.Tensor)]
    others = [None if place in places else value for place, value in enumerate(arguments)]
    bound = {name: value for name, value in options.items() if name not in names}

    def again(*tensors: torch.Tensor) -> Any:
        full = list(others)
        for place, tensor in zip(places, tensors, strict=False):
            full[place] = tensor
        return function(*full, **bound, **dict(zip(names, tensors[len(places) :], strict=True)))

    return again, [*(arguments[place] for place in places), *(options[name] for name in names)]


def _run(function: Function, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    device = tensors[0].device.type
    with torch.no_grad(), torch.autocast(device, enabled=False):
        return function(*tensors)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _words(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage as numbers to compare: bits decide, also of NaN and of zeros; wide ones need less scratch memory."""
    view = _bytes(storage)
    return view.view(torch.int64) if len(view) % 8 == 0 else view
