"""JSON files of dataclass records: read strictly, written so that people can edit them."""

import dataclasses
import errno
import json
import os
import re
import stat
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from megatron.swap.common.leftovers import own_file
from megatron.swap.common.types import MOST, UsageError

SHORT = re.compile(r"[\[{]\n\s*([^\[\]{}]*?)\n\s*[\]}]")
"""An innermost object or list. Line ends stand only between the parts: in strings they are escaped."""
LINE_WIDTH = 150
MOST_FILE_BYTES = 256 << 20  # most bytes of a file that is read at once. Summaries of long runs have 1 KiB a step.
T = TypeVar("T")
KEY = "key"
"""Metadata key of a dataclass field with another name in files, ``{"key": "share"}``, or none, ``{"key": None}``."""


def load(kind: type[T], path: str | Path, name: str, version: int) -> T:
    """Return the record in a file that begins with ``"format": name, "version": version``, or raise ``UsageError``."""
    try:
        return _load(kind, path, name, version)
    except RecursionError as error:
        raise UsageError(f"{path}: is nested too deeply. Give the path of a {name} file.") from error


def _load(kind: type[T], path: str | Path, name: str, version: int) -> T:
    try:
        value = json.loads(read_text(path), object_pairs_hook=_object)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). Give the path of a {name} file.") from error
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    except ValueError as error:
        raise UsageError(f"{path}: is not JSON ({error}). Give the path of a {name} file.") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}: holds {_named(value)}, not an object. Give the path of a {name} file.")
    for key, allowed in (("format", name), ("version", version)):
        given = value.pop(key, None)
        if given != allowed or isinstance(given, bool):
            raise UsageError(
                f"{path}: {key} is {json.dumps(given)}, allowed is {json.dumps(allowed)}. Give a {name} file of this "
                "version, or use the version of the program that wrote this one."
            )
    return from_json(kind, value, str(path))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:  # Python's reader would silently take the last of two
            raise UsageError(f"the key {key!r} stands twice in one object; each may stand once. Drop one of the two.")
        found[key] = value
    return found


def read_text(path: str | Path) -> str:
    """Return the text of a regular file of at most ``MOST_FILE_BYTES``, or raise ``OSError`` or a ``ValueError``."""
    mode = Path(path).stat().st_mode  # before it is opened: opening a pipe may wait for ever
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "it is a device or a pipe, not a file", str(path))
    with Path(path).open("rb") as file:
        content = file.read(MOST_FILE_BYTES + 1)  # not the size that the system tells, which is 0 for files of /proc
    if len(content) > MOST_FILE_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_FILE_BYTES >> 20} MiB, the most that is read", str(path))
    return content.decode()


def save(record: Any, path: str | Path, name: str, version: int) -> None:
    """Write a dataclass as a file that ``load`` reads, in the way of ``write_text``."""
    write_text(path, to_text(record, name, version))


def write_text(path: str | Path, text: str) -> None:
    """Write a file, and missing folders. An existing file is replaced only when the new one is complete."""
    if Path(path).exists() and not Path(path).is_file():
        Path(path).write_text(text)  # such as /dev/stdout, which must not be replaced
        return
    whole = Path(os.path.realpath(path))  # replace the target of a link, not the link
    whole.parent.mkdir(parents=True, exist_ok=True)
    with own_file(whole.parent, f".{whole.name}.swap-part-", 0o666) as (part, _):
        part.write_text(text)
        part.replace(whole)


def to_text(record: Any, name: str, version: int) -> str:
    text = json.dumps({"format": name, "version": version, **to_json(record)}, indent=1)
    return SHORT.sub(_on_one_line, text) + "\n"


def to_json(value: Any) -> Any:
    """Return ``value``, a dataclass or a value inside one, as JSON objects, lists and plain values."""
    if dataclasses.is_dataclass(value):
        return {key: to_json(getattr(value, item.name)) for key, item in keyed(type(value)).items()}
    if isinstance(value, dict):
        return {key: to_json(part) for key, part in value.items()}
    return [to_json(part) for part in value] if isinstance(value, list | tuple) else value


def keyed(kind: type) -> dict[str, dataclasses.Field]:
    """Return the fields of a dataclass by their keys in files."""
    keys = {item.metadata.get(KEY, item.name): item for item in dataclasses.fields(kind)}
    return {key: item for key, item in keys.items() if key is not None}


def _on_one_line(match: re.Match[str]) -> str:
    joined = re.sub(r"\n\s*", " ", match[1])  # an innermost object or list stands on a single line if it fits
    return f"{match[0][0]}{joined}{match[0][-1]}" if len(joined) < LINE_WIDTH else match[0]


def from_json(kind: Any, value: Any, where: str) -> Any:
    """Return ``value`` (parsed JSON) as a ``kind``, or raise ``UsageError``, which begins with ``where``."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (inner,) = (item for item in arguments if item is not type(None))
        return from_json(inner, value, where)
    if origin is typing.Literal:
        if value not in arguments:
            raise UsageError(f"{where}: {json.dumps(value)} is given; allowed are {', '.join(map(str, arguments))}.")
        return value
    if origin is tuple:
        _require(isinstance(value, list), where, value, "a list")
        items = [arguments[0]] * len(value) if arguments[1:] == (...,) else list(arguments)
        _require(len(items) == len(value), where, value, f"a list of {len(items)}")
        return tuple(
            from_json(item, part, f"{where}[{i}]") for i, (item, part) in enumerate(zip(items, value, strict=True))
        )
    if origin is dict:
        _require(isinstance(value, dict), where, value, "an object")
        return {key: from_json(arguments[1], part, f"{where}: {key}") for key, part in value.items()}
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(typing.cast(type, kind), value, where)
    if kind in (int, float):  # counts, sizes and times are never below 0
        is_number = type(value) in (int, kind) and 0 <= value <= MOST
        _require(is_number, where, value, f"a {'whole ' if kind is int else ''}number from 0 to {MOST:g}")
        return value
    _require(type(value) is kind, where, value, {str: "a text", bool: "true or false"}[kind])
    return value


def _read_dataclass(kind: type, value: Any, where: str) -> Any:
    _require(isinstance(value, dict), where, value, "an object")
    fields = keyed(kind)
    for key in value:
        if key not in fields:
            raise UsageError(f"{where}: the key {key!r} is unknown; allowed are {', '.join(fields)}.")
    kinds = typing.get_type_hints(kind)
    found = {}
    for key, field in fields.items():
        if key in value:
            found[field.name] = from_json(kinds[field.name], value[key], f"{where}: {key}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UsageError(f"{where}: the key {key!r} is missing; needed are {', '.join(fields)}.")
    try:
        return kind(**found)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _require(holds: bool, where: str, value: Any, allowed: str) -> None:
    if not holds:
        raise UsageError(f"{where}: {json.dumps(value)[:80]} is given; it must be {allowed}.")


def _named(value: Any) -> str:
    return {list: "a list", str: "a text", type(None): "null", bool: "true or false"}.get(type(value), "a number")
