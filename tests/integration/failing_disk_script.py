"""The trainer, on a disk that fails after a number of micro-batches, as the last flag says.

``--writes-fail-behind 8``, ``--reads-fail-behind 8``: all of them do.
``--killed-behind 8``: the process is killed when a part of such a write is done.
``--slow-behind 8``: a read or write takes up to 20 ms longer, so that it ends behind others that began later.
"""

import errno
import os
import random
import signal
import sys
import time
from typing import Any

import pretrain_gpt_swap as program
from megatron.swap.memory.disk_file import BLOCK_BYTES

if __name__ == "__main__":
    most, what = int(sys.argv.pop()), sys.argv.pop()
    assert what in ("--writes-fail-behind", "--reads-fail-behind", "--killed-behind", "--slow-behind")
    get_batch, read, write = program.get_batch, os.preadv, os.pwritev
    delays = random.Random(0)
    num_batches = num_slow = 0

    def counted(*arguments: Any) -> Any:
        global num_batches
        num_batches += 1
        return get_batch(*arguments)

    def happens(kind: str, error: int) -> None:
        global num_slow
        if num_batches >= most and what == f"--{kind}-fail-behind":
            raise OSError(error, os.strerror(error))
        if num_batches >= most and what == "--slow-behind":
            num_slow += 1
            time.sleep(0.02 * delays.random())

    def read_until_then(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        happens("reads", errno.EIO)
        return read(descriptor, buffers, offset)

    def write_until_then(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        happens("writes", errno.ENOSPC)
        if num_batches >= most and what == "--killed-behind":
            write(descriptor, [buffers[0][:BLOCK_BYTES]], offset)
            print("killed in a write", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(descriptor, buffers, offset)

    program.get_batch, os.preadv, os.pwritev = counted, read_until_then, write_until_then
    program.prepare(sys.argv)
    program.main()
    if num_slow:
        print(f"{num_slow} reads and writes were slow", flush=True)
