"""Building the native part, and running without it."""

import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.swap.native import build
from megatron.swap.native.transfer_queue import JobState
from tests.unit.test_house import ROOT

FAKE_COMPILER = """#!/bin/sh
echo once >> {log}
for word; do [ "$last" = -o ] && target=$word; last=$word; done
sleep 0.2
echo made > $target
"""


SWAPS = """
import torch
from megatron import swap
a = torch.arange(1e6)
with swap.TensorSwap(1, "cpu") as tensors, swap.TensorSwap(1, "cpu"):
    tensors.queue_swap_out(a)
    tensors.cancel(a)  # finds nothing to withdraw
    tensors.wait_swapped_out()
    print(tensors.is_out(a), torch.equal(a, torch.arange(1e6)))
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make each test choose its compiler and build anew."""
    monkeypatch.delenv("MEGATRON_SWAP_NATIVE", raising=False)
    build.load.cache_clear()
    yield
    monkeypatch.undo()
    build.load.cache_clear()


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
def test_without_a_compiler_copies_begin_at_once_and_it_is_said_once(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": "/nowhere", "PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    environment.pop("CXX", None)
    done = subprocess.run([sys.executable, "-c", SWAPS], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr
    assert done.stderr.count("no compiler is on PATH (g++, c++, clang++)") == 1


@pytest.mark.parametrize(("program", "said"), [
    ("#!/bin/sh\necho 'first' >&2\necho 'no such header' >&2\nexit 3\n", "failed with 3: first | no such header"),
    (None, "did not run"),
    (FAKE_COMPILER, "file too short"),
])  # fmt: skip
def test_a_failing_compiler_is_quoted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, program: str | None, said: str
) -> None:
    compiler = str(tmp_path / "nothing")
    if program:
        compiler = script(tmp_path / "compiler", program.replace("{log}", str(tmp_path / "log")))
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    assert build.load() is None
    assert said in caplog.text


def test_several_ranks_build_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log, process = tmp_path / "log", multiprocessing.get_context("fork").Process
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", FAKE_COMPILER.replace("{log}", str(log))))
    ranks = [process(target=build.build, args=(tmp_path / "cache",)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert log.read_text() == "once\n"
    library = build.build(tmp_path / "cache")
    assert library.read_bytes().startswith(b"made\n")
    assert {path.suffix for path in library.parent.iterdir()} == {".so", ".lock"}


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Stands in for the compiler; returns a file with a line for each run."""
    log = tmp_path / "log"
    text = FAKE_COMPILER.replace("{log}", str(log)).replace("sleep 0.2", "")
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", text))
    return log


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda built: built.write_bytes(built.read_bytes()[:-1]),
    "overwritten": lambda built: built.write_bytes(b"M" + built.read_bytes()[1:]),
    "open to the group": lambda built: built.chmod(0o775),
    "a link": lambda built: (built.rename(built.parent / "elsewhere.so"), built.symlink_to("elsewhere.so")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_built_again(
    compiler: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path, damage: str
) -> None:
    built = build.build(tmp_path / "cache")
    whole = built.read_bytes()
    DAMAGES[damage](built)
    for _ in range(2):
        assert build.build(tmp_path / "cache") == built
    assert not built.is_symlink()
    assert built.read_bytes() == whole
    assert compiler.read_text() == "once\n" * 2
    said = f"{built} is damaged, or others can have written it: it is built again."
    assert [record.getMessage() for record in caplog.records] == [said]


def test_others_can_write_nothing(compiler: Path, tmp_path: Path) -> None:
    """Whatever the mask is: neither what is made nor a folder that was open."""
    before = os.umask(0)
    try:
        build.build(tmp_path / "new" / "cache")
        (tmp_path / "open").mkdir(mode=0o777)
        build.build(tmp_path / "open")
    finally:
        os.umask(before)
    made = [path for name in ("new", "open") for path in (tmp_path / name, *(tmp_path / name).rglob("*"))]
    assert len(made) == 7
    assert {oct(path.stat().st_mode & 0o022) for path in made} == {"0o0"}


def test_another_users_folder_is_refused(
    monkeypatch: pytest.MonkeyPatch, compiler: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = build.cache_folder()
    build.build(folder)
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    said = f"{folder} belongs to another user, or others can write it"
    with pytest.raises(build.BuildError, match=re.escape(said)):
        build.build(folder)
    assert said in (build.problem() or "")
    assert build.load() is None
    assert said in caplog.text


def test_the_header_has_the_same_states() -> None:
    header = (Path(build.__file__).parent / "transfer_queue.h").read_text()
    declared = ", ".join(f"{state.name.lower()} = {state.value}" for state in JobState)
    assert f"enum class JobState {{ {declared} }};" in header
