"""The native core under ThreadSanitizer, with threads of its own: ``queue_stress.cpp``."""

import subprocess
from pathlib import Path

import pytest

from megatron.swap.native import build
from tests.sizes import sized
from tests.unit.native.helpers import HERE, NEEDS_COMPILER

SECONDS = sized(6, 3)
"""How long it hammers; no measurement."""


@NEEDS_COMPILER
@pytest.mark.nightly
@pytest.mark.timeout(SECONDS + 240)
def test_no_race_is_found(tmp_path: Path) -> None:
    native, made = Path(build.__file__).parent, tmp_path / "queue_stress"
    sources = native / "transfer_queue.cpp", native / "cuda_runtime.cpp", HERE / "queue_stress.cpp"
    command = ["g++", "-std=c++20", "-fsanitize=thread", "-g", "-O1", "-pthread", "-I", native, *sources, "-ldl"]
    built = subprocess.run([*command, "-o", made], capture_output=True, text=True)
    if "cannot find" in built.stderr and "tsan" in built.stderr:
        pytest.skip("no ThreadSanitizer here")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([made, str(SECONDS)], capture_output=True, text=True, timeout=SECONDS + 120)
    print(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
