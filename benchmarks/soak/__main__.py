"""``python -m benchmarks.soak``: see ``command``."""

from benchmarks.soak.command import main

if __name__ == "__main__":
    raise SystemExit(main())
