#!/usr/bin/env python3
"""Measure pinned host memory on this machine: how fast it is reserved, and how fast copies through it run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.pinned_memory import main

if __name__ == "__main__":
    sys.exit(main())
