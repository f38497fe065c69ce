"""The state that a layer may read beside its arguments, compared and put back when the layer runs again.

A layer reads the dictionaries of its modules, the attributes of its classes, and their contents to a bounded depth.
Numbers and strings count by value, tensors by identity and version, arrays and generators by contents, other objects by
identity. Globals, closures, iterators and changes without a version are not seen here: checksums find them
(``recomputed_run.py``).

Contents of dictionaries, lists, sets, queues and slots are put back for the second run. Contents of tensors, arrays and
generators cannot be put back.
"""

from __future__ import annotations

import array
import functools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import is_
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

MAX_DEPTH = 4  # containers and objects inside each other, from an attribute of a module on
MAX_ITEMS = 1024  # a longer container is compared by its length alone
MAX_READ = 20_000  # Entries and items read of a layer: at most 1 ms in each run. The rest is left out.
MAX_BYTES = 1 << 20  # bytes of arrays read of a layer; the rest is left out

# Types whose objects never change: two equal objects are the same.
ATOMS = frozenset(
    {
        NoneType, bool, int, float, complex, str, bytes, range, slice, type(...), type, FunctionType, MethodType,
        BuiltinFunctionType, ModuleType, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
    }
)  # fmt: skip
# Packages whose objects are not looked into, except modules.
LIBRARIES = frozenset(
    {"torch", "numpy", "builtins", "functools", "weakref", "threading", "logging", "megatron", "transformer_engine"}
)

# Returns the attributes of a module that count, or None for all. The layer's checkpoint handles the others.
Attributes = Callable[[nn.Module], Collection[str] | None]


class Change(NamedTuple):
    """A difference."""

    where: str  # its name
    owner: Any
    old: Any  # contents of `owner` before; None if they cannot be put back


class _Entries(NamedTuple):
    """Contents of a dictionary."""

    owner: Mapping[Any, Any]
    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    path: str

    def is_current(self) -> bool:
        owner, values = self.owner, self.values
        return len(owner) == len(values) and all(map(is_, owner.values(), values)) and all(map(is_, owner, self.keys))


class _Items(NamedTuple):
    """Contents of a list, a set or a queue."""

    owner: Collection[Any]
    items: tuple[Any, ...]
    path: str

    def is_current(self) -> bool:
        return len(self.owner) == len(self.items) and all(map(is_, self.owner, self.items))


class _Raw(NamedTuple):
    """An object whose contents ``read`` returns, for a comparison."""

    owner: Any
    read: Callable[[Any], Any]
    path: str


@dataclass
class _Structure:
    """Everything that is read, with the contents of dictionaries and sequences."""

    entries: list[_Entries] = field(default_factory=list)
    items: list[_Items] = field(default_factory=list)
    empties: list[Collection[Any]] = field(default_factory=list)  # containers that were empty: a hundred in a layer
    empty_paths: list[str] = field(default_factory=list)
    versioned: list[torch.Tensor] = field(default_factory=list)
    version_paths: list[str] = field(default_factory=list)
    unversioned: list[torch.Tensor] = field(default_factory=list)
    raw: list[_Raw] = field(default_factory=list)

    def is_current(self) -> bool:
        """Whether all dictionaries and sequences have their earlier contents. Takes tens of us for a layer."""
        if any(map(len, self.empties)):
            return False
        return all(one.is_current() for one in self.entries) and all(one.is_current() for one in self.items)


class LayerState:
    """The state that a layer reads, at the beginning of a run. ``on_change`` is called if it differs later."""

    def __init__(self, structures: Iterable[_Structure], on_change: Callable[[], None]) -> None:
        self._structures = tuple(structures)
        self._on_change = on_change
        self._versions = [[tensor._version for tensor in one.versioned] for one in self._structures]
        self._raw = [[raw.read(raw.owner) for raw in one.raw] for one in self._structures]
        # Inference tensors: nothing counts their changes.
        self.has_uncounted = any(one.unversioned for one in self._structures)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that are read."""
        for one in self._structures:
            yield from one.versioned

    def can_be_put_back(self) -> bool:
        """Whether everything is as it was, or can be put back while the layer runs again."""
        return all(change.old is not None for change in self.changes())

    def changes(self) -> list[Change]:
        """Return the differences between then and now."""
        found: list[Change] = []
        for one, versions, raw in zip(self._structures, self._versions, self._raw, strict=True):
            if not one.is_current():
                found += _changed_entries(one)
                self._on_change()  # else the reader would hold what was replaced until the next forward
            if [tensor._version for tensor in one.versioned] != versions:
                rows = zip(one.versioned, versions, one.version_paths, strict=True)
                found += [Change(path, tensor, None) for tensor, was, path in rows if tensor._version != was]
            found += [
                Change(leaf.path, leaf.owner, None)
                for leaf, was in zip(one.raw, raw, strict=True) if leaf.read(leaf.owner) != was
            ]  # fmt: skip
        return found


class StateReader:
    """Reads the state of one layer. Reads only versions and contents again until an object is replaced."""

    def __init__(self, module: nn.Module, attributes: Attributes = lambda _: None) -> None:
        self._module = module
        self._attributes = attributes
        self._structure: _Structure | None = None

    def read(self, arguments: Iterable[Any] = ()) -> LayerState:
        """Return the present state. Tensors and objects among the run's ``arguments`` count as attributes do."""
        structure = self._structure
        if structure is None or not structure.is_current():
            structure = self._structure = self._renewed(structure) or self._walk()
        given = [one for one in arguments if type(one) not in ATOMS]
        if not given:
            return LayerState([structure], self._forget)
        walk = _Walk()
        for one in given:
            walk.add(one, "an argument", 0)
        return LayerState([structure, walk.structure], self._forget)

    def _forget(self) -> None:
        self._structure = None

    def _walk(self) -> _Structure:
        walk = _Walk()
        for path, module in self._module.named_modules():
            walk.add_module(module, path, self._attributes(module))
        return walk.structure

    def _renewed(self, structure: _Structure | None) -> _Structure | None:
        """Return the structure if only atoms were replaced, such as a counter. None if a new walk is needed."""
        if structure is None or any(map(len, structure.empties)) or not all(i.is_current() for i in structure.items):
            return None
        entries = list(structure.entries)
        for place, one in enumerate(entries):
            if one.is_current():
                continue
            values = tuple(one.owner.values())
            if len(values) != len(one.values) or not all(map(is_, one.owner, one.keys)):
                return None
            if any(now is not was and not _are_atoms(now, was) for now, was in zip(values, one.values, strict=True)):
                return None
            entries[place] = one._replace(values=values)
        return replace(structure, entries=entries)


class _Walk:
    """Finds the state that a layer reads. Does not look into modules outside the layer."""

    def __init__(self) -> None:
        self.structure = _Structure()
        self._seen: set[int] = set()
        self._num_read = self._num_bytes = 0

    def add_module(self, module: nn.Module, path: str, names: Collection[str] | None) -> None:
        """Add a module of the layer at ``path``: these of its attributes, and its class."""
        start = f"{path}." if path else ""
        self._add_entries(vars(module) if names is None else _Some(vars(module), names), start, -1)
        if slots := _Slots(module):
            self._add_entries(slots, start, 0)
        for kind in type(module).__mro__:
            if kind.__module__.partition(".")[0] not in LIBRARIES and id(kind) not in self._seen:
                self._seen.add(id(kind))
                self._add_entries(vars(kind), f"{kind.__name__}.", 0)

    def add(self, value: Any, path: str, depth: int) -> None:
        """Add ``value`` and its contents."""
        kind = type(value)
        if kind in ATOMS or id(value) in self._seen or depth > MAX_DEPTH or self._num_read > MAX_READ:
            return
        self._seen.add(id(value))
        found = self.structure
        if isinstance(value, torch.Tensor):
            if value.is_inference():
                found.unversioned.append(value)
            else:
                found.versioned.append(value)
                found.version_paths.append(path)
        elif isinstance(value, (dict, list, set, deque)):
            self._add_container(value, path, depth)
        elif isinstance(value, (tuple, frozenset)):
            for item in value if len(value) <= MAX_ITEMS else ():
                self.add(item, path, depth + 1)
        elif isinstance(value, functools.partial):
            self.add(value.args, path, depth + 1)
            self.add(value.keywords, path, depth + 1)
        elif (read := _reader_of(value)) is not None:
            self._num_bytes += _num_bytes_of(value)
            if self._num_bytes <= MAX_BYTES:
                found.raw.append(_Raw(value, read, path))
        elif isinstance(value, nn.Module):
            return  # its own entries are added, or it is outside the layer
        elif kind.__module__.partition(".")[0] not in LIBRARIES:
            attributes = getattr(value, "__dict__", None)
            if isinstance(attributes, dict):
                self._add_entries(attributes, f"{path}.", depth)
            if slots := _Slots(value):
                self._add_entries(slots, f"{path}.", depth)

    def _add_container(self, value: Any, path: str, depth: int) -> None:
        if not value:
            self.structure.empties.append(value)
            self.structure.empty_paths.append(path)
        elif len(value) > MAX_ITEMS:
            self.structure.raw.append(_Raw(value, len, path))
        elif isinstance(value, dict):
            self._add_entries(value, f"{path}.", depth)
        else:
            items = tuple(value)
            self._num_read += len(items)
            self.structure.items.append(_Items(value, items, path))
            for item in items:
                self.add(item, path, depth + 1)

    def _add_entries(self, owner: Mapping[Any, Any], start: str, depth: int) -> None:
        keys, values = tuple(owner), tuple(owner.values())
        self._num_read += len(keys)
        self.structure.entries.append(_Entries(owner, keys, values, start))
        for key, value in zip(keys, values, strict=True):
            if type(value) not in ATOMS:
                self.add(value, f"{start}{key}", depth + 1)


class _View(Mapping[Any, Any]):
    """A view of some parts of an object."""

    def __init__(self, of: Any, names: Collection[str]) -> None:
        self.of = of
        self.names = names

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Some(_View):
    """A view of some entries of a dictionary."""

    def __iter__(self) -> Iterator[Any]:
        return (name for name in self.names if name in self.of)

    def __getitem__(self, key: Any) -> Any:
        if key not in self.names:
            raise KeyError(key)
        return self.of[key]


class _Slots(_View):
    """A view of the slots of an object."""

    def __init__(self, of: Any) -> None:
        super().__init__(of, tuple(_slots_of(type(of))))

    def __iter__(self) -> Iterator[Any]:
        return (name for name in self.names if hasattr(self.of, name))

    def __getitem__(self, key: Any) -> Any:
        if key not in self.names or not hasattr(self.of, key):
            raise KeyError(key)
        return getattr(self.of, key)

    def replace(self, values: Mapping[str, Any]) -> None:
        """Give the slots these values. Slots without a value are unset."""
        for name in tuple(self):
            if name not in values:
                object.__delattr__(self.of, name)
        for name, value in values.items():
            object.__setattr__(self.of, name, value)  # also of a frozen dataclass


def _changed_entries(structure: _Structure) -> Iterator[Change]:
    for one in structure.entries:
        if not one.is_current():
            yield from _differences(one)
    for items in structure.items:
        if not items.is_current() and not _are_same(tuple(items.owner), items.items):
            yield Change(items.path, items.owner, items.items)
    for owner, path in zip(structure.empties, structure.empty_paths, strict=True):
        if owner:
            yield Change(path, owner, {} if isinstance(owner, dict) else ())


def _differences(one: _Entries) -> Iterator[Change]:
    was = dict(zip(one.keys, one.values, strict=True))
    is_class = isinstance(one.owner, MappingProxyType)  # Python itself sets ``__annotations__`` and such
    names = [
        key for key in {**was, **one.owner}
        if not (is_class and key.startswith("__"))
        and (key not in was or key not in one.owner or not _are_same(one.owner[key], was[key]))
    ]  # fmt: skip
    if not names:
        return
    path, owner = one.path + ", ".join(map(str, names)), one.owner
    if isinstance(owner, _Some):
        owner = owner.of
        was |= {key: value for key, value in owner.items() if key not in one.owner}
    yield Change(path, owner, was if isinstance(owner, (dict, _Slots)) else None)


def set_back(changes: Sequence[Change]) -> None:
    """Give the owners of ``changes`` their earlier contents; all can be put back."""
    for change in changes:
        assert change.old is not None
        _set_contents(change.owner, change.old)


@contextmanager
def put_back(changes: Sequence[Change]) -> Iterator[None]:
    """Return a context in which the owners of ``changes`` have their earlier contents; all can be put back."""
    now = [(change.owner, _contents_of(change.owner)) for change in changes]
    try:
        set_back(changes)
        yield
    finally:
        for owner, contents in now:
            _set_contents(owner, contents)


def _contents_of(owner: Any) -> Any:
    return dict(owner.items()) if isinstance(owner, (dict, _Slots)) else tuple(owner)


def _set_contents(owner: Any, contents: Any) -> None:
    """Replace the contents of ``owner`` by its base's methods: a ``Counter``'s own methods add, others may raise."""
    if isinstance(owner, _Slots):
        owner.replace(contents)
    elif isinstance(owner, dict):  # in their order: that of hooks counts
        base: Any = OrderedDict if isinstance(owner, OrderedDict) else dict
        base.clear(owner)
        for key, value in contents.items():
            base.__setitem__(owner, key, value)
    elif isinstance(owner, list):
        list.__setitem__(owner, slice(None), contents)
    elif isinstance(owner, set):
        set.clear(owner)
        set.update(owner, contents)
    else:
        deque.clear(owner)
        deque.extend(owner, contents)


def _are_same(one: Any, other: Any) -> bool:
    """Whether two values are the same, or equal and of types that never change, or containers of such."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) in ATOMS:
        return bool(one == other) or one != one
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(_are_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_same(one[key], other[key]) for key in one)
    if isinstance(one, (set, frozenset)):
        return bool(one == other)
    read = _reader_of(one)
    return read is not None and bool(read(one) == read(other))


def _are_atoms(one: Any, other: Any) -> bool:
    return type(one) in ATOMS and type(other) in ATOMS


def _reader_of(value: Any) -> Callable[[Any], Any] | None:
    """Return a function that reads the contents of ``value`` that may change, or None if it has none."""
    return next((read for kinds, read in _READERS if isinstance(value, kinds)), None)


# Kinds of objects without a version, and what they contain.
_READERS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (np.ndarray, lambda one: (one.shape, one.tobytes())),
    ((array.array, bytearray, memoryview), bytes),
    (torch.Generator, lambda one: one.get_state().numpy().tobytes()),
    (random.Random, random.Random.getstate),
    (np.random.Generator, lambda one: repr(one.bit_generator.state)),
    (np.random.RandomState, lambda one: repr(one.get_state(legacy=False))),
)


def _num_bytes_of(value: Any) -> int:
    if isinstance(value, (np.ndarray, memoryview)):
        return value.nbytes
    return len(value) if isinstance(value, (array.array, bytearray)) else 0


def _slots_of(kind: type) -> Iterator[str]:
    for one in kind.__mro__:
        slots = one.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__"):
                yield name
