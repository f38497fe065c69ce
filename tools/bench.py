#!/usr/bin/env python3
"""Compare every way of saving activation memory: same model, data and seed, each run in a separate process."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.suites.command import main

if __name__ == "__main__":
    sys.exit(main())
