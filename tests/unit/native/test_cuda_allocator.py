"""Retried CUDA allocations: everything without a GPU (``cuda_allocator_cases.cpp``), the real allocator with one."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.swap.common.types import MIB
from megatron.swap.native import cuda_allocator
from megatron.swap.native.build import BuildError, cache_folder
from megatron.swap.native.cuda_allocator import (
    BASES,
    MAKE_ROOM,
    REPORT,
    check_virtuals,
    class_body,
    cuda_include_folders,
    load_cuda_allocator,
    virtuals,
)
from tests.unit.native.helpers import HERE, NEEDS_COMPILER
from tests.unit.test_house import ROOT

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
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


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


# ---------------------------------------------------------------------------------------- torch's declarations


@NEEDS_CUDA_BUILD
def test_every_virtual_function_of_this_torch_is_known() -> None:
    check_virtuals(headers())


PLANTED = (
    ("virtual void later(int) {}", "later"),
    ("virtual\n  std::pair<int (*)(int),\n int>* later() const { return nullptr; }", "later"),
    ("virtual std::function<bool(int)> later(std::function<void()> f) = 0;", "later"),
    ("virtual DataPtr allocate(size_t n, int more);", "allocate"),
    ("virtual bool operator==(int) const;", "operator"),
)
CHANGED = (
    ("CUDAAllocator", "class CUDAAllocator : public DeviceAllocator", "class CUDAAllocator : public Between"),
    ("DeviceAllocator", ": public c10::Allocator {", ": public c10::Allocator, Other {"),
    ("Allocator", "struct C10_API Allocator {", "struct C10_API Allocator : Counted {"),
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


def test_what_is_not_a_new_function_is_not_taken_for_one() -> None:
    body = """
      // virtual void commented(int) {}
      virtual ~Destroyed() = default;  virtual  ~ Spaced();
      virtual void inherited(int) override;
      void plain(int);
      virtual void one(int = f({0, 0})) = 0; virtual int& two() { return x; }
    """
    bases, found = class_body(f"struct There {{}}; struct API Here final : A, public b::B {{{body}}}; int x;", "Here")
    assert bases == ["A", "B"]
    assert list(virtuals(found)) == ["one", "two"]


# ---------------------------------------------------------------------------------------------------- building


@NEEDS_CUDA_BUILD
@NEEDS_COMPILER
def test_it_is_built_once_and_loads_without_a_gpu() -> None:
    assert load_cuda_allocator() is load_cuda_allocator()
    assert Path(load_cuda_allocator()._name).parent == cache_folder()


def test_it_may_not_be_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_SWAP_NATIVE", "0")
    with pytest.raises(BuildError, match="MEGATRON_SWAP_NATIVE=0"):
        load_cuda_allocator()


@NEEDS_CUDA_BUILD
def test_missing_headers_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_allocator, "include_places", lambda: [tmp_path / "here", tmp_path / "there"])
    with pytest.raises(BuildError, match=r"no headers of CUDA \d+ .*Looked in .*here, .*there"):
        load_cuda_allocator()


def plant_headers(folder: Path, version: int, *, crt: bool) -> Path:
    (folder / "crt").mkdir(parents=True)
    (folder / "cuda_runtime.h").touch()
    (folder / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
    if crt:
        (folder / "crt" / "host_config.h").touch()
    return folder


def test_headers_are_of_this_cuda_and_complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    older = plant_headers(tmp_path / "older", 12080, crt=True)
    runtime = plant_headers(tmp_path / "runtime", 13000, crt=False)
    toolkit = plant_headers(tmp_path / "toolkit", 13010, crt=True)

    def found(*places: Path) -> tuple[Path, ...]:
        monkeypatch.setattr(cuda_allocator, "include_places", lambda: list(places))
        return cuda_include_folders("13.0")

    assert found(older, toolkit) == (toolkit,)
    assert found(toolkit, runtime) == (toolkit,)
    assert found(runtime, toolkit) == (runtime, toolkit)
    assert found(runtime, older) == (runtime, older)
    with pytest.raises(BuildError, match=r"crt/host_config\.h"):
        found(runtime)
    with pytest.raises(BuildError, match="headers of CUDA 13"):
        found(older)


@NEEDS_CUDA_BUILD
@NEEDS_COMPILER
def test_before_cuda_is_initialised_it_says_so() -> None:
    program = (
        "from megatron.swap.native.cuda_allocator import MAKE_ROOM, REPORT, load_cuda_allocator as load\n"
        "load().megatron_swap_cuda_remove()\n"
        "functions = MAKE_ROOM(lambda *_: False), REPORT(lambda *_: 0)\n"
        "print(load().megatron_swap_cuda_install(*functions).decode())\n"
        "load().megatron_swap_cuda_remove()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )
    assert (done.returncode, done.stdout) == (0, "CUDA is not initialised yet (torch.cuda.init())\n"), done.stderr


# --------------------------------------------------------------------------------- the real guard, without a GPU


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
class TestWithoutGpu:
    def test_every_function_is_handed_on(self, case: Callable[[str], list[str]]) -> None:
        declared = Counter(name for base, text in headers().items() for name in virtuals(class_body(text, base)[1]))
        lines = case("forward")
        assert [line for line in lines if line.endswith(": NO")] == []
        assert Counter(line.split()[0] for line in lines if not line.endswith(": yes")) == declared
        assert {
            "copy_data 1 6", "recordStream of CUDA", "setMemoryFraction 0.25 1", "beginAllocateToPool 1 8 1",
            "setUseOnOOM 1 8 1", "createOrIncrefPool 1 8 1", "checkPoolLiveAllocations 1 8 2", "enablePeerAccess 0 1",
            "memcpyAsync 0 1 16 1 1 1", "recordHistory 1 15 3 1 skipped", "setCheckpointPoolState 1 1",
        } <= set(lines)

    @pytest.mark.parametrize("name", CASES)
    def test_it_retries_gives_up_and_hands_on(self, case: Callable[[str], list[str]], name: str) -> None:
        lines = case(name)
        assert [line for line in lines if name != "refused" or ":" in line] == CASES[name]


# ------------------------------------------------------------------------------------------------ with a GPU

KEPT: list[Any] = []
"""Functions that were installed. They stay as long as the process."""


class Holder:
    """Holds tensors and drops them one by one."""

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []
        self.asked: list[tuple[int, int]] = []
        self.make_room, self.report = MAKE_ROOM(self._make_room), REPORT(self._report)
        KEPT.append(self)

    def _make_room(self, num_bytes: int, device: int, seen: Any) -> bool:
        self.asked.append((num_bytes, device))
        return bool(self.held) and self.held.pop() is not None

    def _report(self, buffer: int, size: int) -> int:
        text = b"the holder has %d tensors" % len(self.held)
        ctypes.memmove(buffer, text, len(text))
        return len(text)


def empty(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def is_all(x: torch.Tensor, value: int) -> bool:
    """Compare a few elements. A comparison of all elements would need as much memory again."""
    return bool((x[::4096] == value).all())


@pytest.fixture
def library() -> Iterator[ctypes.CDLL]:
    """The library on a GPU with 256 MiB left for this process."""
    library = load_cuda_allocator()
    torch.cuda.init()
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + 256 * MIB
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    yield library
    library.megatron_swap_cuda_remove()
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.fixture
def holder(library: ctypes.CDLL) -> Holder:
    holder = Holder()
    assert library.megatron_swap_cuda_install(holder.make_room, holder.report) is None
    return holder


@pytest.mark.gpu
@NEEDS_GPU
@NEEDS_CUDA_BUILD
@NEEDS_COMPILER
class TestOnGpu:
    def test_an_allocation_finds_the_room_that_was_made(self, holder: Holder) -> None:
        holder.held = [empty(100), empty(100)]
        x = empty(200).fill_(7)
        assert holder.asked == [(200 * MIB, torch.cuda.current_device())] * 2
        assert holder.held == []
        assert is_all(x, 7)
        x.untyped_storage().resize_(0)
        holder.held = [empty(200)]
        x.untyped_storage().resize_(200 * MIB)  # a storage of the guard that grows
        assert len(holder.asked) == 3
        assert is_all(x.fill_(3), 3)

    def test_without_room_the_error_tells_what_is_held(self, holder: Holder) -> None:
        with pytest.raises(torch.OutOfMemoryError, match=r"(?s)CUDA out of memory.*\(the holder has 0 tensors\)"):
            empty(300)
        assert len(holder.asked) == 1
        assert empty(200).numel() == 200 * MIB

    def test_after_removal_nobody_is_asked_and_what_was_made_lives_on(
        self, holder: Holder, library: ctypes.CDLL
    ) -> None:
        x, y = empty(50).fill_(1), empty(50)
        library.megatron_swap_cuda_remove()
        with pytest.raises(torch.OutOfMemoryError) as caught:
            empty(300)
        assert "the holder" not in str(caught.value)
        x.untyped_storage().resize_(80 * MIB)
        assert is_all(x, 1)
        with pytest.raises(torch.OutOfMemoryError):
            x.untyped_storage().resize_(400 * MIB)  # through the guard still, which only hands on
        assert holder.asked == []
        before = torch.cuda.memory_allocated()
        del y
        assert before - torch.cuda.memory_allocated() == 50 * MIB

    def test_a_graph_is_captured_under_it_and_what_torch_tells_of_its_memory_is_the_same(self, holder: Holder) -> None:
        x = torch.ones(1024, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x + 1
        x.fill_(4)
        graph.replay()
        assert bool((y == 5).all())
        assert holder.asked == []
        assert torch.cuda.get_allocator_backend() == "native"
        assert torch.cuda.memory_allocated() >= x.nbytes
        assert torch.cuda.memory_snapshot()
        assert torch.cuda.memory_stats()["num_ooms"] >= 0
