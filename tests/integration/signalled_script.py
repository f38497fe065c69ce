"""The trainer, which gets a signal: the last two flags say which one, and in which micro-batch.

``SIGTERM 10``: in micro-batch 10; ``SIGTERM 10:1``: rank 1 alone does.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pretrain_gpt_swap as program

if __name__ == "__main__":
    when, _, of_rank = sys.argv.pop().partition(":")
    name = sys.argv.pop()
    get_batch, num_batches = program.get_batch, 0

    def counted(*arguments: Any) -> Any:
        global num_batches
        num_batches += 1
        if when == f"{num_batches}" and of_rank in ("", os.environ["RANK"]):
            os.kill(os.getpid(), getattr(signal, name))
        return get_batch(*arguments)

    program.get_batch = counted
    program.prepare(sys.argv)
    program.main()
