#!/usr/bin/env python3
"""Build the pages on benchmarks from docs/results alone.

    python tools/report.py            write docs/benchmarks.md, and the appendix and pictures in docs/benchmarks
    python tools/report.py --check    write nothing; exit status 1 if a page or a picture and the results disagree

Exit status 2: the results cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.report.build import build, check  # noqa: E402
from benchmarks.rows import RowError  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results", help="folder of results")
    parser.add_argument("--output", type=Path, default=ROOT / "docs", help="folder of the pages")
    options = parser.parse_args()
    try:
        if not options.check:
            for path in build(options.results, options.output):
                print(path)
            return 0
        differences = check(options.results, options.output)
    except (RowError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(differences) or "the pages match the results")
    if differences:
        print("\nRebuild them: python tools/report.py")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
