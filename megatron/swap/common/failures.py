"""The last paragraph of a process that cannot go on: an error of ours alone, any other behind its traceback.

Under torchrun the paragraph is also written to the file that torchrun names for each rank, and quotes in its report.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torchrun: the file for this rank's error

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def report_errors(known: tuple[type[BaseException], ...]) -> None:
    """Let an exception that ends this process leave its paragraph, without the traceback if it is ``known``."""
    inner = sys.excepthook._inner if isinstance(sys.excepthook, _Reporter) else sys.excepthook
    sys.excepthook = _Reporter(inner, known)


class _Reporter:
    """The process's hook for uncaught exceptions, around the hook that prints tracebacks."""

    def __init__(self, inner: Hook, known: tuple[type[BaseException], ...]) -> None:
        self._inner = inner
        self._known = known

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_known = isinstance(error, self._known)
        words = str(error) if is_known else "".join(traceback.format_exception_only(kind, error)).strip()
        path = os.environ.get(ERROR_FILE)
        if path and not isinstance(error, KeyboardInterrupt):
            _write(Path(path), words)
        if is_known:
            print(f"\nerror: {words}", file=sys.stderr, flush=True)
        else:
            self._inner(kind, error, trace)


def _write(path: Path, words: str) -> None:
    """Write the paragraph in the form that torchrun reads; it prints ``py_callstack``."""
    extra = {"py_callstack": words, "timestamp": str(int(time.time()))}
    try:
        path.write_text(json.dumps({"message": {"message": words, "extraInfo": extra}}))
    except OSError as error:
        print(f"the error is not in torchrun's report: {error}", file=sys.stderr, flush=True)
