"""``python -m tests.fuzz``: train random models with and without swapping, and compare them to the bit.

::

    python -m tests.fuzz --seed 17                                  one Megatron model, with all that is known of it
    python -m tests.fuzz --count 1000 --rows FILE.jsonl             a thousand; goes on where FILE ends
    python -m tests.fuzz --ranks 2 --count 100 --rows FILE.jsonl    over gloo
    python -m tests.fuzz --kind modules --count 1000 --rows FILE    swap.activations
    python -m tests.fuzz --kind impure --count 1000 --rows FILE     layers that are no pure functions, with a budget
    python -m tests.fuzz --fault NAME --count 50                    with a defect planted, until a case finds it
    python -m tests.fuzz --result docs/results/fuzz.json --rows FILE …   the result file from rows
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.fuzz.pool import BAD, Pool
from tests.fuzz.report import summary, table
from tests.integration.harness import Zygote


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--kind", choices=("megatron", "modules", "impure"), default="megatron")
    parser.add_argument("--ranks", type=int, default=1, help="processes of a case, over gloo")
    parser.add_argument("--seed", type=int, help="run this case alone, and print all that is known of it")
    parser.add_argument("--first", type=int, default=0, help="first seed of a run")
    parser.add_argument("--count", type=int, default=100, help="number of seeds")
    parser.add_argument("--rows", type=Path, nargs="+", help="append rows here; seeds that have one are not run again")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a case hangs")
    parser.add_argument("--fault", default="", help="plant this defect of tests/fuzz/faults.py")
    parser.add_argument("--result", type=Path, help="write the result file from --rows, and run nothing")
    asked = parser.parse_args()
    if asked.result is not None:
        asked.result.write_text(json.dumps(summary(read(asked.rows)), indent=1) + "\n")
        return 0
    with Zygote() as zygote, Pool(zygote, asked.kind, asked.ranks, asked.timeout, asked.fault) as pool:
        if asked.seed is not None:
            row = pool.run(asked.seed)
            print(described(row))
            return int(row["outcome"] in BAD)
        return many(pool, asked)


def many(pool: Pool, asked: argparse.Namespace) -> int:
    rows, began = [], time.monotonic()
    path = asked.rows[0] if asked.rows else None
    done = {row["seed"] for row in read([path]) if (row["kind"], row["ranks"]) == (asked.kind, asked.ranks)}
    for seed in range(asked.first, asked.first + asked.count):
        if seed in done:
            continue
        rows.append(row := pool.run(seed))
        if path is not None:
            with path.open("a") as file:
                print(json.dumps(row), file=file)
        if row["outcome"] in BAD:
            print(described(row), flush=True)
            if asked.fault:
                break
    print(table(rows), f"\n{time.monotonic() - began:.0f} s")
    return int(any(row["outcome"] in BAD for row in rows))


def described(row: dict[str, Any]) -> str:
    """Return the case of a row in words, its outcome, the first difference, and how to run it again."""
    lines = [f"{row['kind']}, {row['ranks']} rank(s), seed {row['seed']}: {row['outcome']}"]
    lines += [str(row[key]) for key in ("error", "trace") if row.get(key)]
    lines.append("case: " + json.dumps(row.get("case") or case_of(row), indent=1, default=str))
    lines.append(f"figures: {row.get('figures')}")
    lines.append(f"again: python -m tests.fuzz --kind {row['kind']} --ranks {row['ranks']} --seed {row['seed']}")
    return "\n".join(lines)


def case_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the case of a row whose process did not live to describe it."""
    if row["kind"] != "megatron":
        return {}
    from tests.fuzz.megatron_case import megatron_case

    return vars(megatron_case(row["seed"], row["ranks"]))


def read(paths: list[Path | None] | None) -> list[dict[str, Any]]:
    """Return the rows of files; a file that is not there has none."""
    texts = [path.read_text() for path in paths or () if path is not None and path.exists()]
    return [json.loads(line) for text in texts for line in text.splitlines()]


if __name__ == "__main__":
    sys.exit(main())
