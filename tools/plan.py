#!/usr/bin/env python3
"""Plan what to keep, swap and recompute: `megatron-swap plan`, from a checkout that need not be installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.swap.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))
