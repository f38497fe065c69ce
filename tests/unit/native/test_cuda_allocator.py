"""Retried CUDA allocations, on a fake of torch's allocator: ``cuda_allocator_cases.cpp``."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron.swap.native.build import BuildError
from megatron.swap.native.cuda_allocator import (
    BASES,
    check_virtuals,
    cuda_include_folders,
    load_cuda_allocator,
)
from tests.unit.native.helpers import HERE, NEEDS_COMPILER

OF_TORCH = Path(torch.__file__).parent
KNOWN = {
    "CUDAAllocator": "virtual void raw_delete(void* ptr) = 0;",
    "DeviceAllocator": "virtual bool initialized() = 0;",
    "Allocator": "virtual DataPtr allocate(size_t n) = 0;",
}
"""One function of each class."""


def lacks() -> str | None:
    """Return the parts of CUDA that this machine lacks, except for the GPU."""
    if torch.version.cuda is None:
        return "needs torch for CUDA"
    try:
        cuda_include_folders(torch.version.cuda)
    except BuildError as error:
        return str(error)
    return None


NEEDS_CUDA_BUILD = pytest.mark.skipif(lacks() is not None, reason=lacks() or "")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make each test build anew, or find the library that was built."""
    monkeypatch.delenv("MEGATRON_SWAP_NATIVE", raising=False)
    load_cuda_allocator.cache_clear()
    yield
    monkeypatch.undo()
    load_cuda_allocator.cache_clear()


def headers() -> dict[str, str]:
    return {name: (OF_TORCH / "include" / path).read_text() for name, path in BASES.items()}


@NEEDS_CUDA_BUILD
def test_every_virtual_function_of_this_torch_is_known() -> None:
    check_virtuals(headers())


PLANTED = (
    ("virtual\n  std::pair<int (*)(int),\n int>* later() const { return nullptr; }", "later"),
    ("virtual std::function<bool(int)> later(std::function<void()> f) = 0;", "later"),
    ("virtual DataPtr allocate(size_t n, int more);", "allocate"),
)
CHANGED = (
    ("DeviceAllocator", ": public c10::Allocator {", ": public c10::Allocator, Other {"),
    ("DeviceAllocator", "struct C10_API DeviceAllocator", "struct C10_API Renamed"),
)


@NEEDS_CUDA_BUILD
def test_functions_and_classes_that_we_do_not_know_are_refused() -> None:
    cases = [
        *((name, known, f"{known}\n{text}", rf"unknown to us: \['{said}")
          for name, known in KNOWN.items() for text, said in PLANTED),
        *((name, before, after, f": {name} in {BASES[name]} is not the class that we know")
          for name, before, after in CHANGED),
    ]  # fmt: skip
    for name, before, after, said in cases:
        texts = headers()
        assert before in texts[name]
        texts[name] = texts[name].replace(before, after)
        with pytest.raises(BuildError, match=said):
            check_virtuals(texts)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """Run a case of ``cuda_allocator_cases.cpp`` against the library. Return its output after the guard is
    installed."""
    assert torch.version.cuda
    library = load_cuda_allocator()._name
    program = tmp_path_factory.mktemp("cuda_allocator") / "cases"
    folders = [OF_TORCH / "include", *cuda_include_folders(torch.version.cuda)]
    command = [
        "g++", "-std=c++20", "-O0", "-pthread", "-rdynamic", HERE / "cuda_allocator_cases.cpp", "-o", program,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(word for folder in folders for word in ("-isystem", folder)),
        f"-L{OF_TORCH / 'lib'}", f"-Wl,-rpath,{OF_TORCH / 'lib'}", "-Wl,--allow-shlib-undefined", "-lc10_cuda", "-lc10",
        "-ldl",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    def run(name: str) -> list[str]:
        done = subprocess.run([program, library, name], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split("---\n")[-1].splitlines()

    return run


ERROR = "OutOfMemoryError: no room for 1000"
FAILED = ["allocate 1000", "make_room 1000 on 1, seen 0"]
CASES = {
    "retry": [  # as long as there is room
        *FAILED, "allocate 1000", "make_room 1000 on 1, seen 3", "allocate 1000", "done",
        "raw_alloc 1001", "make_room 1001 on 1, seen 0", "raw_alloc 1001", "done",
        "raw_alloc_with_stream 1002", "asked about stream 77", "make_room 1002 on 1, seen 0",
        "raw_alloc_with_stream 1002", "done",
    ],
    "give_up": [  # with the report in the error
        *FAILED, "allocate 1000", "make_room 1000 on 1, seen 3", f"{ERROR} (the guard holds 3 storages)",
        *FAILED, f"{ERROR} ({'x' * 1024})", *FAILED, ERROR,
    ],
    "capturing": [  # a graph: the error goes on
        "allocate 1000", ERROR, "raw_alloc_with_stream 1000", "asked about stream 77", "last error cleared", ERROR,
    ],
    "removed": [  # it hands on and no more
        "the former is back: yes", "allocate 1000", ERROR, "initialized", "name", "install: done",
        "the same guard: yes", "another one is left: yes",
    ],
    "refused": [  # where it may not stand it says why
        "install: CUDA is not initialised yet (torch.cuda.init())",
        "install: torch uses another CUDA allocator than its native one", "install: done", "install: done",
        "install: another CUDA allocator was put in place since the guard was first installed", "that one is left: yes",
    ],
}  # fmt: skip


@NEEDS_CUDA_BUILD
@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_retries_gives_up_and_hands_on(case: Callable[[str], list[str]], name: str) -> None:
    lines = case(name)
    assert [line for line in lines if name != "refused" or ":" in line] == CASES[name]
