"""Describe the machine for result rows (versions, hardware, commit, link speed), and read host memory figures.

``python -m benchmarks.machine`` prints the description as JSON. Programs that start measured runs call it in a separate
process, because a CUDA context of their own would take device memory from the runs.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "megatron-core", "transformer-engine", "numpy", "torchtune", "torchao", "deepspeed")
NUM_COPIES = 8


def facts() -> dict[str, Any]:
    """Return ``versions``, ``machine``, ``commit`` and ``link`` (GB/s; null without a GPU). Takes seconds."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.machine"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the machine cannot be described:\n{done.stdout}{done.stderr}")
    return dict(json.loads(done.stdout))


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    import torch

    on_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else "none", "num_gpus": torch.cuda.device_count(),
        "cores": os.cpu_count(), "cuda": torch.version.cuda,
        "device_memory_gib": torch.cuda.get_device_properties(0).total_memory / 2**30 if on_gpu else None,
    }  # fmt: skip


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit() -> str:
    if "SWAP_COMMIT" in os.environ:
        return os.environ["SWAP_COMMIT"]
    try:
        git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return git.stdout.strip() if git.returncode == 0 else ""


def link_gb_s() -> dict[str, float] | None:
    """Measure the median bandwidth in GB/s of pinned copies of 1 GiB, each way alone and both ways at once."""
    import torch

    if not torch.cuda.is_available():
        return None
    hosts = [torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty_like(host, device="cuda") for host in hosts]
    out, back = (hosts[0], devices[0]), (devices[1], hosts[1])
    stream, streams = torch.cuda.current_stream(), (torch.cuda.Stream(), torch.cuda.Stream())
    speed = {}
    for name, copies in (("d2h_gb_s", [out]), ("h2d_gb_s", [back]), ("duplex_gb_s", [out, back])):
        times_ms = []
        for _ in range(NUM_COPIES):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for beside, (target, source) in zip(streams, copies, strict=False):
                beside.wait_event(start)
                with torch.cuda.stream(beside):
                    target.copy_(source, non_blocking=True)
                stream.wait_stream(beside)
            end.record()
            end.synchronize()
            times_ms.append(start.elapsed_time(end))
        speed[name] = hosts[0].numel() / sorted(times_ms)[len(times_ms) // 2] / 1e6
    return speed


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def host_used_bytes() -> int:
    """Return the machine's memory that is in use and not available to a new process, pinned pages included."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
    return (kib["MemTotal"] - kib["MemAvailable"]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="Print versions, machine, commit and the link's speed as JSON.")
    parser.add_argument("--command", help="command line to record with the description")
    command = parser.parse_args().command
    found = {"python": platform.python_version(), **versions()}
    about = {"versions": found, "machine": machine(), "commit": commit(), "link": link_gb_s()}
    print(json.dumps({**({"command": command} if command else {}), **about}))


if __name__ == "__main__":
    main()
