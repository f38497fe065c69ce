"""The guard's host memory: ``host_chunks_cases.cpp``."""

from __future__ import annotations

import subprocess
from pathlib import Path

from megatron.swap.native import build
from tests.unit.native.helpers import HERE, NEEDS_COMPILER

pytestmark = NEEDS_COMPILER

NATIVE = Path(build.__file__).parent


def wrongs(folder: Path, source: str) -> str:
    """Return the failures of the cases with ``source`` in place of ``host_chunks.cpp``."""
    code, made = folder / "chunks.cpp", folder / "host_chunks_cases"
    code.write_text(source)
    command = ["g++", "-std=c++20", "-O1", "-g", "-fsanitize=undefined", "-I", NATIVE, code]
    subprocess.run([*command, HERE / "host_chunks_cases.cpp", "-o", made], check=True)
    done = subprocess.run([made], capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0) == (not done.stderr)
    return done.stderr


def test_every_case_holds(tmp_path: Path) -> None:
    assert wrongs(tmp_path, (NATIVE / "host_chunks.cpp").read_text()) == ""


def test_a_copy_over_two_registrations_is_noticed(tmp_path: Path) -> None:
    source = (NATIVE / "host_chunks.cpp").read_text()
    check = "is_next && std::none_of(slabs_.begin(), slabs_.end(), begins_here)"
    assert source.count(check) == 1, "plant the fault anew"
    assert "a piece spans two slabs" in wrongs(tmp_path, source.replace(check, "is_next"))
