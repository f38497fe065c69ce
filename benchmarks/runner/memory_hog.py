"""A second program on the GPUs: the memory that it has taken is not there for a measured run.

`python -m benchmarks.runner.memory_hog GIB [GIB ...]` allocates so much on each GPU, says so, and keeps it until its
input ends, so that it never outlives the program that started it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.machine import ROOT

READY = "ready"


class MemoryHogError(Exception):
    """The GPUs do not have so much free memory."""


@contextmanager
def memory_hog(gib: Sequence[float]) -> Iterator[None]:
    """Keep so many GiB of the first GPU, of the second, and so on, in another process while the block runs.

    Raises:
        MemoryHogError: there is not so much.
    """
    if not any(gib):
        yield
        return
    command = [sys.executable, "-m", "benchmarks.runner.memory_hog", *map(str, gib)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != READY:
            said = process.communicate()[1].strip().splitlines()
            raise MemoryHogError(f"{' and '.join(map(str, gib))} GiB of GPU memory are not free: {''.join(said[-1:])}")
        yield
    finally:
        process.communicate()  # its input ends


def main(gib: Sequence[float]) -> None:
    """Allocate so many GiB on each GPU and keep them until stdin ends."""
    import torch

    taken = [
        torch.empty(int(each * 2**30), dtype=torch.uint8, device=f"cuda:{at}") for at, each in enumerate(gib) if each
    ]
    for tensor in taken:
        torch.cuda.synchronize(tensor.device)
    print(READY, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main([float(word) for word in sys.argv[1:]])
