"""Measure pinned host memory: the speed of reserving it, and of copies through leased views.

    python tools/check_slab.py                        # 32 GiB, and copies of 1 GiB
    python tools/check_slab.py --repeat 3 --compare   # beside torch's pin_memory=True
    python tools/check_slab.py --gib 2                # a small machine; no copies without CUDA

The first row ("cold") is an extra one: on a virtual machine the very first touch also waits for the host to provide the
memory.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import facts
from benchmarks.table import Table
from megatron.swap.memory.host_memory import safe_host_bytes
from megatron.swap.memory.host_pool import HostPool

MIB = 1 << 20
GIB = 1 << 30
PIECES_MIB = (1, 4, 16, 64)
NUM_COPIES = 5  # Copies of each figure; the fastest counts


def measure_reservation(name: str, nbytes: int) -> dict[str, Any]:
    pool = HostPool(limit=nbytes, pinned=torch.cuda.is_available())
    try:
        start = time.perf_counter()
        pool.reserve(nbytes)
        reserve_s = time.perf_counter() - start
        times, num_slabs = pool.last_growth, pool.stats.num_slabs
        assert times is not None
    finally:
        start = time.perf_counter()
        pool.close(force=True)
        del pool
        gc.collect()
        close_s = time.perf_counter() - start
    return {
        "variant": name, "gib": nbytes / GIB, "num_slabs": num_slabs, "book_s": reserve_s,
        "gib_per_s": nbytes / GIB / reserve_s, "touch_s": times.touch_s, "register_thread_s": times.register_s,
        "close_s": close_s,
    }  # fmt: skip


def measure_pin_memory(nbytes: int) -> dict[str, Any]:
    start = time.perf_counter()
    sizes = [min(GIB, nbytes - done) for done in range(0, nbytes, GIB)]
    pieces = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
    seconds = time.perf_counter() - start
    del pieces
    torch._C._host_emptyCache()  # otherwise these pages stay pinned while copies are measured
    gib = nbytes / GIB
    return {"variant": "torch pin_memory", "gib": gib, "book_s": seconds, "gib_per_s": gib / seconds}


def copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def time_copies(issues: dict[str, Callable[[], None]], nbytes: int) -> dict[str, float]:
    """Return GB/s of each named copy, all running at once, each on a stream of its own; the best of all."""
    streams = {name: torch.cuda.Stream() for name in issues}
    best = dict.fromkeys(issues, 0.0)
    for _ in range(NUM_COPIES + 1):  # the first one warms up and counts only if nothing beats it
        torch.cuda.synchronize()
        events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in issues}
        for name, issue in issues.items():
            with torch.cuda.stream(streams[name]):
                events[name][0].record()
                issue()
                events[name][1].record()
        torch.cuda.synchronize()
        for name, (start, end) in events.items():
            best[name] = max(best[name], nbytes / 1e6 / start.elapsed_time(end))
    return best


def measure_copies(nbytes: int, piece_bytes: int) -> dict[str, Any]:
    pool = HostPool(limit=2 * nbytes, pinned=True, slab_bytes=2 * nbytes)
    try:
        leases = [pool.lease(nbytes) for _ in range(2)]
        out, back = ([piece for view in lease.views() for piece in view.split(piece_bytes)] for lease in leases)
        source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
        target = torch.zeros_like(source)
        d2h = partial(copy, out, source.split(piece_bytes))
        d2h_gb_s = time_copies({"d2h": d2h}, nbytes)["d2h"]
        h2d_gb_s = time_copies({"h2d": partial(copy, target.split(piece_bytes), out)}, nbytes)["h2d"]
        equal = bool(torch.equal(source, target))
        both = time_copies({"d2h": d2h, "h2d": partial(copy, target.split(piece_bytes), back)}, nbytes)
        return {
            "piece_mib": piece_bytes / MIB, "is_pinned": all(view.is_pinned() for view in leases[0].views()),
            "d2h_gb_per_s": d2h_gb_s, "h2d_gb_per_s": h2d_gb_s, "both_d2h_gb_per_s": both["d2h"],
            "both_h2d_gb_per_s": both["h2d"], "equal": equal,
        }  # fmt: skip
    finally:
        torch.cuda.synchronize()
        pool.close(force=True)


def show(rows: Sequence[dict[str, Any]]) -> None:
    values = [[row.get(name, "") for name in rows[0]] for row in rows]
    cells = [[f"{value:.2f}" if isinstance(value, float) else str(value) for value in line] for line in values]
    print(Table([*rows[0]], cells).aligned, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; return the exit status: 1 if a copy returned other bytes, 2 if unsafe here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gib", type=float, default=32, help="GiB to reserve (default 32)")
    add("--repeat", type=int, default=1, help="how often they are reserved (default 1)")
    add("--compare", action="store_true", help="also time torch's pin_memory=True, for 4 GiB")
    add("--unchecked", action="store_true", help="reserve even if the memory seems too small")
    add("--output", type=Path, help="write all figures to this JSON file")
    options, on_gpu = parser.parse_args(arguments), torch.cuda.is_available()
    budget, nbytes = safe_host_bytes(1), int(options.gib * GIB) // MIB * MIB
    if nbytes > budget.safe_bytes and not options.unchecked:
        print(f"--gib {options.gib:g} is not safe here ({budget.reason}): lower it or add --unchecked", file=sys.stderr)
        return 2
    if on_gpu:
        torch.zeros(1, device="cuda")  # create the context before anything is timed
    reserved = [measure_reservation(name, nbytes) for name in ("pages (cold)", *["pages"] * options.repeat)]
    reserved += [measure_pin_memory(4 * GIB)] if options.compare and on_gpu else []
    show(reserved)
    copies: list[dict[str, Any]] = []
    if on_gpu:
        copies = [measure_copies(GIB, piece_mib * MIB) for piece_mib in PIECES_MIB]
        show(copies)
    else:
        print("copies: skipped, no CUDA device")
    if options.output is not None:
        command = ["tools/check_slab.py", *(sys.argv[1:] if arguments is None else arguments)]
        figures = {"command": command, **facts(), "booking": reserved, "copies": copies}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if all(row["equal"] and row["is_pinned"] for row in copies) else 1
