"""What a rank of the fuzz's worlds does: it answers the seed of a case with the case's row."""

import importlib
import time
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def answering(kind: str, fault: str, rank: int, num_ranks: int, port: int) -> Callable[[Row], Row]:
    """Return the function that runs cases of a kind, with a defect of ``faults`` planted if one is named."""
    run = _runner(kind, rank, num_ranks, port)
    if fault:
        importlib.import_module("tests.fuzz.faults").plant(fault)

    def answer(request: Row) -> Row:
        began = time.monotonic()
        row = run(request["seed"])
        row["seconds"] = round(time.monotonic() - began, 2)
        if row["outcome"] in ("different", "failed") or "restart" in row:
            row["is_last"] = True
        return row

    return answer


def _runner(kind: str, rank: int, num_ranks: int, port: int) -> Callable[[int], Row]:
    if kind != "megatron":
        run_seed: Callable[[int], Row] = importlib.import_module(
            {"modules": "tests.fuzz.module_case", "impure": "tests.fuzz.impure_case"}[kind]
        ).run_seed
        return run_seed
    from tests.fuzz.megatron_case import megatron_case
    from tests.fuzz.megatron_pair import run_case
    from tests.fuzz.megatron_training import World

    world = World(rank, num_ranks, port)
    return lambda seed: run_case(world, megatron_case(seed, num_ranks))
