"""The trainer, on a disk that takes no more writes once there is a checkpoint."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pretrain_gpt_swap as program

if __name__ == "__main__":
    write = os.pwritev

    def write_until_then(*arguments: Any) -> int:
        if Path("checkpoint/latest_checkpointed_iteration.txt").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    os.pwritev = write_until_then
    program.prepare(sys.argv)
    program.main()
