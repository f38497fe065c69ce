"""The trainer, in which the copies of one rank take ten times as long as those of the others: ``--slow-rank 1``."""

from __future__ import annotations

import os
import sys

import pretrain_gpt_swap as program

DELAY_MS = 0.5

if __name__ == "__main__":
    slow = sys.argv.pop()
    assert sys.argv.pop() == "--slow-rank"
    sys.argv += ["--swap-cpu-delay-ms", f"{DELAY_MS * (10 if os.environ['RANK'] == slow else 1)}"]
    program.prepare(sys.argv)
    program.main()
