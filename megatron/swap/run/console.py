"""Lines that a run prints, on the way and at the end."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.swap.common.log import logger
from megatron.swap.common.spelling import INSTALL


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
