"""The guard's host memory: ``host_chunks_cases.cpp``."""

import subprocess
from pathlib import Path

import pytest

from megatron.swap.native import build
from tests.unit.native.helpers import HERE, NEEDS_COMPILER


@NEEDS_COMPILER
@pytest.mark.slow
def test_nobody_gets_what_another_has(tmp_path: Path) -> None:
    native, made = Path(build.__file__).parent, tmp_path / "host_chunks_cases"
    command = ["g++", "-std=c++20", "-O1", "-g", "-fsanitize=undefined", "-I", native, native / "host_chunks.cpp"]
    subprocess.run([*command, HERE / "host_chunks_cases.cpp", "-o", made], check=True)
    done = subprocess.run([made], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
