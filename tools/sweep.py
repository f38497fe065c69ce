#!/usr/bin/env python3
"""Find the largest GPT, the longest sequence or the largest micro-batch that each method trains on this machine."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.sweeps.command import main

if __name__ == "__main__":
    sys.exit(main())
