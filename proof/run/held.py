"""Another program on the GPUs: what it holds of their memory, a run there does not find.

``python -m proof.run.held GIB [GIB ...]`` takes so much of each GPU, says so, and holds it until its input ends: so it
outlives nobody who started it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from proof.machine import ROOT

READY = "held"


class HeldError(Exception):
    """There is not so much."""


@contextmanager
def held(gib: Sequence[float]) -> Iterator[None]:
    """A process that holds so many GiB of the first GPU, of the second, and so on, as long as this lasts.

    Raises:
        HeldError: it cannot have them.
    """
    if not any(gib):
        yield
        return
    command = [sys.executable, "-m", "proof.run.held", *map(str, gib)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != READY:
            said = process.communicate()[1].strip().splitlines()
            raise HeldError(f"{' and '.join(map(str, gib))} GiB of GPU memory cannot be held: {''.join(said[-1:])}")
        yield
    finally:
        process.communicate()  # its input ends


def main(gib: Sequence[float]) -> None:
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
