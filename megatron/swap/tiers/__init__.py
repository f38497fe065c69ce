"""Where swapped bytes rest: pinned host memory, a disk behind it. Same contract, same tests."""
