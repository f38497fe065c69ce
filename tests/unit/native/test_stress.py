"""The native core under ThreadSanitizer, with threads of its own: ``queue_stress.cpp``."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megatron.swap.native import build
from tests.sizes import sized
from tests.unit.native.helpers import HERE, NEEDS_COMPILER

SECONDS = sized(6, 3)
"""How long it hammers; no measurement."""

pytestmark = NEEDS_COMPILER


def compile_stress(folder: Path, core: str) -> Path:
    """Compile the program with ``core`` in place of ``transfer_queue.cpp``."""
    native = Path(build.__file__).parent
    source, made = folder / "core.cpp", folder / "queue_stress"
    source.write_text(core)
    command = ["g++", "-std=c++20", "-fsanitize=thread", "-g", "-O1", "-pthread", "-I", native]
    done = subprocess.run(
        [*command, source, native / "cuda_runtime.cpp", HERE / "queue_stress.cpp", "-ldl", "-o", made],
        capture_output=True, text=True,
    )  # fmt: skip
    if "cannot find" in done.stderr and "tsan" in done.stderr:
        pytest.skip("no ThreadSanitizer here")
    assert done.returncode == 0, done.stderr
    return made


def run_stress(program: Path, seconds: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, str(seconds)], capture_output=True, text=True, timeout=seconds + 120)


@pytest.fixture
def core() -> str:
    return (Path(build.__file__).parent / "transfer_queue.cpp").read_text()


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 240)
def test_no_race_is_found(tmp_path: Path, core: str) -> None:
    done = run_stress(compile_stress(tmp_path, core), SECONDS)
    print(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.nightly
def test_a_planted_race_is_found(tmp_path: Path, core: str) -> None:
    begin = core.index("State TransferQueue::state(Ticket ticket) const {")
    lock = "  std::lock_guard lock(mutex_);\n"
    at = core.index(lock, begin)
    done = run_stress(compile_stress(tmp_path, core[:at] + core[at + len(lock) :]), 5)
    assert done.returncode != 0
    assert "data race" in done.stderr
