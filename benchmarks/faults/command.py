"""Plants the faults of ``definitions/`` one at a time and reports which ones the tests catch.

Each fault is planted in a copy of the tree. The tests of its room run there, then a few that compare whole training
runs. A control run of each room, without a fault, comes first: it must pass well within the time limit, so that a fault
whose tests do not end counts as caught. Not part of CI: it takes about an hour on two cores.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.faults.catalog import Fault, Room, load_rooms, select
from benchmarks.faults.trial import CAUGHT, MISSED, TIMEOUT, Outcome, run_trial
from benchmarks.machine import ROOT, facts, now
from benchmarks.rows import Row, RowError
from benchmarks.store import ResultStore, StoreError, locked
from benchmarks.suites.toml_file import SuiteError, check_names
from megatron.swap.common.records import write_text

PASSED = "passed"
MAX_CONTROL_FRACTION = 0.75
"""A control run may take this fraction of the time limit. It runs all tests; most faults fail one of the first."""
SHARED = ("commit", "versions", "machine", "command")


def check_fault_row(row: Row, where: str = "row") -> None:
    if not {"id", "room", "kind", "outcome", "digest", *SHARED} <= row.keys():
        raise RowError(f"{where}: not the result of a fault")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--output", type=Path, help="result file, one JSON object a line; without it only printed")
    parser.add_argument("--resume", action="store_true", help="continue --output; skip faults with a result")
    parser.add_argument("--json", type=Path, help="also write all results as one JSON document, for docs/results")
    parser.add_argument("--only", nargs="+", default=[], metavar="ID", help="run these faults, again if need be")
    parser.add_argument("--room", nargs="+", default=[], metavar="NAME", help="run the faults of these rooms alone")
    parser.add_argument("--list", action="store_true", help="print the faults and end")
    parser.add_argument("--jobs", type=int, default=1, help="faults that run at the same time (default 1)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for the tests of one fault (default 120)")
    parser.add_argument("--least-caught", type=float, default=0.85, metavar="FRACTION",
                        help="exit with status 1 if fewer are caught (default 0.85)")  # fmt: skip
    arguments = parser.parse_args(argv)
    if arguments.jobs < 1 or arguments.timeout <= 0 or not 0 <= arguments.least_caught <= 1:
        parser.error("--jobs is at least 1, --timeout above 0, --least-caught from 0 to 1")
    if arguments.resume and arguments.output is None:
        parser.error("--resume needs --output")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        rooms = load_rooms()
        check_names("--room", arguments.room, [room.name for room in rooms])
        rooms = [room for room in rooms if not arguments.room or room.name in arguments.room]
        pairs = select(rooms, arguments.only)
        for _, fault in pairs:
            fault.planted(ROOT)  # refuse before the first run
        if arguments.list:
            for room, fault in pairs:
                print(f"{room.name:10} {fault.id:40} {fault.why}")
            print(f"{len(pairs)} faults")
            return 0
        return _run(arguments, rooms, pairs)
    except (SuiteError, StoreError, RowError) as error:
        print(error, file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace, rooms: Sequence[Room], pairs: Sequence[tuple[Room, Fault]]) -> int:
    with ExitStack() as stack:
        if arguments.output is not None:
            stack.enter_context(locked(arguments.output))
        store = ResultStore(arguments.output, resume=arguments.resume, check=check_fault_row)
        about = {key: value for key, value in facts().items() if key in ("versions", "machine", "commit")}
        of_rooms = f" --room {' '.join(arguments.room)}" if arguments.room else ""
        how = f"--jobs {arguments.jobs} --timeout {arguments.timeout:g}"
        about["command"] = f"python -m benchmarks.faults{of_rooms} {how}"
        done = set() if arguments.only else {row["digest"] for row in store.rows if row["kind"] == "fault"}
        todo = [(room, fault) for room, fault in pairs if fault.digest not in done]
        for room in rooms:
            of_room = [fault for one, fault in todo if one is room]
            controls = {(row["room"], row["commit"]) for row in store.rows if row["kind"] == "control"}
            if of_room and (room.name, about["commit"]) not in controls:
                _add(store, _control(room, arguments.timeout), about)
            for row in _faults(room, of_room, arguments):
                _add(store, row, about)
                where = f"{row['test']}  {row['error']}"
                print(f"{row['outcome']:8} {row['seconds']:6.1f} s  {row['id']}  {where}", flush=True)
    digests = {fault.digest for _, fault in pairs}
    if arguments.json is not None:
        write_text(arguments.json, json.dumps(document(store.rows), indent=1) + "\n")
    return report([row for row in store.rows if row["digest"] in digests], arguments.least_caught)


def document(rows: Sequence[Row]) -> dict[str, Any]:
    faults, controls = ([row for row in rows if row["kind"] == kind] for kind in ("fault", "control"))
    shared = [field for field in SHARED if all(row[field] == rows[0][field] for row in rows)]
    left_out = {*shared, "kind", "digest"}
    return {
        "what": "faults planted one at a time in a copy of the tree, and the first test that failed for each",
        "num_faults": len(faults),
        "num_caught": sum(row["outcome"] in (CAUGHT, TIMEOUT) for row in faults),
        **{field: rows[0][field] for field in shared},
        "control_seconds": {row["room"]: row["seconds"] for row in controls},
        "faults": [{field: value for field, value in row.items() if field not in left_out} for row in faults],
    }


def report(rows: Sequence[Row], least_caught: float) -> int:
    """Print the fraction caught and the faults that were missed. Return 1 if fewer than ``least_caught``."""
    missed = [row for row in rows if row["outcome"] not in (CAUGHT, TIMEOUT)]
    fraction = 1 - len(missed) / max(1, len(rows))
    print(f"{len(rows) - len(missed)} of {len(rows)} faults caught ({fraction:.1%})")
    for row in missed:
        print(f"{row['outcome']}: {row['id']} ({row['file']}): {row['why']} {row['error']}")
    return int(fraction < least_caught)


def _control(room: Room, timeout_s: float) -> Row:
    outcome = run_trial(ROOT, None, room.all_tests(), timeout_s)
    if outcome.outcome != MISSED:
        raise SuiteError(f"{room.name}: without a fault its tests fail: {outcome}")
    if outcome.seconds > MAX_CONTROL_FRACTION * timeout_s:
        raise SuiteError(f"{room.name}: without a fault its tests take {outcome.seconds} s of {timeout_s:g} s")
    print(f"control  {outcome.seconds:6.1f} s  {room.name}", flush=True)
    row = {"id": f"control {room.name}", "room": room.name, "kind": "control", "file": "", "why": "", "digest": ""}
    return {**row, "outcome": PASSED, "test": "", "error": "", "seconds": outcome.seconds}


def _faults(room: Room, faults: Sequence[Fault], arguments: argparse.Namespace) -> Iterator[Row]:
    with ThreadPoolExecutor(arguments.jobs) as threads:
        futures: dict[Future[Outcome], Fault] = {
            threads.submit(run_trial, ROOT, fault, room.tests_for(fault), arguments.timeout): fault for fault in faults
        }
        try:
            for future in as_completed(futures):
                fault = futures[future]
                yield {
                    "id": fault.id, "room": room.name, "kind": "fault", "file": fault.file, "why": fault.why,
                    "digest": fault.digest, **vars(future.result()),
                }  # fmt: skip
        finally:
            threads.shutdown(cancel_futures=True)


def _add(store: ResultStore, row: Row, about: dict[str, Any]) -> None:
    row = {**row, "date": now(), **about}
    store.replace([*(one for one in store.rows if one["id"] != row["id"]), row])
