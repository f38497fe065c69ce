"""The third action: what a cheap kernel makes again from tensors that are saved anyway is not held at all.

While a layer runs, producers (``producers.py``) tell what they made: this output is that function of these tensors.
Where autograd then saves the output and the policy says RECOMPUTE, the graph holds a ``Recipe``: the function and its
inputs, each as one more saved tensor on what stands in the graph for it already (swapped, kept, or itself a recipe).
Unpack runs the very same function again.

An input may be saved later than the output: attention saves queries and keys before the values, whose storage all three
come from. Or never: then it is made again too, if its own producer has told. So a recipe waits, and holds the output,
until something is saved under another path; nothing is freed later for it, since a module's frame holds what it saves.

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
from megatron.swap.handle import alias_of
from megatron.swap.made import Chain, Made, bytes_of, of_tensors_alone, run_again, witness_of
from megatron.swap.manager import VerifyError
from megatron.swap.recording import TRIAL
from megatron.swap.trace import Counters, Ranges
from megatron.swap.types import Action, Site, SwapError


class Recipe:
    """How to make a storage again that is not held.

    Attributes:
        site, group: where it was saved first; number: 0, or which of the storages on the way to that one, which nobody
            saves, it makes.
        num_bytes: size of the storage.
        function, inputs: what makes it, and what stands in the graph for each tensor it needs.
        held: what stands in the graph for the storage itself where the recipe was refused after all.
        output: the storage as forward had it, while that lives.
        witness: shows in-place changes of it.
        storage, stream: made again, and on which stream, from the first until the last unpack of a backward.
        num_packed, num_unpacked: saved tensors on it, and how many of them were asked back since it was made again.
    """

    __slots__ = (
        "__weakref__", "checksum", "function", "group", "held", "inputs", "num_bytes", "num_packed", "num_unpacked",
        "number", "output", "site", "storage", "stream", "witness",
    )  # fmt: skip

    def __init__(self, site: Site, group: Group, made: Made, number: int = 0) -> None:
        self.site = site
        self.number = number
        self.group = group
        self.num_bytes = made.num_bytes
        self.function = made.function
        self.inputs: tuple[Any, ...] = ()
        self.held: Any = None
        self.output = made.output
        self.witness = made.witness
        self.checksum: torch.Tensor | None = None
        self.storage: torch.UntypedStorage | None = None
        self.stream: Stream | None = None
        self.num_packed = 0
        self.num_unpacked = 0

    @property
    def label(self) -> str:
        on_the_way = f"+{self.number}" if self.number else ""
        return f"{self.site}{on_the_way} mb{self.group.micro_batch}"


CHANGED_INPUT = "what it was made from was changed in place"


@dataclass(frozen=True, slots=True)
class Packing:
    """How a tensor gets into the graph.

    Attributes:
        is_constant: whether a tensor stays on the device anyway (parameters).
        join: what stands in the graph for an input, as one more saved tensor on what is saved of it already.
        hold: what stands in the graph for the tensor itself, without a recipe.
    """

    is_constant: Callable[[torch.Tensor], bool]
    join: Callable[[torch.Tensor], Any]
    hold: Callable[[torch.Tensor], Any]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A recipe before it is known what becomes of its inputs."""

    recipe: Recipe
    made: Made
    output: torch.Tensor
    packing: Packing


@dataclass(frozen=True, slots=True)
class _Sources:
    """What a storage on the way is made from, when somebody wants to know.

    Attributes:
        recipe: that makes it.
        tensors: saved ones.
        on_the_way: other recipes between these and it.
    """

    recipe: Recipe
    tensors: tuple[torch.Tensor, ...]
    on_the_way: tuple[Recipe, ...]


Told = Callable[[Recipe, str, Sequence[torch.Tensor], Sequence[Recipe]], None]
"""Of a new recipe: its producer, the saved tensors that it needs, the recipes of what nobody saves between."""


@dataclass
class _Run:
    """What is known while one layer runs, by the address of a storage. An entry counts while that storage lives."""

    made: dict[int, Made] = field(default_factory=dict)
    saved: dict[int, weakref.ref[torch.UntypedStorage]] = field(default_factory=dict)
    recipes: dict[int, Recipe] = field(default_factory=dict)
    waiting: list[_Waiting] = field(default_factory=list)
    sources: dict[int, _Sources] = field(default_factory=dict)

    def recipe(self, address: int) -> Recipe | None:
        recipe = self.recipes.get(address)
        return recipe if recipe is not None and recipe.output() is not None else None

    def forget(self) -> None:
        """The layer is through. Nothing may wait for the garbage collector: ``made`` holds device memory."""
        self.made.clear()
        self.saved.clear()
        self.recipes.clear()
        self.waiting.clear()
        self.sources.clear()

    def is_saved(self, address: int) -> bool:
        reference = self.saved.get(address)
        return reference is not None and reference() is not None

    def stands_in_graph(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage()._cdata
        return self.is_saved(address) or self.recipe(address) is not None


class Recipes:
    """Decides which saved tensors become recipes, and makes their storages again.

    Args:
        device: its streams.
        choose: the policy: what to do with a storage (of so many bytes) saved at a site, made by that producer.
        counters, ranges: where work is counted, and told to a profiler.
        verify: compare checksums of every storage that is made again.

    Attributes:
        refused: sites that should be recomputed and are not: the first reason for each.
        on_recipe: told of every new recipe, if set.
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
        self.on_recipe: Told | None = None
        self._run: _Run | None = None
        self._tried: dict[tuple[Site, int], bool] = {}
        """Whether the n-th function of a site's chain made the same again."""

    # ------------------------------------------------------------------ forward

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a layer's forward: what producers tell counts until its end."""
        outer, run = self._run, _Run()
        self._run = run
        try:
            yield
            self._settle(run)
        finally:
            run.forget()
            self._run = outer

    def watched(self, producer: str, function: Callable[..., Any], part: int | None = None) -> Callable[..., Any]:
        """``function``, which tells what it makes (item ``part`` of its tuple) wherever gradients are wanted."""
        makes = function if part is None else lambda *given, **named: function(*given, **named)[part]

        @functools.wraps(function)
        def tells(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            if torch.is_grad_enabled():
                self.tell(producer, makes, arguments, options, result if part is None else result[part])
            return result

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
        again, inputs = of_tensors_alone(function, arguments, options)
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

        run.made[address] = Made(
            producer,
            again,
            tuple(alias_of(tensor) for tensor in inputs),
            weakref.ref(storage, freed),
            storage.nbytes(),
            output.shape,
            output.stride(),
            output.dtype,
            witness_of(output),
        )

    def take(self, tensor: torch.Tensor, site: Site | None, group: Group, packing: Packing) -> Recipe | None:
        """Autograd saves ``tensor``: the recipe to hold instead, or ``None`` if its storage is to be had otherwise.

        ``site``: where; ``None`` for a recipe's input, which joins a recipe that is there and starts none.
        """
        run = self._run
        if run is None:
            return None
        if site is not None and run.waiting:
            self._settle(run, site.path)
        address = tensor.untyped_storage()._cdata
        recipe = run.recipe(address)
        if recipe is not None and recipe.witness.changed():
            recipe = None  # those who saved it before will hear of that
        elif recipe is None and site is not None:
            recipe = self._begin(site, group, tensor, run, packing)
        if recipe is not None:
            recipe.num_packed += 1
        elif site is not None:
            run.saved[address] = weakref.ref(tensor.untyped_storage())
            run.made.pop(address, None)  # it holds the inputs
        return recipe

    def _begin(self, site: Site, group: Group, tensor: torch.Tensor, run: _Run, packing: Packing) -> Recipe | None:
        """A recipe for a storage that is saved for the first time, if the policy wants one and there can be one."""
        storage = tensor.untyped_storage()
        made = run.made.get(storage._cdata)
        if self._choose(site, storage.nbytes(), None if made is None else made.producer) is not Action.RECOMPUTE:
            return None
        problem = "another site has saved it before, and holds it"
        if not run.is_saved(storage._cdata):
            problem = "it is not known what makes it" if made is None else self._problem(site, storage, made)
        if made is None or problem:
            self._refuse(site, problem)
            return None
        waiting = _Waiting(self._recipe(site, group, made, run), made, tensor.detach(), packing)
        if all(packing.is_constant(alias.tensor) or run.stands_in_graph(alias.tensor) for alias in made.inputs):
            self._decide(waiting, run)
        else:
            run.waiting.append(waiting)
        return waiting.recipe

    def _recipe(self, site: Site, group: Group, made: Made, run: _Run, number: int = 0) -> Recipe:
        recipe, storage = Recipe(site, group, made, number), made.output()
        assert storage is not None
        if self._verify:
            recipe.checksum = checksum(bytes_of(storage))
        run.recipes[storage._cdata] = recipe
        del run.made[storage._cdata]
        return recipe

    def _refuse(self, site: Site, problem: str) -> None:
        self._counters.num_not_recomputed += 1
        self.refused.setdefault(site, problem)

    def _problem(self, site: Site, storage: torch.UntypedStorage, made: Made) -> str:
        """Why the storage cannot be recomputed, as far as that is known when it is saved; empty if it can."""
        if self._tried.get((site, 0)) is False:
            return self.refused[site]
        if made.witness.changed() or storage.nbytes() != made.num_bytes:
            return "it was changed in place after it was made"
        return CHANGED_INPUT if made.input_changed() else self._try(site, 0, made)

    def _try(self, site: Site, number: int, made: Made) -> str:
        """Make it again, once for each site, while the original is there; empty if both are the same."""
        storage = made.output()
        assert storage is not None
        if (site, number) not in self._tried:
            run, self._run = self._run, None  # what is told now is none of the layer's
            with self._ranges.mark(f"{TRIAL} {site}"):
                self._tried[site, number] = made.makes_the_same(storage)
            self._run = run
        return "" if self._tried[site, number] else "made again, it was not the same to the bit"

    def _settle(self, run: _Run, path: str | None = None) -> None:
        """Decide about recipes that wait, but for those saved under ``path``: more of it may be to come."""
        ready = [one for one in run.waiting if one.recipe.site.path != path]
        run.waiting = [one for one in run.waiting if one.recipe.site.path == path]
        for one in ready:
            self._decide(one, run)

    def _decide(self, waiting: _Waiting, run: _Run) -> None:
        """All that can be saved of a recipe's inputs is: find out what else has to be made again, or give it up."""
        recipe, packing = waiting.recipe, waiting.packing
        chain = Chain(recipe.num_bytes)
        problem = self._find_missing(recipe.site, waiting.made, run, packing, chain)
        if not problem:
            tries = (self._try(recipe.site, number, made) for number, made in enumerate(chain.makers, start=1))
            problem = next(filter(None, tries), "")
        if problem:
            self._tried[recipe.site, 0] = False
            self._refuse(recipe.site, problem)
            recipe.held = packing.hold(waiting.output)
            return
        for number, made in enumerate(chain.makers, 1):
            on_the_way = self._recipe(recipe.site, recipe.group, made, run, number)
            on_the_way.inputs = _joined(made, packing)
            if self.on_recipe is not None:
                run.sources[made.address] = _Sources(on_the_way, *_sources(made, run, packing))
        recipe.inputs = _joined(waiting.made, packing)
        if self.on_recipe is not None:
            self.on_recipe(recipe, waiting.made.producer, *_sources(waiting.made, run, packing))
        self.spared_bytes[waiting.made.producer] += recipe.num_bytes
        self._counters.layers[recipe.site.layer].recomputed_bytes += recipe.num_bytes

    def _find_missing(self, site: Site, made: Made, run: _Run, packing: Packing, chain: Chain) -> str:
        """Add to ``chain`` what nobody saves of what ``made`` needs. Returns why that cannot be had."""
        if made.input_changed():
            return CHANGED_INPUT
        for tensor in (alias.tensor for alias in made.inputs):
            storage = tensor.untyped_storage()
            source = run.made.get(storage._cdata)
            if packing.is_constant(tensor) or run.stands_in_graph(tensor) or source in chain.makers:
                continue
            if source is None:
                chain.kept_bytes += storage.nbytes()
                if chain.kept_bytes >= chain.num_bytes:
                    return "what it was made from is not saved by anybody: keeping that instead would save nothing"
                continue
            if self._choose(site, source.num_bytes, source.producer) is not Action.RECOMPUTE:
                return f"what it was made from is not saved by anybody, and {source.producer} is not to be recomputed"
            if source.witness.changed():
                return CHANGED_INPUT
            if problem := self._find_missing(site, source, run, packing, chain):
                return problem
            chain.makers.append(source)
        return ""

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
            if recipe.held is not None:
                storage = unpack(recipe.held).untyped_storage()
            else:
                inputs = [unpack(packed) for packed in recipe.inputs]  # its waits and recipes are none of ours
                with self._ranges.storage("recompute", recipe, recipe.num_bytes):
                    storage = run_again(recipe.function, inputs).untyped_storage()
                    self._ranges.arrived(recipe, storage)
                del inputs
                self._check(recipe, storage)
                self._counters.num_recomputed += 1
            recipe.storage, recipe.stream = storage, stream
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
        if recipe.checksum is not None and not torch.equal(checksum(bytes_of(storage)), recipe.checksum):
            raise VerifyError(
                f"--swap-verify: {recipe.site} ({recipe.num_bytes} bytes) was made again and is different from what "
                "autograd saved. Either something wrote to what it is made from, or its kernel does not give the same "
                "bits twice. Please report this with the model's flags; until then leave --swap-recompute away."
            )


def _sources(made: Made, run: _Run, packing: Packing) -> tuple[tuple[torch.Tensor, ...], tuple[Recipe, ...]]:
    """The saved tensors that ``made`` needs in the end, and the recipes between."""
    tensors: list[torch.Tensor] = []
    recipes: list[Recipe] = []
    for tensor in (alias.tensor for alias in made.inputs if not packing.is_constant(alias.tensor)):
        address = tensor.untyped_storage()._cdata
        known = run.sources.get(address)
        if known is not None and run.recipe(address) is known.recipe:
            tensors += known.tensors
            recipes += [known.recipe, *known.on_the_way]
        else:
            tensors.append(tensor)
    return tuple(tensors), tuple(recipes)


def _joined(made: Made, packing: Packing) -> tuple[Any, ...]:
    return tuple(packing.join(alias.tensor) for alias in made.inputs)
