"""The trainer, to which something happens: the last two flags say what, and when.

``SIGTERM 10``: it gets this signal in micro-batch 10; ``SIGTERM 10:1``: rank 1 alone does. ``SIGKILL random:3``: at a
random moment, drawn from a seed. ``clock 10``: the clock of the wall jumps, by an hour forth and a day back in turn.
"""

import os
import random
import signal
import sys
import threading
import time
from typing import Any

import pretrain_gpt_swap as program

LONGEST_S = 1.5
"""The last random moment, after the first micro-batch began."""


def kill_later(seed: str) -> None:
    moment = random.Random(int(seed)).uniform(0.0, LONGEST_S)
    thread = threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL))
    thread.daemon = True
    thread.start()


def jump() -> None:
    """Let each reading of the wall's clock jump: only what is measured by it can notice."""
    read, count = time.time, 0

    def jumping() -> float:
        nonlocal count
        count += 1
        return read() + (3600.0 if count % 2 else -86400.0)

    time.time = jumping


if __name__ == "__main__":
    when, _, of_rank = sys.argv.pop().partition(":")
    what = sys.argv.pop()
    get_batch, num_batches = program.get_batch, 0
    is_chosen = when == "random" or of_rank in ("", os.environ["RANK"])

    def counted(*arguments: Any) -> Any:
        global num_batches
        num_batches += 1
        if when == "random" and num_batches == 1:
            kill_later(of_rank)
        elif when == f"{num_batches}" and what == "clock":
            jump()
        elif when == f"{num_batches}" and is_chosen:
            os.kill(os.getpid(), getattr(signal, what))
        return get_batch(*arguments)

    program.get_batch = counted
    program.prepare(sys.argv)
    program.main()
