"""Measure pinned host memory: the speed of reserving it, and of copies through leased views.

    python tools/check_slab.py                                  # 32 GiB with the default strategy
    python tools/check_slab.py --compare --variants pages/r1 pages/r4 populate pages/small pages/s256
    python tools/check_slab.py --gib 2 --slab-mib 256           # a small machine; no copies without CUDA

A variant is a touch mode (pages, populate, memset, none) and any of: tN touching threads, rN registering threads, cN
MiB per chunk, sN MiB per slab, huge or small pages; the others keep their defaults. The first row ("cold") is an extra
run of the first variant: on a virtual machine the very first touch also waits for the host to provide the memory.
Copies go through leases of one extent or of extents of --extent-mib, in pieces of --piece-mib.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.table import Table, cell_gib, cell_ms
from megatron.swap.memory.host_memory import PinStrategy, safe_host_bytes
from megatron.swap.memory.host_pool import HostPool, Lease

MIB = 1 << 20
GIB = 1 << 30
VARIANT = re.compile(r"(pages|populate|memset|none)((?:/(?:huge|small|[trcs][1-9]\d*))*)")
NUMBERS = {"t": "touch_threads", "r": "register_threads", "c": "chunk_bytes"}
NUM_LEASES = 2000


def parse_variant(text: str, slab_mib: int) -> tuple[PinStrategy, int]:
    """Return strategy and slab bytes for a text like `pages/t16/r4/huge/s1024`.

    Raises:
        ValueError: it is no variant.
    """
    match = VARIANT.fullmatch(text)
    if match is None:
        raise ValueError(f"variant {text!r}: is not TOUCH[/tN][/rN][/cN][/sN][/huge|/small]")
    strategy = PinStrategy(touch=match[1])  # type: ignore[arg-type]
    for part in match[2].split("/")[1:]:
        if part in ("huge", "small"):
            strategy = replace(strategy, huge_pages=part == "huge")
        elif part[0] == "s":
            slab_mib = int(part[1:])
        else:
            number = int(part[1:]) * (MIB if part[0] == "c" else 1)
            strategy = replace(strategy, **{NUMBERS[part[0]]: number})  # type: ignore[arg-type]
    return strategy, slab_mib * MIB


def measure_reservation(name: str, nbytes: int, strategy: PinStrategy, slab_bytes: int) -> dict[str, Any]:
    """Reserve `nbytes` in a fresh pool, release them, and return the time of each phase."""
    pinned = torch.cuda.is_available()
    pool = HostPool(limit=nbytes, pinned=pinned, slab_bytes=slab_bytes, strategy=strategy)
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
        "variant": name, "gib": nbytes / GIB, "slab_mib": slab_bytes // MIB, "num_slabs": num_slabs,
        "book_s": reserve_s, "gib_per_s": nbytes / GIB / reserve_s, "touch_s": times.touch_s,
        "register_thread_s": times.register_s, "close_s": close_s, "strategy": asdict(strategy),
    }  # fmt: skip


def measure_pin_memory(nbytes: int) -> dict[str, Any]:
    """Time torch.empty(pin_memory=True) for `nbytes` in pieces of 1 GiB."""
    start = time.perf_counter()
    sizes = [min(GIB, nbytes - done) for done in range(0, nbytes, GIB)]
    pieces = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
    seconds = time.perf_counter() - start
    del pieces
    torch._C._host_emptyCache()  # otherwise these pages stay pinned while copies are measured
    gib = nbytes / GIB
    return {"variant": "torch pin_memory", "gib": gib, "book_s": seconds, "gib_per_s": gib / seconds}


def measure_pool_calls() -> dict[str, Any]:
    """Time lease() + views() + free(), in microseconds, in a pool cut into many blocks."""
    strategy = PinStrategy(touch="none", huge_pages=False)
    pool = HostPool(limit=4 * GIB, slab_bytes=4 * GIB, pinned=False, strategy=strategy)
    leases = [pool.lease(MIB) for _ in range(4000)]
    for lease in leases[::2]:
        lease.free()
    found: dict[str, Any] = {"free_blocks": 2001}
    for name, size in (("one_extent_us", MIB), ("sixteen_mib_us", 16 * MIB)):
        start = time.perf_counter()
        for _ in range(NUM_LEASES):
            lease = pool.lease(size)
            lease.views()
            lease.free()
        found[name] = (time.perf_counter() - start) / NUM_LEASES * 1e6
    pool.close(force=True)
    return found


def make_leases(pool: HostPool, nbytes: int, extent_bytes: int | None) -> list[Lease]:
    """Return two leases of `nbytes` that fill the pool, each of one extent or of extents of `extent_bytes`.

    For the latter the pool is filled with blocks; freeing every second one leaves no two free neighbours.
    """
    if extent_bytes is None:
        return [pool.lease(nbytes), pool.lease(nbytes)]
    blocks = [pool.lease(extent_bytes) for _ in range(2 * nbytes // extent_bytes)]
    leases = []
    for half in (blocks[::2], blocks[1::2]):
        for block in half:
            block.free()
        leases.append(pool.lease(nbytes))
    return leases


def copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def time_copies(issues: dict[str, Callable[[], None]], nbytes: int, repeats: int) -> dict[str, float]:
    """Return GB/s of each named copy, all running at once, each on a stream of its own; the best of `repeats`."""
    streams = {name: torch.cuda.Stream() for name in issues}
    best = dict.fromkeys(issues, 0.0)
    for _ in range(repeats + 1):  # the first one warms up and counts only if nothing beats it
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


def measure_copies(
    nbytes: int, extent_bytes: int | None, piece_bytes: int, strategy: PinStrategy, repeats: int
) -> dict[str, Any]:
    """Time D2H, H2D and both at once through two leases of `nbytes`, and compare the returned bytes."""
    pool = HostPool(limit=2 * nbytes, pinned=True, slab_bytes=2 * nbytes, strategy=strategy)
    try:
        out_lease, in_lease = make_leases(pool, nbytes, extent_bytes)
        source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
        target = torch.zeros_like(source)
        # Pieces never cross an extent.
        out, back = (
            [piece for view in lease.views() for piece in view.split(piece_bytes)] for lease in (out_lease, in_lease)
        )
        sizes = [piece.numel() for piece in out]
        d2h = partial(copy, out, source.split(sizes))
        out_gb_s = time_copies({"d2h": d2h}, nbytes, repeats)["d2h"]
        in_gb_s = time_copies({"h2d": partial(copy, target.split(sizes), out)}, nbytes, repeats)["h2d"]
        equal = bool(torch.equal(source, target))
        h2d = partial(copy, target.split([piece.numel() for piece in back]), back)
        both = time_copies({"d2h": d2h, "h2d": h2d}, nbytes, repeats)
        return {
            "extent_mib": None if extent_bytes is None else extent_bytes / MIB, "piece_mib": piece_bytes / MIB,
            "num_extents": len(out_lease.extents), "num_copies": len(out),
            "is_pinned": all(view.is_pinned() for view in out_lease.views()), "d2h_gb_per_s": out_gb_s,
            "h2d_gb_per_s": in_gb_s, "both_d2h_gb_per_s": both["d2h"], "both_h2d_gb_per_s": both["h2d"], "equal": equal,
        }  # fmt: skip
    finally:
        torch.cuda.synchronize()
        pool.close(force=True)


def describe_machine() -> dict[str, Any]:
    """Return the versions and the hardware that the figures depend on."""
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
        "kernel": platform.release(), "host_cores": len(os.sched_getaffinity(0)),
        "transparent_huge_pages": huge_pages.read_text().strip() if huge_pages.exists() else None,
        "host_budget": asdict(safe_host_bytes(1)),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }  # fmt: skip


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; end the program where it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gib", type=float, default=32, help="GiB to reserve for each variant (default 32)")
    add("--slab-mib", type=int, default=1024, help="slab size unless a variant says sN (default 1024)")
    add("--variants", nargs="+", default=["pages"], help="strategies to time, one after the other (default: pages)")
    add("--repeat", type=int, default=1, help="how often each variant is timed (default 1)")
    add("--compare", action="store_true", help="also time torch's pin_memory=True")
    add("--compare-gib", type=float, default=4, help="GiB that --compare allocates (default 4)")
    add("--copy-mib", type=int, default=1024, help="size of each copy test in MiB; 0 skips them")
    add("--piece-mib", type=int, nargs="+", default=[1, 4, 16, 64], help="copy sizes in MiB")
    add("--extent-mib", type=int, nargs="*", default=[4, 16], help="extent sizes of split leases")
    add("--copy-repeat", type=int, default=5, help="copies per figure, the best counts (default 5)")
    add("--unchecked", action="store_true", help="reserve even if the memory seems too small")
    add("--output", type=Path, help="write all figures to this JSON file")
    options = parser.parse_args(arguments)
    for name in options.variants:
        try:
            parse_variant(name, options.slab_mib)
        except ValueError as error:
            parser.error(str(error))
    return options


class Figures:
    """All figures of one call, written to a file after each, so that a failure loses no earlier figure."""

    def __init__(self, command: list[str], path: Path | None) -> None:
        self._path = path
        self.content: dict[str, Any] = {
            "command": command, "machine": describe_machine(), "booking": [], "pool_calls": [], "copies": [],
            "failures": [],
        }  # fmt: skip

    def add(self, part: str, what: str, measure: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        """Measure and keep one figure of a part. A failure is recorded and does not stop the others."""
        try:
            self.content[part].append(measure(*arguments))
        except Exception as error:
            print(f"{what}: FAILED: {error!r}", flush=True)
            self.content["failures"].append({"what": what, "error": repr(error)})
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.content, indent=1, default=str) + "\n")

    @property
    def is_good(self) -> bool:
        """Return whether nothing failed and every copy used pinned memory and returned equal bytes."""
        return not self.content["failures"] and all(row["equal"] and row["is_pinned"] for row in self.content["copies"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; return the exit status: 1 if a measurement or copy failed, 2 if unsafe here."""
    options, on_gpu = parse_args(arguments), torch.cuda.is_available()
    if on_gpu:
        torch.zeros(1, device="cuda")  # create the context before anything is timed
    figures = Figures(["tools/check_slab.py", *(sys.argv[1:] if arguments is None else arguments)], options.output)
    budget, nbytes = safe_host_bytes(1), int(options.gib * GIB) // MIB * MIB
    if nbytes > budget.safe_bytes and not options.unchecked:
        print(f"--gib {options.gib:g} is not safe here ({budget.reason}): lower it or add --unchecked", file=sys.stderr)
        return 2
    labels = [f"{options.variants[0]} (cold)", *(name for name in options.variants for _ in range(options.repeat))]
    for label in labels:
        strategy, slab_bytes = parse_variant(label.removesuffix(" (cold)"), options.slab_mib)
        figures.add("booking", label, measure_reservation, label, nbytes, strategy, slab_bytes)
    if options.compare and on_gpu:
        figures.add("booking", "pin_memory", measure_pin_memory, int(options.compare_gib * GIB))
    print(Table.of(figures.content["booking"], {
        "reserving": lambda row: row["variant"],
        "GiB": lambda row: cell_ms(row["gib"]),
        "slabs": lambda row: row.get("num_slabs"),
        "s": lambda row: cell_gib(row["book_s"]),
        "GiB/s": lambda row: cell_gib(row["gib_per_s"]),
        "touched s": lambda row: cell_gib(row.get("touch_s")),
        "registered s": lambda row: cell_gib(row.get("register_thread_s")),
        "closed s": lambda row: cell_gib(row.get("close_s")),
    }).aligned, flush=True)  # fmt: skip
    figures.add("pool_calls", "pool calls", measure_pool_calls)
    for calls in figures.content["pool_calls"]:
        print(f"lease + views + free, µs: {calls['one_extent_us']:.1f} for 1 MiB, {calls['sixteen_mib_us']:.1f} for 16")
    if on_gpu and options.copy_mib > 0:
        report_copies(figures, options)
    else:
        print("copies: skipped, " + ("--copy-mib 0" if on_gpu else "no CUDA device"))
    return 0 if figures.is_good else 1


def report_copies(figures: Figures, options: argparse.Namespace) -> None:
    """Time copies by the size of extents and of pieces, with the strategy of the first variant."""
    strategy, _ = parse_variant(options.variants[0], options.slab_mib)
    for extent_mib in [None, *options.extent_mib]:
        extent_bytes = extent_mib * MIB if extent_mib else None
        for piece_mib in options.piece_mib:
            if extent_mib is None or piece_mib <= extent_mib:  # a copy never crosses an extent
                what = f"copies, extents of {extent_mib or options.copy_mib} MiB, pieces of {piece_mib} MiB"
                sizes = (options.copy_mib * MIB, extent_bytes, piece_mib * MIB)
                figures.add("copies", what, measure_copies, *sizes, strategy, options.copy_repeat)
    print(Table.of(figures.content["copies"], {
        "GB/s: extents of MiB": lambda row: row["extent_mib"] or options.copy_mib,
        "pieces of": lambda row: row["piece_mib"],
        "D2H": lambda row: cell_ms(row["d2h_gb_per_s"]),
        "H2D": lambda row: cell_ms(row["h2d_gb_per_s"]),
        "both: D2H": lambda row: cell_ms(row["both_d2h_gb_per_s"]),
        "both: H2D": lambda row: cell_ms(row["both_h2d_gb_per_s"]),
        "content": lambda row: "equal" if row["equal"] else "DIFFERENT",
    }).aligned, flush=True)  # fmt: skip
