"""Where swapped bytes rest: pinned host memory (disk can follow: same contract, same tests)."""
