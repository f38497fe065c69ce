"""Lines that a run prints, on the way and at the end."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from megatron.swap.common.collectives import rank_and_world_size
from megatron.swap.common.log import logger
from megatron.swap.common.spelling import Spelling
from megatron.swap.common.types import UsageError


class Console:
    """Lines beside those of Megatron's trainer, on standard output, unless ``--swap-log-level quiet``."""

    def __init__(self, log_level: str, rank: int, world_size: int) -> None:
        self.is_quiet = log_level == "quiet"
        self.rank = rank
        self._of_rank = f" (rank {rank})" if world_size > 1 else ""

    def errors(self) -> AbstractContextManager[None]:
        """Return a context in which errors have the spelling of the call that began the run."""
        return nullcontext()

    def say(self, line: str) -> None:
        """Print a line that is the same on all ranks, on the first rank only."""
        if self.rank == 0 and not self.is_quiet:
            self._tell("", line)

    def say_here(self, lines: Sequence[str]) -> None:
        """Print lines about this rank."""
        for line in () if self.is_quiet else lines:
            self._tell(self._of_rank, line)

    def _tell(self, of_rank: str, line: str) -> None:
        print(f" swap{of_rank}: {line}", flush=True)


class LogConsole(Console):
    """The same lines in the spelling of a call, by default for the logger: a program owns its standard output."""

    def __init__(self, spelling: Spelling, log: Callable[[str], None] | None = None, log_level: str = "info") -> None:
        super().__init__(log_level, *rank_and_world_size())
        if log is not None and not callable(log):
            raise UsageError(f"log {log!r}: must be a function that takes a line.")
        self._spelling = spelling
        self._log = log or logger.info

    def errors(self) -> AbstractContextManager[None]:
        return self._spelling.errors()

    def _tell(self, of_rank: str, line: str) -> None:
        self._log(self._spelling(f"{of_rank} {line}".lstrip()))
