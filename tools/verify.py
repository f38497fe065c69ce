#!/usr/bin/env python3
"""Verify the README's statements on a GPU: bit-identical results, and the cost of swapping."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.verify import main

if __name__ == "__main__":
    sys.exit(main())
