"""Read and check the TOML files of suites and sweeps, and the Megatron flags in them."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner.planning import last_value
from benchmarks.runner.program import ChoiceError
from megatron.swap.common.records import read_text

_MISSING: Any = object()


class SuiteError(ChoiceError):
    """A suite or sweep, or a choice from it, cannot be run; the message names file and key."""


def file_names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.toml"))


def read_table(kind: str, given: str, folder: Path) -> tuple[str, Table]:
    """Read a file of the folder by its name, or any file by its path. ``kind``: suite, sweep or room."""
    path = Path(given) if given.endswith(".toml") else folder / f"{given}.toml"
    if not path.is_file():
        names = ", ".join(file_names(folder))
        raise SuiteError(f"--{kind} {given}: no such {kind}; there are {names}, or give a .toml file")
    try:
        return path.stem, Table(path.name, tomllib.loads(read_text(path)))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SuiteError(f"{path.name}: not TOML: {error}") from error


class Table:
    """A table of the file. It records its place for messages, and which keys were read, to refuse the others."""

    def __init__(self, path: str, content: dict[str, Any]) -> None:
        self.path = path
        self.content = content
        self._taken: set[str] = set()

    def take(self, key: str, kind: type[Any], default: Any = _MISSING, least: int | None = None) -> Any:
        self._taken.add(key)
        value = self.content.get(key, default)
        if value is _MISSING:
            raise SuiteError(f"{self.path}: key {key!r} is missing")
        if value is default:
            return value
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise SuiteError(f"{self.path}: {key} = {value!r}; expected: {kind.__name__}")
        if least is not None and value < least:
            raise SuiteError(f"{self.path}: {key} = {value!r}; at least {least}")
        return value

    def choose(self, key: str, allowed: Collection[str], default: Any = _MISSING) -> str:
        value: str = self.take(key, str, default)
        if value not in allowed:
            raise SuiteError(f"{self.path}: {key} = {value!r}; allowed: {', '.join(allowed)}")
        return value

    def table(self, key: str) -> Table:
        return Table(f"{self.path}: [{key}]", self.take(key, dict))

    def refuse_rest(self, *tables: str) -> None:
        unknown = sorted(set(self.content) - self._taken - set(tables))
        if unknown:
            allowed = ", ".join(sorted(self._taken | set(tables)))
            raise SuiteError(f"{self.path}: unknown key {unknown[0]!r}; allowed: {allowed}")


def environment(table: Table) -> dict[str, str]:
    env = table.table("env") if "env" in table.content else Table(table.path, {})
    return {name: env.take(name, str) for name in env.content}


def value_of(where: str, words: Sequence[str], flag: str) -> str:
    value = last_value(words, flag)
    if value is None:
        raise SuiteError(f"{where}: the flags have no {flag}")
    return value


def number(where: str, words: Sequence[str], flag: str) -> int:
    value = value_of(where, words, flag)
    if not value.isdecimal() or int(value) < 1:
        raise SuiteError(f"{where}: {flag} {value}: a whole number from 1 on is expected")
    return int(value)


def check_names(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise SuiteError(f"{what} {unknown[0]}: there is none of that name; there are {', '.join(known)}")
