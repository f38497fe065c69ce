"""Make traces with known content, by hand (``Made``) or from a small training (``train``), in both formats."""

import gzip
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

US, MS = 1_000, 1_000_000
BASE_NS = 5_836_462_573_000_000
"""Profilers' clocks do not start at zero."""
MAIN, AUTOGRAD = 101, 102
COMPUTE, OUT, IN = 7, 20, 24
KINDS = {"HtoD": 1, "DtoH": 2, "DtoD": 8}
PROCESS = 77 << 24


@dataclass
class Device:
    """One activity of the device."""

    what: str
    """Kind of the activity: kernel, memset, HtoD, DtoH or DtoD."""
    start: int
    end: int
    stream: int
    number: int
    num_bytes: int = 0
    name: str = "gemm"


@dataclass
class Made:
    """A trace that a test composes. Times are in ns."""

    device: list[Device] = field(default_factory=list)
    launches: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Correlation, start, end, thread."""
    ranges: list[tuple[str, int, int, int]] = field(default_factory=list)
    """Name, start, end, thread."""

    def range(self, name: str, start: int, end: int, thread: int = MAIN) -> None:
        self.ranges.append((name, start, end, thread))

    def run(
        self, what: str, launch: int, start: int, end: int, stream: int = COMPUTE,
        thread: int = MAIN, num_bytes: int = 0, name: str = "gemm",
    ) -> Device:  # fmt: skip
        """Add an activity that was launched at ``launch`` (for a µs) and ran from ``start`` to ``end``."""
        number = len(self.device) + 1
        self.device.append(Device(what, start, end, stream, number, num_bytes, name))
        self.launches.append((number, launch, launch + US, thread))
        return self.device[-1]

    def copies(self, direction: str) -> list[Device]:
        return [found for found in self.device if found.what == direction and found.stream != COMPUTE]

    # ------------------------------------------------------------------ files

    def write(self, folder: Path, kind: str) -> Path:
        """Write the trace. ``kind``: kineto, kineto-plain (not compressed) or nsys."""
        if kind == "nsys":
            return self._write_nsys(folder / "trace.sqlite")
        content = json.dumps({"schemaVersion": 1, "traceEvents": list(self._events())}).encode()
        path = folder / ("rank-0.json.gz" if kind == "kineto" else "rank-0.json")
        path.write_bytes(gzip.compress(content) if kind == "kineto" else content)
        return path

    def _events(self) -> Iterator[dict[str, Any]]:
        yield {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}
        for name, start, end, thread in self.ranges:
            yield _event("user_annotation", name, start, end, thread)
        yield _event("cpu_op", "aten::mm", 0, US, MAIN)
        yield _event("gpu_user_annotation", "step 1", 0, US, COMPUTE)
        for number, start, end, thread in self.launches:
            yield _event("cuda_runtime", "cudaLaunchKernel", start, end, thread, correlation=number)
        for found in self.device:
            args = {"stream": found.stream, "correlation": found.number, "device": 0}
            if found.what == "kernel":
                yield _event("kernel", found.name, found.start, found.end, found.stream, **args)
            elif found.what == "memset":
                yield _event("gpu_memset", "Memset (Device)", found.start, found.end, found.stream, **args)
            else:
                name = f"Memcpy {found.what} (Device -> Pinned)"
                yield _event("gpu_memcpy", name, found.start, found.end, found.stream, bytes=found.num_bytes, **args)

    def _write_nsys(self, path: Path) -> Path:
        with closing(sqlite3.connect(path)) as database, database:
            database.executescript(SCHEMA)
            strings: dict[str, int] = {}

            def string(text: str) -> int:
                return strings.setdefault(text, len(strings) + 1)

            def insert(table: str, *values: object) -> None:
                database.execute(f"INSERT INTO {table} VALUES ({','.join('?' * len(values))})", values)

            for place, (name, start, end, thread) in enumerate(self.ranges):
                # Names come inline or by number.
                text, text_id = (name, None) if place % 2 else (None, string(name))
                insert("NVTX_EVENTS", BASE_NS + start, BASE_NS + end, 59, text, PROCESS | thread, text_id, 0)
            insert("NVTX_EVENTS", BASE_NS - 5, BASE_NS + 5, 59, "step 99", PROCESS | MAIN, None, 3)  # a library's
            insert("NVTX_EVENTS", BASE_NS + 5, None, 59, "step 98", PROCESS | MAIN, None, 0)  # never ended
            insert("NVTX_EVENTS", BASE_NS + 5, None, 34, "step 97", PROCESS | MAIN, None, 0)  # a mark
            insert("NVTX_EVENTS", BASE_NS, BASE_NS + MS, 59, "step 96", (78 << 24) | 5, None, 0)  # another process
            insert(KERNELS, BASE_NS, BASE_NS + MS, 1, COMPUTE, 1, 78 << 24, string("gemm"))  # on another GPU
            for number, start, end, thread in self.launches:
                insert(RUNTIME, BASE_NS + start, BASE_NS + end, PROCESS | thread, number)
            for found in self.device:
                what = (BASE_NS + found.start, BASE_NS + found.end, 0, found.stream, found.number, PROCESS)
                if found.what == "kernel":
                    insert(KERNELS, *what, string(found.name))
                elif found.what == "memset":
                    insert("CUPTI_ACTIVITY_KIND_MEMSET", *what)
                else:
                    insert("CUPTI_ACTIVITY_KIND_MEMCPY", *what, found.num_bytes, KINDS[found.what])
            for text, number in strings.items():
                insert("StringIds", number, text)
        return path


KERNELS, RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
ON_DEVICE = "start INT, end INT, deviceId INT, streamId INT, correlationId INT, globalPid INT"
SCHEMA = f"""
CREATE TABLE {KERNELS} ({ON_DEVICE}, shortName INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY ({ON_DEVICE}, bytes INT, copyKind INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET ({ON_DEVICE});
CREATE TABLE {RUNTIME} (start INT, end INT, globalTid INT, correlationId INT);
CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT, globalTid INT, textId INT, domainId INT);
CREATE TABLE StringIds (id INT, value TEXT);
"""


def _event(category: str, name: str, start: int, end: int, thread: int, **args: object) -> dict[str, Any]:
    """Return a Kineto event. Kineto writes microseconds with three decimals."""
    ts, dur = (BASE_NS + start) / 1e3, (end - start) / 1e3
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": ts, "dur": dur, "args": args}


# ---------------------------------------------------------------------- a small training


@dataclass
class Plan:
    """The parameters of ``train``. A layer's forward is two kernels, its backward three."""

    num_steps: int = 2
    num_layers: int = 4
    num_micro_batches: int = 2
    kernel_ns: int = MS
    sites: tuple[str, ...] = ("mlp.linear_fc1/0", "self_attention.linear_qkv/0")
    site_bytes: int = 4 << 20
    num_pieces: int = 2
    bytes_per_ns: float = 50.0
    """GB/s of the link."""
    waits: bool = True
    """Whether compute waits before unpacking; false plants the fault of a missing wait."""
    first_step: int = 4


class Training:
    """Host, compute stream and two copy streams, with the engine's waits. All layers but the last are swapped."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.made = plan, Made()
        self.now = 0
        self.thread = MAIN
        self.free = {"compute": 0, "out": 0, "in": 0}
        self.out_ends: dict[tuple[int, int, str], int] = {}
        self.in_ends: dict[tuple[int, int, str], int] = {}
        self.totals: list[dict[str, int]] = []

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        start, thread = self.now, self.thread
        self.now += US
        yield
        self.now += US
        self.made.range(name, start, self.now, thread)

    def compute(self, duration: int) -> None:
        launch = self.now
        start = max(self.free["compute"], launch + 3 * US)
        self.made.run("kernel", launch, start, start + duration, COMPUTE, self.thread)
        self.free["compute"] = start + duration
        self.now = launch + 2 * US

    def wait(self, moment: int) -> None:
        """Let the compute stream wait."""
        self.free["compute"] = max(self.free["compute"], moment)

    def copy(self, way: str, after: int) -> int:
        plan = self.plan
        num_bytes = plan.site_bytes // plan.num_pieces
        name, stream = {"out": ("DtoH", OUT), "in": ("HtoD", IN)}[way]
        for _ in range(plan.num_pieces):
            start = max(self.free[way], after, self.now + 3 * US)
            end = start + round(num_bytes / plan.bytes_per_ns)
            self.made.run(name, self.now, start, end, stream, self.thread, num_bytes)
            self.free[way] = end
            self.now += 2 * US
            self.totals[-1][f"num_{way}_copies"] += 1
            self.totals[-1][f"swapped_{way}_bytes"] += num_bytes
        return self.free[way]

    def memory(self, num_bytes: int) -> None:
        self.made.range(f"memory {num_bytes}", self.now, self.now, self.thread)

    def forward(self, layer: int, batch: int) -> None:
        plan = self.plan
        with self.range(f"forward layers.{layer} mb{batch}"):
            self.compute(plan.kernel_ns)
            self.compute(plan.kernel_ns)
            if layer + 1 < plan.num_layers:
                with self.range(f"swap_out layers.{layer} mb{batch} 8 MiB"):
                    after = self.free["compute"]
                    for site in plan.sites:
                        with self.range(f"copy_out layers.{layer}/{site} mb{batch} {plan.site_bytes}"):
                            self.out_ends[layer, batch, site] = self.copy("out", after)
            if layer:
                for site in plan.sites:
                    with self.range(f"release layers.{layer - 1}/{site} mb{batch}"):
                        self.wait(self.out_ends[layer - 1, batch, site])
            self.memory((10 + layer) << 30)

    def bring(self, layer: int, batch: int, why: str) -> None:
        with self.range(f"{why} layers.{layer} mb{batch} 8 MiB"):
            after = self.free["compute"]
            for site in self.plan.sites:
                with self.range(f"copy_in layers.{layer}/{site} mb{batch} {self.plan.site_bytes}"):
                    moment = max(after, self.out_ends[layer, batch, site])
                    self.in_ends[layer, batch, site] = self.copy("in", moment)

    def backward(self, layer: int, batch: int) -> None:
        plan = self.plan
        with self.range(f"backward layers.{layer} mb{batch}"):
            if layer:
                self.bring(layer - 1, batch, "prefetch")
            if layer + 1 < plan.num_layers:
                for site in plan.sites:
                    with self.range(f"wait layers.{layer}/{site} mb{batch}"):
                        if plan.waits:
                            self.wait(self.in_ends[layer, batch, site])
            for _ in range(3):
                self.compute(plan.kernel_ns)
            self.memory((9 + layer) << 30)

    def step(self, number: int) -> None:
        self.totals.append({"iteration": number, "num_out_copies": 0, "num_in_copies": 0,
                            "swapped_out_bytes": 0, "swapped_in_bytes": 0})  # fmt: skip
        with self.range(f"step {number}"):
            for batch in range(self.plan.num_micro_batches):
                self.compute(self.plan.kernel_ns // 4)  # embedding
                for layer in range(self.plan.num_layers):
                    self.forward(layer, batch)
                # The GPU computes backward on autograd's own thread.
                self.thread = AUTOGRAD
                for layer in reversed(range(self.plan.num_layers)):
                    self.backward(layer, batch)
                self.thread = MAIN
            self.compute(self.plan.kernel_ns)  # optimizer
            self.made.run("DtoH", self.now, self.free["compute"], self.free["compute"] + US, COMPUTE, MAIN, 4)
            self.now = max(self.now, self.free["compute"] + 2 * US)  # the loss is read


def train(plan: Plan | None = None) -> tuple[Made, dict[str, Any]]:
    """Return the trace of a correct run and its summary."""
    training = Training(plan or Plan())
    for number in range(training.plan.num_steps):
        training.step(training.plan.first_step + number)
    return training.made, {"steps": training.totals}
