"""What a rank does that lives on from run to run: it runs the program, again and again."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.swap.common.types import UsageError
from megatron.swap.run import run_device
from tests.fuzz.megatron_training import World, run_program
from tests.integration.watched_device import WatchedDevice

DIGESTS = "digests-{}.json"
"""The file in a run's directory with the digests of a rank's results: name → digest."""


def answering(rank: int, num_ranks: int, port: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that runs the program with the flags of a request.

    Errors are printed as a process of its own prints them. The world goes on behind refusals, which come before the
    model is built.
    """
    world = World(rank, num_ranks, port)
    run_device.EmulatedDevice = WatchedDevice  # type: ignore[misc]
    print_error = sys.excepthook

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        os.chdir(request["cwd"])
        sys.excepthook = print_error  # each process group wraps it once more
        try:
            record = run_program(world, request["argv"])
        except SystemExit as stop:
            if isinstance(stop.code, str):
                print(stop.code)
            return {"code": int(stop.code) if isinstance(stop.code, int) else 1}
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            return {"code": 1, "is_last": not isinstance(error, UsageError)}
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        Path(DIGESTS.format(rank)).write_text(json.dumps(record.leaves))
        return {"code": 0}

    return answer
