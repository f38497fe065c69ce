"""The trainer, on a disk that takes no more writes behind so many micro-batches: ``--fails-behind 8``, at the end."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import pretrain_gpt_swap as program

if __name__ == "__main__":
    most = int(sys.argv.pop())
    assert sys.argv.pop() == "--fails-behind"
    get_batch, write = program.get_batch, os.pwritev
    num_batches = 0

    def counted(*arguments: Any) -> Any:
        global num_batches
        num_batches += 1
        return get_batch(*arguments)

    def write_until_then(*arguments: Any) -> int:
        if num_batches >= most:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    program.get_batch, os.pwritev = counted, write_until_then
    program.prepare(sys.argv)
    program.main()
