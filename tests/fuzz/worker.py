"""One rank of a world that lives on for many cases. It reads a case a line, as JSON, and answers with its row.

``python -m tests.fuzz.worker --kind megatron --rank 0 --ranks 1 --port 0``
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True, choices=("megatron", "modules", "impure"))
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--fault", default="")
    asked = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Megatron prints a lot
    run = _runner(asked)
    if asked.fault:
        importlib.import_module("tests.fuzz.faults").plant(asked.fault)
    gc.collect()
    gc.freeze()
    print(json.dumps({"ready": asked.rank}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        faulthandler.dump_traceback_later(request["timeout_s"])
        began = time.monotonic()
        row = run(request["seed"])
        row["seconds"] = round(time.monotonic() - began, 2)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(row), file=answers)


def _runner(asked: argparse.Namespace) -> Any:
    if asked.kind == "modules":
        from tests.fuzz.module_case import run_seed

        return run_seed
    if asked.kind == "impure":
        from tests.fuzz.impure_case import run_seed as run_impure

        return run_impure
    import torch

    from tests.fuzz.megatron_case import megatron_case
    from tests.fuzz.megatron_pair import run_case
    from tests.fuzz.megatron_training import World

    if asked.ranks == 1:
        store = torch.distributed.HashStore()
    else:
        store = torch.distributed.TCPStore("127.0.0.1", asked.port, asked.ranks, is_master=asked.rank == 0)
    world = World(store, asked.rank, asked.ranks)
    return lambda seed: run_case(world, megatron_case(seed, asked.ranks))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
