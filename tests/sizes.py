"""How much runs: what the short run of ``tests/run.sh`` has time for, what ``--all`` has time for, or everything."""

import os

SIZE = os.environ.get("SWAP_TESTS", "nightly")
"""Set by ``tests/run.sh``: ``short``, ``all``, or ``nightly`` if it is told so or which tests to run."""
IS_SHORT = SIZE == "short"
IS_NIGHTLY = SIZE == "nightly"


def sized(full: int, short: int | None = None, nightly: int | None = None) -> int:
    """Return a number of examples, seeds or seconds: ``full``, in the short run a quarter of it, or ``short``."""
    if IS_SHORT:
        return max(1, full // 4) if short is None else short
    return nightly if IS_NIGHTLY and nightly is not None else full
