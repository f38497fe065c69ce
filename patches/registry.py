"""Patches of upstream symbols, applied and reverted as a set.

A patch replaces one upstream symbol *where it is looked up*: a function that another upstream module has imported by
name must be replaced in the importing module.

A patch fits only the source that it was written for. A version number is not enough, because vendors build variants of
one version. So every patch of a Megatron symbol has the hash of that symbol's source, which is compared before anything
is changed.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

UNCHECKED_VARIABLE = "MEGATRON_SWAP_UNCHECKED_UPSTREAM"

# Symbols that are replaced now. A second patch of a symbol would take the first replacement for the original.
_in_place: set[str] = set()


class PatchError(RuntimeError):
    """A patch cannot be applied. The message names the symbol and what to do."""


@dataclass(frozen=True)
class Patch:
    """One upstream symbol and its replacement."""

    module: str
    """Dotted path of the module in which the symbol is looked up."""
    attribute: str
    """Name in that module; dotted for an attribute of a class."""
    build: Callable[[Any], Any]
    """Takes the original, returns the replacement."""
    reason: str
    """Reason why upstream's own behaviour is not enough, as a sentence for docs/dev/patches.md."""
    written_for: str
    """Upstream distribution and version, e.g. ``megatron-core 0.19.2``."""
    source_sha256: str | None = None
    """Hash of the original's source (``source_hash``); ``None`` for symbols whose version is pinned."""
    whole_module: bool = False
    """The hash is of the whole module that defines the original, since the replacement depends on more of it."""

    @property
    def symbol(self) -> str:
        """Dotted path of the symbol."""
        return f"{self.module}.{self.attribute}"

    @property
    def file(self) -> str:
        """The file of the patch, to review when upstream has changed."""
        return self.build.__module__.removeprefix("megatron.swap.").replace(".", "/") + ".py"


class AppliedPatches:
    """Patches that are applied, until ``revert``. Tests use it as a context manager."""

    def __init__(self) -> None:
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
        # Reverting must leave the owner as it was, not with a copy of an inherited attribute.
        missing = object()
        own = vars(owner).get(name, missing)
        if own is missing and isinstance(owner, ModuleType) and type(owner) is not ModuleType:
            own = original  # torch's settings: a deleted one can no longer be read
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


def apply(patches: Sequence[Patch]) -> AppliedPatches:
    """Verify all patches, then apply them in order.

    Raises:
        PatchError: as ``verify``. Nothing was changed.
    """
    verify(patches)
    applied = AppliedPatches()
    try:
        for patch in patches:
            applied._put(patch)
    except BaseException:
        applied.revert()
        raise
    return applied


def verify(patches: Sequence[Patch]) -> None:
    """Check every patch against the installed upstream.

    Raises:
        PatchError: a symbol is missing, its source is not the expected one, or it is patched already.
    """
    unchecked = {name.strip() for name in os.environ.get(UNCHECKED_VARIABLE, "").split(",")}
    seen: set[str] = set()
    for patch in patches:
        if patch.symbol in _in_place or patch.symbol in seen:
            raise PatchError(f"{patch.symbol} is patched already ({patch.file}): revert the first application.")
        seen.add(patch.symbol)
        _, _, original = _locate(patch)
        if patch.source_sha256 is None or patch.symbol in unchecked:
            continue
        found = source_hash(inspect.getmodule(original) if patch.whole_module else original)
        if found != patch.source_sha256:
            raise PatchError(
                f"{patch.symbol} is not the one that {patch.file} was written for ({patch.written_for}): "
                f"its source has the SHA-256 {found}, expected {patch.source_sha256}. "
                f"Install {_requirement(patch)}, or review {patch.file} against your version and set "
                f"{UNCHECKED_VARIABLE}={patch.symbol} (several symbols: separated by commas)."
            )


def source_hash(symbol: Any) -> str:
    """Return the SHA-256 of a symbol's source, looking through decorators that keep the original."""
    try:
        source = inspect.getsource(symbol)
    except (OSError, TypeError):
        return "unavailable (no Python source)"
    return hashlib.sha256(source.encode()).hexdigest()


def _locate(patch: Patch) -> tuple[Any, str, Any]:
    """Return the object that holds the symbol, the symbol's name there, and the symbol itself."""
    *path, name = patch.attribute.split(".")
    try:
        owner: Any = importlib.import_module(patch.module)
        for part in path:
            owner = getattr(owner, part)
        # A builtin (`print`) is replaced by setting its name in the module.
        if not path and not hasattr(owner, name) and hasattr(builtins, name):
            return owner, name, getattr(builtins, name)
        return owner, name, getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise PatchError(
            f"{patch.symbol} does not exist here ({error}), but {patch.file} was written for it "
            f"({patch.written_for}). Install {_requirement(patch)}."
        ) from error


def _requirement(patch: Patch) -> str:
    return patch.written_for.replace(" ", "==")
