"""How much of a fuzz runs: all of it, or what the short run of ``tests/run.sh`` has time for."""

from __future__ import annotations

import os

IS_SHORT = os.environ.get("SWAP_TESTS") == "short"
"""Set by ``tests/run.sh`` unless it is told ``--all`` or which tests to run."""


def sized(full: int, short: int | None = None) -> int:
    """Number of examples, seeds or seconds; in the short run a quarter of it, or ``short``."""
    if not IS_SHORT:
        return full
    return max(1, full // 4) if short is None else short
