"""Patches of upstream symbols, applied and reverted as a set.

A patch replaces one upstream symbol *where it is looked up*: in the importing module, if another upstream module has
imported a function by name. A patch that does not fit ends the run, unless the run can do without the patch's feature.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

UNCHECKED_VARIABLE = "MEGATRON_SWAP_UNCHECKED_UPSTREAM"

VERSIONS = {  # of upstream distributions whose sources the patches fit, the oldest first
    "megatron-core": ("0.18.2", "0.19.0", "0.19.2"),
    "transformer_engine": ("2.17.0", "2.17.1", "2.18.0", "2.19.0", "2.20.2"),
    "torch": ("2.11.0",),
}
# Earlier versions of megatron-core, whose models `install` swaps. The trainer's patches do not fit them.
BUILT_ONLY = ("0.16.1", "0.17.1")

# Symbols that are replaced now. A second patch of a symbol would take the first replacement for the original.
_in_place: set[str] = set()


class PatchError(RuntimeError):
    """A patch cannot be applied. The message names the symbol and what to do."""


@dataclass(frozen=True)
class Patch:
    """One upstream symbol and its replacement."""

    module: str  # dotted path of the module in which the symbol is looked up
    attribute: str  # name in the module; dotted for an attribute of a class
    build: Callable[[Any], Any]  # takes the original, returns the replacement
    reason: str  # why upstream's own behaviour does not suffice, for docs/dev/patches.md
    # Hash of the original's source (`source_hash`), by upstream distribution and the oldest version with this source,
    # such as "megatron-core 0.18.2". A version number alone would not do: vendors build variants of one version. None
    # for symbols whose version is pinned: their source is not checked.
    sources: Mapping[str, str | None]
    feature: str = ""  # that is lost if the patch does not fit; empty if the run cannot do without the patch
    whole_module: bool = False  # the hash is of the original's whole module, since the replacement needs more of it
    source_of: str = ""  # the symbol of the module whose hash counts, if the original has no source
    may_lack: bool = False  # if the module lacks the symbol, `build` takes None, and reverting deletes the symbol

    @property
    def symbol(self) -> str:
        """Dotted path of the symbol."""
        return f"{self.module}.{self.attribute}"

    @property
    def file(self) -> str:
        """The file of the patch, to review when upstream has changed."""
        return self.build.__module__.removeprefix("megatron.swap.").replace(".", "/") + ".py"

    @property
    def upstream(self) -> str:
        """The distribution that has the symbol."""
        return next(iter(self.sources)).split()[0]


@dataclass(frozen=True)
class Misfit:
    """A patch that does not fit the installed upstream."""

    patch: Patch
    found: str  # hash of the symbol's source, or why there is no such symbol
    is_missing: bool = False  # there is no such symbol


class AppliedPatches:
    """Patches that are applied, until ``revert``. Tests use it as a context manager."""

    def __init__(self, left_out: Sequence[Misfit] = ()) -> None:
        self.left_out = tuple(left_out)  # optional patches that do not fit and were not applied
        self._undo: list[tuple[str, Callable[[], None]]] = []

    @property
    def symbols(self) -> tuple[str, ...]:
        """The patched symbols, in the order of their patches."""
        return tuple(symbol for symbol, _ in self._undo)

    def revert(self) -> None:
        """Restore every symbol, in reverse order. Later calls do nothing."""
        while self._undo:
            symbol, undo = self._undo.pop()
            undo()
            _in_place.discard(symbol)

    def __enter__(self) -> AppliedPatches:
        return self

    def __exit__(self, *exception: object) -> None:
        self.revert()

    def _put(self, patch: Patch) -> None:
        owner, name, original = _locate(patch)
        replacement = patch.build(original)
        # Keep the owner's own attribute (a staticmethod object, say), or nothing if the symbol is inherited or builtin.
        # Reverting must leave the owner as before, without a copy of an inherited attribute.
        missing = object()
        own = vars(owner).get(name, missing)
        if own is missing and isinstance(owner, ModuleType) and type(owner) is not ModuleType:
            own = original  # torch's settings: a deleted setting can no longer be read
        setattr(owner, name, replacement)

        def undo() -> None:
            if own is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        self._undo.append((patch.symbol, undo))
        _in_place.add(patch.symbol)


def is_patched(symbol: str) -> bool:
    """Whether the symbol with this dotted path is replaced now."""
    return symbol in _in_place


def apply(patches: Sequence[Patch], optional: Sequence[Patch] = ()) -> AppliedPatches:
    """Check all patches, then apply those that fit in order, the ``optional`` patches last. Raises as ``verify``.

    Optional patches that do not fit are left out: the run can do without their ``feature``.
    """
    needed = {patch.symbol for patch in patches}
    unfit = {misfit.patch.symbol: misfit for misfit in find_misfits([*patches, *optional])}
    _refuse([unfit[symbol] for symbol in unfit if symbol in needed])
    applied = AppliedPatches(list(unfit.values()))
    try:
        for patch in (*patches, *optional):
            if patch.symbol not in unfit:
                applied._put(patch)
    except BaseException:
        applied.revert()
        raise
    return applied


def verify(patches: Sequence[Patch]) -> None:
    """Raise a ``PatchError`` that names all symbols that are missing, differ from their hashes, or are in place."""
    _refuse(find_misfits(patches))


def find_misfits(patches: Sequence[Patch]) -> list[Misfit]:
    """Return the patches that do not fit, in their order. Raises a ``PatchError`` if a symbol is in place."""
    unchecked = {name.strip() for name in os.environ.get(UNCHECKED_VARIABLE, "").split(",")}
    seen: set[str] = set()
    misfits = []
    for patch in patches:
        if patch.symbol in _in_place or patch.symbol in seen:
            raise PatchError(f"{patch.symbol} is patched already ({patch.file}): revert the first application.")
        seen.add(patch.symbol)
        try:
            _, _, original = _locate(patch)
        except (ImportError, AttributeError) as error:
            misfits.append(Misfit(patch, str(error), is_missing=True))
            continue
        expected = set(patch.sources.values())
        if None in expected or patch.symbol in unchecked:
            continue
        found = source_hash(_hashed(patch, original))
        if found not in expected:
            misfits.append(Misfit(patch, found))
    return misfits


def lost_features(misfits: Sequence[Misfit]) -> list[str]:
    """Return one line for each feature that is lost with the optional patches that were left out."""
    by_feature: dict[str, list[Patch]] = {}
    for misfit in misfits:
        by_feature.setdefault(misfit.patch.feature, []).append(misfit.patch)
    return [
        f"without {feature}: {patches[0].file} was not written for this {patches[0].upstream}'s "
        f"{', '.join(patch.attribute for patch in patches)}"
        for feature, patches in by_feature.items()
    ]


def say_left_out(applied: AppliedPatches) -> None:
    """Print on the first rank which features are lost, where there is no session yet to print it."""
    if os.environ.get("RANK", "0") == "0":
        for line in lost_features(applied.left_out):
            print(f" swap: {line}", flush=True)


def _refuse(misfits: Sequence[Misfit]) -> None:
    """Raise an error that names all symbols that do not fit, if any, and the way on."""
    if not misfits:
        return
    upstreams = list(dict.fromkeys(misfit.patch.upstream for misfit in misfits))
    lines = [f"Megatron Swap was not written for this {' and '.join(upstreams)}. These symbols do not fit:"]
    for misfit in misfits:
        patch, how = misfit.patch, f"does not exist here, {misfit.found}" if misfit.is_missing else "differs"
        lines.append(f"  {patch.symbol} ({how}). {patch.file} patches it: {patch.reason}.")
    lines.append(f"Install {' and '.join(map(_requirement, upstreams))}.")
    features = dict.fromkeys(misfit.patch.feature for misfit in misfits)
    if all(features):
        lines[-1] += f" Or run without {' and '.join(features)}."
    if not any(misfit.is_missing for misfit in misfits):
        symbols = ",".join(misfit.patch.symbol for misfit in misfits)
        found = ", ".join(f"{misfit.patch.attribute} {misfit.found}" for misfit in misfits)
        lines[-1] += (
            f" Or review these patches against your version, and set {UNCHECKED_VARIABLE}={symbols} to apply them all "
            f"the same (SHA-256 of the sources here: {found})."
        )
    raise PatchError("\n".join(lines))


def _requirement(upstream: str) -> str:
    *others, newest = VERSIONS[upstream]
    return f"{upstream}=={newest}" + (f" ({', '.join(others)} fit too)" if others else "")


def source_hash(symbol: Any) -> str:
    """Return the SHA-256 of a symbol's source, looking through decorators that keep the original."""
    try:
        source = inspect.getsource(symbol)
    except (OSError, TypeError):
        return "unavailable (no Python source)"
    return hashlib.sha256(source.encode()).hexdigest()


def _hashed(patch: Patch, original: Any) -> Any:
    """Return the symbol whose source the hashes are of; ``None`` if this upstream lacks it."""
    if patch.source_of:
        return getattr(importlib.import_module(patch.module), patch.source_of, None)
    return inspect.getmodule(original) if patch.whole_module else original


def _locate(patch: Patch) -> tuple[Any, str, Any]:
    """Return the object that holds the symbol, the symbol's name, and the symbol. Raises if there is none."""
    *path, name = patch.attribute.split(".")
    owner: Any = importlib.import_module(patch.module)
    for part in path:
        owner = getattr(owner, part)
    # A builtin (`print`) is replaced by setting its name in the module.
    if not path and not hasattr(owner, name) and hasattr(builtins, name):
        return owner, name, getattr(builtins, name)
    if patch.may_lack:
        return owner, name, getattr(owner, name, None)
    return owner, name, getattr(owner, name)
