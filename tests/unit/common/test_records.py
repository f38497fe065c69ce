"""Files of records: what no record can hold is named, and a file is written whole or not at all."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.swap.common import records
from megatron.swap.common.types import UsageError


@dataclass(frozen=True)
class Part:
    mib: float
    count: int = 1


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    more: dict[str, Part]


def load(path: Path, parts: str, more: str = "{}") -> Whole:
    path.write_text(f'{{"format": "whole", "version": 1, "parts": {parts}, "more": {more}}}')
    return records.load(Whole, path, "whole", 1)


@pytest.mark.parametrize("given", ["-1", "1e13", "NaN", f"1{'0' * 400}", "true"])
def test_numbers_are_finite_and_not_negative(given: str, tmp_path: Path) -> None:
    path = tmp_path / "whole.json"
    with pytest.raises(UsageError) as refusal:
        load(path, f'[{{"mib": 0}}, {{"mib": {given}}}]')
    assert str(refusal.value).startswith(f"{path}: parts[1]: mib: ")
    assert str(refusal.value).endswith(" is given; it must be a number from 0 to 1e+12.")


@pytest.mark.parametrize("more", ['{"a": {"mib": 1, "mib": 2}}', '{"mib": {"mib": 1}, "mib": {"mib": 2}}'])
def test_a_key_that_stands_twice_is_named(more: str, tmp_path: Path) -> None:
    path = tmp_path / "whole.json"
    with pytest.raises(UsageError) as refusal:
        load(path, "[]", more)
    assert str(refusal.value).startswith(f"{path}: the key 'mib' stands twice in one object; each may stand once.")


@pytest.mark.parametrize("depth", [500, 30_000])
def test_what_is_nested_too_deeply_is_refused(depth: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"whole.json: (parts|is nested too deeply)"):
        load(tmp_path / "whole.json", "[" * depth + "]" * depth)


@contextmanager
def short_files(most_bytes: int) -> Iterator[None]:
    """Limit the size of files, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path, small = tmp_path / "whole.json", Whole((Part(1e12, 0), Part(0, 10**12)), {})
    records.save(small, path, "whole", 1)
    with short_files(1000), pytest.raises(OSError, match="File too large"):
        records.save(Whole((Part(2.0),) * 1000, {}), path, "whole", 1)
    assert records.load(Whole, path, "whole", 1) == small
    assert list(tmp_path.iterdir()) == [path]


def test_folders_are_made_and_a_link_stays_one(tmp_path: Path) -> None:
    link, target = tmp_path / "link.json", tmp_path / "new" / "folder" / "whole.json"
    link.symlink_to(target)
    for mib in (1.0, 2.0):
        records.save(Whole((Part(mib),), {}), link, "whole", 1)
        assert link.is_symlink()
        assert records.load(Whole, target, "whole", 1).parts == (Part(mib),)


@pytest.mark.parametrize("kind", ["device", "pipe", "too large", "folder"])
def test_what_may_have_no_end_is_not_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_FILE_BYTES", 2 << 20)
    path = Path("/dev/zero") if kind == "device" else tmp_path / "given"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "too large":
        path.write_bytes(b" " * ((2 << 20) + 1))
    with pytest.raises(UsageError) as refusal:
        records.load(Whole, path, "whole", 1)
    why = {"too large": "it has more than 2 MiB, the most that is read", "folder": "Is a directory"}
    why_not = why.get(kind, "it is a device or a pipe, not a file")
    assert str(refusal.value) == f"{path}: cannot be read ({why_not}). Give the path of a whole file."
