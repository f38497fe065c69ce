"""Lines that a run prints, on the way and at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.swap.common.log import logger
from megatron.swap.common.spelling import INSTALL
from megatron.swap.patches import registry
from megatron.swap.patches.finish import finish_patch


class Console:
    """Lines beside those of Megatron's trainer, on standard output, unless ``--swap-log-level quiet``.

    Args:
        log_level: one of ``LOG_LEVELS``.
        rank: of this process in the run.
        world_size: number of ranks.
    """

    def __init__(self, log_level: str, rank: int, world_size: int) -> None:
        self.is_quiet = log_level == "quiet"
        self.rank = rank
        self._of_rank = f" (rank {rank})" if world_size > 1 else ""

    @property
    def is_first(self) -> bool:
        """Whether this rank prints the lines that are the same on all ranks."""
        return self.rank == 0 and not self.is_quiet

    def say(self, line: str) -> None:
        """Print a line that is the same on all ranks, on the first rank only."""
        if self.is_first:
            self._tell("", line)

    def say_here(self, lines: Sequence[str]) -> None:
        """Print lines about this rank."""
        for line in () if self.is_quiet else lines:
            self._tell(self._of_rank, line)

    def _tell(self, of_rank: str, line: str) -> None:
        print(f" swap{of_rank}: {line}", flush=True)


class LogConsole(Console):
    """The same lines in the logger: a program that calls ``install`` owns its standard output."""

    def _tell(self, of_rank: str, line: str) -> None:
        logger.info("%s", INSTALL(f"{of_rank} {line}".lstrip()))


def print_at_end(lines: Sequence[str], *, has_ended: bool) -> None:
    """Print ``lines`` when Megatron has printed its last line. Every rank must call this, with or without lines.

    Args:
        has_ended: Megatron's trainer prints nothing more.
    """

    def end() -> None:
        patches.revert()
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            torch.distributed.barrier()  # the last rank prints the evaluation
        _print(lines)

    if has_ended:
        return _print(lines)
    try:
        patches = registry.apply([finish_patch(end)])
    except registry.PatchError:  # another upstream, or a trainer that ran before and was not ended: print it here
        _print(lines)


def _print(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, flush=True)
