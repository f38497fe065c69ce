"""A second program that takes GPU memory away from a measured run.

`python -m benchmarks.runner.memory_hog GIB [GIB ...]` allocates this much on each GPU, prints `ready`, and keeps the
memory until its input ends, so that it never outlives its parent process.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.machine import ROOT

READY = "ready"


class MemoryHogError(Exception):
    """The GPUs have too little free memory."""


@contextmanager
def memory_hog(gib: Sequence[float]) -> Iterator[None]:
    """Hold GiB of the first GPU, the second GPU, and so on, in another process while the block runs."""
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
    import torch

    sizes = {f"cuda:{at}": int(each * 2**30) for at, each in enumerate(gib) if each}
    tensors = [torch.empty(size, dtype=torch.uint8, device=device) for device, size in sizes.items()]
    for tensor in tensors:
        torch.cuda.synchronize(tensor.device)
    print(READY, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main([float(word) for word in sys.argv[1:]])
