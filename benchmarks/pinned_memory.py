"""Measure pinned host memory: the speed of reserving it, and of copies through leased views.

    python tools/check_slab.py                                  # 32 GiB with the default strategy
    python tools/check_slab.py --compare --variants pages/r1 pages/r4 populate pages/small pages/s256
    python tools/check_slab.py --gib 2 --slab-mib 256           # a small machine; no copies without CUDA

A variant is a touch mode (pages, populate, memset, none) and any of: tN touching threads, rN registering threads, cN
MiB per chunk, sN MiB per slab, huge or small pages; the others keep their defaults. The first row ("cold") is an extra
run of the first variant: on a virtual machine the very first touch also waits for the host to provide the memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.swap.memory.host_memory import PinStrategy, gpu_numa_node, safe_host_bytes
from megatron.swap.memory.host_pool import HostPool, Lease

MIB = 1 << 20
GIB = 1 << 30


def parse_variant(text: str, slab_mib: int) -> tuple[PinStrategy, int]:
    """Return strategy and slab bytes for a text like `pages/t16/r4/huge/s1024`.

    Raises:
        ValueError: names the part that is wrong.
    """
    touch, *parts = text.split("/")
    if touch not in ("pages", "populate", "memset", "none"):
        raise ValueError(f"variant {text!r}: touch mode {touch!r} is not pages, populate, memset or none")
    strategy = PinStrategy(touch=touch)  # type: ignore[arg-type]
    for part in parts:
        key, number = part[:1], part[1:]
        if part in ("huge", "small"):
            strategy = replace(strategy, huge_pages=part == "huge")
        elif key in "trcs" and number.isdigit() and int(number) > 0:
            if key == "t":
                strategy = replace(strategy, touch_threads=int(number))
            elif key == "r":
                strategy = replace(strategy, register_threads=int(number))
            elif key == "c":
                strategy = replace(strategy, chunk_bytes=int(number) * MIB)
            else:
                slab_mib = int(number)
        else:
            raise ValueError(f"variant {text!r}: {part!r} is not huge, small, tN, rN, cN or sN")
    return strategy, slab_mib * MIB


def measure_reservation(
    name: str, nbytes: int, strategy: PinStrategy, slab_bytes: int, pinned: bool
) -> dict[str, Any]:
    """Reserve `nbytes` in a fresh pool, release them, and return the time of each phase."""
    pool = HostPool(limit=nbytes, pinned=pinned, slab_bytes=slab_bytes, strategy=strategy)
    try:
        start = time.perf_counter()
        pool.reserve(nbytes)
        reserve_s = time.perf_counter() - start
        times = pool.last_growth
        stats = pool.stats
        assert times is not None
    finally:
        start = time.perf_counter()
        pool.close(force=True)
        del pool
        gc.collect()
        close_s = time.perf_counter() - start
    return {
        "variant": name,
        "gib": nbytes / GIB,
        "slab_mib": slab_bytes // MIB,
        "num_slabs": stats.num_slabs,
        "book_s": reserve_s,
        "gib_per_s": nbytes / GIB / reserve_s,
        "touch_s": times.touch_s,
        "register_thread_s": times.register_s,
        "close_s": close_s,
        "strategy": asdict(strategy),
    }


def measure_pin_memory(nbytes: int) -> dict[str, Any]:
    """Time torch.empty(pin_memory=True) for `nbytes` in pieces of 1 GiB."""
    start = time.perf_counter()
    pieces = [
        torch.empty(min(GIB, nbytes - done), dtype=torch.uint8, pin_memory=True)
        for done in range(0, nbytes, GIB)
    ]
    seconds = time.perf_counter() - start
    del pieces
    torch._C._host_emptyCache()  # otherwise these pages stay pinned while copies are measured
    return {
        "variant": "torch pin_memory",
        "gib": nbytes / GIB,
        "book_s": seconds,
        "gib_per_s": nbytes / GIB / seconds,
    }


def measure_pool_calls(num_leases: int = 2000) -> dict[str, Any]:
    """Time lease() + views() + free(), in microseconds, in a pool cut into many blocks."""
    pool = HostPool(
        limit=4 * GIB,
        slab_bytes=4 * GIB,
        pinned=False,
        strategy=PinStrategy(touch="none", huge_pages=False),
    )
    leases = [pool.lease(MIB) for _ in range(4000)]
    for lease in leases[::2]:
        lease.free()
    single = _lease_us(pool, MIB, num_leases)
    split = _lease_us(pool, 16 * MIB, num_leases)
    pool.close(force=True)
    return {"free_blocks": 2001, "one_extent_us": single, "sixteen_mib_us": split}


def _lease_us(pool: HostPool, nbytes: int, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        lease = pool.lease(nbytes)
        lease.views()
        lease.free()
    return (time.perf_counter() - start) / repeats * 1e6


def make_leases(pool: HostPool, nbytes: int, extent_bytes: int | None) -> tuple[Lease, Lease]:
    """Return two leases of `nbytes` that fill the pool, each of one extent or of extents of `extent_bytes`.

    For the latter the pool is filled with blocks; freeing every second one leaves no two free neighbours.
    """
    if extent_bytes is None:
        return pool.lease(nbytes), pool.lease(nbytes)
    blocks = [pool.lease(extent_bytes) for _ in range(2 * nbytes // extent_bytes)]
    leases = []
    for half in (blocks[::2], blocks[1::2]):
        for block in half:
            block.free()
        leases.append(pool.lease(nbytes))
    return leases[0], leases[1]


def copy_pairs(
    views: list[torch.Tensor], device: torch.Tensor, piece_bytes: int
) -> Iterator[tuple[Any, Any]]:
    """Yield (host, device) pieces of at most `piece_bytes`, never across an extent."""
    done = 0
    for view in views:
        for host in view.split(piece_bytes):
            yield host, device[done : done + host.numel()]
            done += host.numel()


def time_copies(issues: dict[str, tuple[Callable[[], None], int]], repeats: int) -> dict[str, float]:
    """Return GB/s of each named copy, all running at once, each on a stream of its own; the best of `repeats`."""
    streams = {name: torch.cuda.Stream() for name in issues}
    best = dict.fromkeys(issues, 0.0)
    for _ in range(repeats + 1):  # the first one warms up and counts only if nothing beats it
        torch.cuda.synchronize()
        events = {}
        for name, (issue, _) in issues.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(streams[name]):
                start.record()
                issue()
                end.record()
            events[name] = (start, end)
        torch.cuda.synchronize()
        for name, (start, end) in events.items():
            best[name] = max(best[name], issues[name][1] / 1e6 / start.elapsed_time(end))
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
        out_pairs = list(copy_pairs(out_lease.views(), source, piece_bytes))
        back_pairs = list(copy_pairs(out_lease.views(), target, piece_bytes))
        in_pairs = list(copy_pairs(in_lease.views(), target, piece_bytes))

        def copy_out() -> None:
            for host, device in out_pairs:
                host.copy_(device, non_blocking=True)

        def copy_in(pairs: list[tuple[Any, Any]]) -> None:
            for host, device in pairs:
                device.copy_(host, non_blocking=True)

        alone_out = time_copies({"d2h": (copy_out, nbytes)}, repeats)["d2h"]
        alone_in = time_copies({"h2d": (lambda: copy_in(back_pairs), nbytes)}, repeats)["h2d"]
        equal = bool(torch.equal(source, target))
        both = time_copies({"d2h": (copy_out, nbytes), "h2d": (lambda: copy_in(in_pairs), nbytes)}, repeats)
        return {
            "extent_mib": None if extent_bytes is None else extent_bytes / MIB,
            "piece_mib": piece_bytes / MIB,
            "num_extents": len(out_lease.extents),
            "num_copies": len(out_pairs),
            "is_pinned": all(view.is_pinned() for view in out_lease.views()),
            "d2h_gb_per_s": alone_out,
            "h2d_gb_per_s": alone_in,
            "both_d2h_gb_per_s": both["d2h"],
            "both_h2d_gb_per_s": both["h2d"],
            "equal": equal,
        }
    finally:
        torch.cuda.synchronize()
        pool.close(force=True)


def describe_machine() -> dict[str, Any]:
    """Return the versions and the hardware that the figures depend on."""
    budget = safe_host_bytes(1)
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    machine: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "host_cores": len(os.sched_getaffinity(0)),
        "transparent_huge_pages": huge_pages.read_text().strip() if huge_pages.exists() else None,
        "host_budget": asdict(budget),
        "device": "cpu",
    }
    if torch.cuda.is_available():
        machine["device"] = torch.cuda.get_device_name()
        try:
            machine["numa_node"] = gpu_numa_node(torch.cuda.current_device())
        except (RuntimeError, AttributeError) as error:
            machine["numa_node"] = repr(error)
    return machine


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; end the program where it is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gib", type=float, default=32, help="GiB to reserve for each variant (default 32)"
    )
    parser.add_argument(
        "--slab-mib", type=int, default=1024, help="slab size unless a variant says sN (default 1024)"
    )
    parser.add_argument(
        "--variants", nargs="+", default=["pages"], metavar="TOUCH[/tN][/rN][/cN][/sN][/huge|/small]",
        help="strategies to time, one after the other (default: pages)",
    )  # fmt: skip
    parser.add_argument("--repeat", type=int, default=1, help="how often each variant is timed (default 1)")
    parser.add_argument("--compare", action="store_true", help="also time torch's pin_memory=True")
    parser.add_argument(
        "--compare-gib", type=float, default=4, help="GiB that --compare allocates (default 4)"
    )
    parser.add_argument(
        "--copy-mib", type=int, default=1024, help="size of each copy test in MiB; 0 skips them"
    )
    parser.add_argument("--piece-mib", type=int, nargs="+", default=[1, 4, 16, 64], help="copy sizes in MiB")
    parser.add_argument(
        "--extent-mib", type=int, nargs="*", default=[4, 16], help="extent sizes of split leases"
    )
    parser.add_argument(
        "--copy-repeat", type=int, default=5, help="copies per figure, the best counts (default 5)"
    )
    parser.add_argument("--unchecked", action="store_true", help="reserve even if the memory seems too small")
    parser.add_argument("--output", type=Path, help="write all figures to this JSON file")
    args = parser.parse_args(arguments)
    for name in args.variants:
        try:
            parse_variant(name, args.slab_mib)
        except ValueError as error:
            parser.error(str(error))
    return args


class Figures:
    """All figures of one call, written to a file after each, so that a failure loses no earlier figure.

    Args:
        command: the command line.
        path: the JSON file; `None`: nothing is written.
    """

    def __init__(self, command: list[str], path: Path | None) -> None:
        self._path = path
        self.content: dict[str, Any] = {
            "command": command, "machine": describe_machine(), "booking": [], "pool_calls": [], "copies": [],
            "failures": [],
        }  # fmt: skip

    def add(self, part: str, what: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Measure and keep one figure of a part; `None`: it failed, which is recorded and does not stop the others."""
        row = None
        try:
            row = measure()
            self.content[part].append(row)
        except Exception as error:
            print(f"{what}: FAILED: {error!r}", flush=True)
            self.content["failures"].append({"what": what, "error": repr(error)})
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.content, indent=1, default=str) + "\n")
        return row

    @property
    def is_good(self) -> bool:
        """Return whether nothing failed and every copy used pinned memory and returned equal bytes."""
        return not self.content["failures"] and all(row["equal"] and row["is_pinned"] for row in self.content["copies"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; return the exit status: 1 if a measurement or copy failed, 2 if unsafe here.

    Args:
        arguments: the command-line arguments; `None`: those of this process.
    """
    args = parse_args(arguments)
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # create the context before anything is timed
    figures = Figures(["tools/check_slab.py", *(sys.argv[1:] if arguments is None else arguments)], args.output)
    machine = figures.content["machine"]
    print(f"{machine['device']}, {machine['host_cores']} cores, torch {torch.__version__}")
    budget = safe_host_bytes(1)
    nbytes = int(args.gib * GIB) // MIB * MIB
    if nbytes > budget.safe_bytes and not args.unchecked:
        print(f"--gib {args.gib:g} is not safe here ({budget.reason}): lower it or add --unchecked", file=sys.stderr)
        return 2
    report_reservations(figures, args, nbytes)
    report_pool_calls(figures)
    report_copies(figures, args)
    return 0 if figures.is_good else 1


def report_reservations(figures: Figures, args: argparse.Namespace, nbytes: int) -> None:
    """Time each variant (the first also once before all others), and torch's own pinned memory if requested."""
    cuda = torch.cuda.is_available()
    print(
        f"\n{'reserving':<28}{'GiB':>7}{'slabs':>7}{'s':>9}{'GiB/s':>8}{'touched s':>11}{'reg. s':>9}{'close s':>9}"
    )
    runs = [(f"{args.variants[0]} (cold)", args.variants[0])]
    runs += [(name, name) for name in args.variants for _ in range(args.repeat)]
    for label, name in runs:
        strategy, slab_bytes = parse_variant(name, args.slab_mib)
        row = figures.add("booking", label, partial(measure_reservation, label, nbytes, strategy, slab_bytes, cuda))
        if row:
            print(
                f"{label:<28}{row['gib']:>7.1f}{row['num_slabs']:>7}{row['book_s']:>9.2f}{row['gib_per_s']:>8.2f}"
                f"{row['touch_s']:>11.2f}{row['register_thread_s']:>9.2f}{row['close_s']:>9.2f}",
                flush=True,
            )
    if args.compare and cuda:
        row = figures.add("booking", "pin_memory", partial(measure_pin_memory, int(args.compare_gib * GIB)))
        if row:
            print(f"{row['variant']:<28}{row['gib']:>7.1f}{'':>7}{row['book_s']:>9.2f}{row['gib_per_s']:>8.2f}")
    elif args.compare:
        print("torch pin_memory: skipped, no CUDA device")


def report_pool_calls(figures: Figures) -> None:
    """Time the calls that lease and free memory."""
    calls = figures.add("pool_calls", "pool calls", measure_pool_calls)
    if calls:
        print(
            f"\nlease + views + free among {calls['free_blocks']} free blocks: "
            f"{calls['one_extent_us']:.1f} us for 1 MiB, {calls['sixteen_mib_us']:.1f} us for 16 MiB in parts"
        )


def report_copies(figures: Figures, args: argparse.Namespace) -> None:
    """Time copies by the size of extents and of pieces, with the strategy of the first variant."""
    if not torch.cuda.is_available() or args.copy_mib <= 0:
        print("\ncopies: skipped, " + ("--copy-mib 0" if torch.cuda.is_available() else "no CUDA device"))
        return
    strategy, _ = parse_variant(args.variants[0], args.slab_mib)
    print(f"\n{'GB/s: extents of':<22}{'pieces of':>11}{'D2H':>8}{'H2D':>8}{'both: D2H':>12}{'H2D':>8}   content")
    for extent_mib in [None, *args.extent_mib]:
        for piece_mib in args.piece_mib:
            if extent_mib is not None and piece_mib > extent_mib:
                continue  # same as pieces of extent_mib, since a copy never crosses an extent
            label = f"{extent_mib or args.copy_mib} MiB"
            extent_bytes = extent_mib * MIB if extent_mib else None
            measure = partial(
                measure_copies, args.copy_mib * MIB, extent_bytes, piece_mib * MIB, strategy, args.copy_repeat
            )
            row = figures.add("copies", f"copies, extents of {label}, pieces of {piece_mib} MiB", measure)
            if row:
                print(
                    f"{label:<22}{f'{piece_mib} MiB':>11}{row['d2h_gb_per_s']:>8.1f}{row['h2d_gb_per_s']:>8.1f}"
                    f"{row['both_d2h_gb_per_s']:>12.1f}{row['both_h2d_gb_per_s']:>8.1f}"
                    f"   {'equal' if row['equal'] else 'DIFFERENT'}",
                    flush=True,
                )
