"""The trainer, on a disk that fails all writes after a number of micro-batches: ``--fails-behind 8``, as the last flag.

``--killed-behind 8``: the process is killed when a part of such a write is done.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import Any

import pretrain_gpt_swap as program
from megatron.swap.memory.disk_file import BLOCK_BYTES

if __name__ == "__main__":
    most = int(sys.argv.pop())
    what = sys.argv.pop()
    assert what in ("--fails-behind", "--killed-behind")
    get_batch, write = program.get_batch, os.pwritev
    num_batches = 0

    def counted(*arguments: Any) -> Any:
        global num_batches
        num_batches += 1
        return get_batch(*arguments)

    def write_until_then(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if num_batches < most:
            return write(descriptor, buffers, offset)
        if what == "--killed-behind":
            write(descriptor, [buffers[0][:BLOCK_BYTES]], offset)
            print("killed in a write", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    program.get_batch, os.pwritev = counted, write_until_then
    program.prepare(sys.argv)
    program.main()
