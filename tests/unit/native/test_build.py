"""Building the native part, and running without it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.swap.common.types import SwapError
from megatron.swap.native import base, build
from megatron.swap.native.base import JobState, TransferQueue
from megatron.swap.native.python_queue import PythonQueue
from megatron.swap.native.queue import NativeQueue, queue_class
from tests.unit.native.helpers import NEEDS_COMPILER
from tests.unit.test_house import ROOT

FAKE_COMPILER = """#!/bin/sh
echo once >> {log}
for word; do [ "$last" = -o ] && target=$word; last=$word; done
sleep 0.2
echo made > $target
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


@NEEDS_COMPILER
def test_the_native_one_is_chosen_where_there_is_a_compiler() -> None:
    assert queue_class() is NativeQueue
    assert build.load() is build.load()


def test_the_python_queue_is_chosen_where_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEGATRON_SWAP_NATIVE", "0")
    with caplog.at_level(logging.INFO):
        assert queue_class() is PythonQueue
    assert caplog.text == ""
    with pytest.raises(SwapError, match=r"queue_class\(\)"):
        NativeQueue("test")


def test_without_a_compiler_the_python_queue_works_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    assert queue_class() is queue_class() is PythonQueue
    assert caplog.text.count("no compiler is on PATH (g++, c++, clang++)") == 1
    queue = queue_class()("test")
    queue.start()
    queue.wait(queue.enqueue([]))


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("#!/bin/sh\necho 'first' >&2\necho 'no such header' >&2\nexit 3\n", "failed with 3: first | no such header"),
        (None, "did not run"),
        (FAKE_COMPILER, "file too short"),
    ],
)
def test_a_failing_compiler_is_quoted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, program: str | None, said: str
) -> None:
    compiler = str(tmp_path / "nothing")
    if program:
        compiler = script(tmp_path / "compiler", program.replace("{log}", str(tmp_path / "log")))
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    assert queue_class() is PythonQueue
    assert said in caplog.text


def test_a_folder_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file" / "below"))
    assert queue_class() is PythonQueue
    assert "without the C++ part of this package: no out-of-memory guard" in caplog.text


def test_several_ranks_build_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", FAKE_COMPILER.replace("{log}", str(log))))
    ranks = [
        multiprocessing.get_context("fork").Process(target=build.build, args=(tmp_path / "cache",)) for _ in range(4)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert log.read_text() == "once\n"
    library = build.build(tmp_path / "cache")
    assert library.read_text() == "made\n"
    assert {path.suffix for path in library.parent.iterdir()} == {".so", ".lock"}


def test_changed_sources_are_built_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before = build._key()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert build._key() != before


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert build.cache_folder() == tmp_path
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_folder() == tmp_path / "megatron_swap"


@NEEDS_COMPILER
def test_no_header_of_cuda_is_needed() -> None:
    """The build needs neither a toolkit's headers nor those of PyTorch that include them. A PyTorch for CPUs is
    enough."""
    here, of_torch = Path(base.__file__).parent, Path(torch.__file__).parent / "include"
    folders = [word for folder in (of_torch, sysconfig.get_path("include")) for word in ("-isystem", str(folder))]
    sources = [str(here / name) for name in build.NATIVE.sources]
    done = subprocess.run(["g++", *build.FLAGS, *folders, "-M", *sources], capture_output=True, text=True, check=True)
    headers = {Path(word).resolve() for word in done.stdout.replace("\\\n", " ").split() if "/" in word}
    assert here / "guard.h" in headers
    assert (of_torch / "c10/core/StorageImpl.h").resolve() in headers
    assert [path for path in headers if "cuda" in str(path).lower() and not path.is_relative_to(here)] == []


@NEEDS_COMPILER
def test_others_see_two_symbols() -> None:
    """The library is loaded globally, so any other exported symbol would replace those of other libraries."""
    library = build.build(build.cache_folder())
    listed = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    seen = {line.split()[-1] for line in listed.stdout.splitlines()}
    assert seen == {"PyInit_megatron_swap_native", "megatron_swap_operator_hooks"}


def test_the_header_has_the_same_states() -> None:
    header = (Path(base.__file__).parent / "transfer_queue.h").read_text()
    declared = ", ".join(f"{state.name.lower()} = {state.value}" for state in JobState)
    assert f"enum class JobState {{ {declared} }};" in header


def test_the_core_needs_neither_python_nor_torch() -> None:
    for name in ("transfer_queue.h", "transfer_queue.cpp", "cuda_runtime.h", "cuda_runtime.cpp", "host_chunks.h"):
        text = (Path(base.__file__).parent / name).read_text()
        assert not re.findall(r"#include.*(?:[/]|[Pp]ython).*", text)


def test_a_process_without_cuda_has_no_runtime() -> None:
    program = "from megatron.swap.native.cuda_library import loaded_cuda_library as found; assert found() is None"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True)


def test_the_contract_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        TransferQueue("test")  # type: ignore[abstract]
