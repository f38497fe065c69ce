"""Starts the ranks of a run as torchrun does, and ends a failed run with one paragraph instead of torchrun's report.

    python -m megatron.swap.cli.launch --standalone --nproc-per-node 2 pretrain_gpt_swap.py ...

takes torchrun's arguments. The exit status is not 0 if a rank fails.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.swap.common.failures import REPORTED

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def main(arguments: list[str] | None = None) -> int:
    """Run torchrun and return its exit status.

    Args:
        arguments: torchrun's command line after the program's name; `None`: that of this process.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    os.environ[REPORTED] = "1"
    # It logs which process failed, and that it stops the others: the paragraph says so too.
    for name in ("multiprocessing.api", "agent.server.api", "multiprocessing.errors.error_handler"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        torchrun(arguments)
    except ChildFailedError as failed:
        print(f"\nerror: {paragraph(failed.failures)}", file=sys.stderr, flush=True)
        return 1
    return 0


def paragraph(failures: Mapping[int, ProcessFailure]) -> str:
    """Return what ended a run.

    A rank that fails takes others with it: their connections break, and torchrun ends those that still run. So a
    message of ours counts before any exception, an exception before a rank that was ended, and among equals the first.

    Args:
        failures: by rank, at least one.
    """
    rank, failure = min(failures.items(), key=lambda item: _order(item[1]))
    words, extra = _recorded(failure)
    if words is None:
        return _unrecorded(rank, failure)
    if not extra["is_known"]:
        return f"rank {rank} ended with {words}\nIts traceback is above."
    is_of_all = len(failures) > 1 and all(_recorded(other)[0] == words for other in failures.values())
    return words if is_of_all else f"rank {rank}: {words}"


def _recorded(failure: ProcessFailure) -> tuple[str | None, dict[str, Any]]:
    """Return the paragraph that a rank has left, and what is known of it; `None`: it has left none of ours."""
    message = failure.error_file_data.get("message")
    if not isinstance(message, dict) or "is_known" not in message.get("extraInfo", {}):
        return None, {}
    return message["message"], message["extraInfo"]


def _order(failure: ProcessFailure) -> tuple[bool, bool, float]:
    _, extra = _recorded(failure)
    was_ended = failure.exitcode == -signal.SIGTERM
    return not extra.get("is_known", False), was_ended, extra.get("time_s", failure.timestamp)


def _unrecorded(rank: int, failure: ProcessFailure) -> str:
    if failure.exitcode == -signal.SIGKILL:
        return (
            f"rank {rank} was killed (SIGKILL). Most often the system does so because memory is short: see `dmesg`, "
            "or the memory that your job may take. Use fewer ranks, a smaller --micro-batch-size or a smaller model."
        )
    if failure.exitcode < 0:
        return f"rank {rank} was ended by {failure.signal_name()}. What it printed is above."
    return f"rank {rank} ended with exit status {failure.exitcode}. What it printed is above."


if __name__ == "__main__":
    sys.exit(main())
