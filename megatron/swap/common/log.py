"""The logger of this package's own lines: ``megatron.swap``.

Standard output belongs to the program that trains. Lines at INFO are worth reading: without handlers of the program
they go to standard error, where logging alone would print warnings only.
"""

import logging
import sys

logger = logging.getLogger("megatron.swap")


class _StandardError(logging.StreamHandler):  # Python 3.10 takes no type of stream
    """Prints the lines that no other handler gets."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter(" swap: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        above = logger.parent if logger.propagate else None
        if logger.handlers == [self] and (above is None or not above.hasHandlers()):
            self.setStream(sys.stderr)  # the present one: programs replace it
            super().emit(record)


if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)
logger.addHandler(_StandardError())
