"""``python -m benchmarks.faults``: see ``command``."""

from benchmarks.faults.command import main

if __name__ == "__main__":
    raise SystemExit(main())
