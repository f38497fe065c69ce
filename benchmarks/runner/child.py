"""The process of one measured run: `python -m benchmarks.runner.child REQUEST RESULT [CHANNEL]`.

The process imports everything without touching the GPU, and then waits for `go` on its standard input. It can
therefore be started while another run is still measured. After the first step it waits for `time`, which the parent
sends when no other process is importing. CHANNEL is the file descriptor to which it writes the stages that it has
reached. Without CHANNEL (several ranks, started by torchrun) it does not wait.
"""

import contextlib
import functools
import importlib
import json
import os
import pickle
import pkgutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from benchmarks.runner.request import Request
from benchmarks.runner.schedule import cut, length_at
from benchmarks.runner.stopwatch import EnoughSteps, Stopwatch

PRELOADED = (
    "torch.utils.tensorboard", "megatron.training.training", "megatron.training.argument_utils",
    "megatron.training.models.gpt", "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.blended_megatron_dataset_builder", "megatron.swap.trainer.session",
)  # fmt: skip


class Channel:
    """The channel to the parent process. Without a descriptor nothing is written or waited for."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    @property
    def is_open(self) -> bool:
        return self._descriptor is not None

    def report(self, stage: str) -> None:
        if self._descriptor is not None:
            os.write(self._descriptor, f"{stage}\n".encode())

    def await_word(self, word: str) -> None:
        """Wait for one line on the standard input; any other line ends the process.

        There is no timeout: the run before may last as long as its suite allows. When the parent ends, in whatever
        way, the input is closed, which ends the wait.
        """
        if self._descriptor is None:
            return
        heard = b""
        # Unbuffered: Python's buffer could take the next line too.
        while not heard.endswith(b"\n") and (byte := os.read(0, 1)):
            heard += byte
        if heard != f"{word}\n".encode():
            sys.exit(f"waited for {word!r} on the standard input, heard {heard!r}")


def main() -> None:
    request: Request = pickle.loads(Path(sys.argv[1]).read_bytes())
    result_path = Path(sys.argv[2])
    channel = Channel(int(sys.argv[3]) if len(sys.argv) > 3 else None)
    with tempfile.TemporaryDirectory(dir=result_path.parent) as folder:
        summary = Path(folder) / "summary.json"
        more = ["--swap-summary", str(summary)] if request.has_summary or request.observes else []
        sys.argv = ["pretrain_gpt_swap.py", *request.flags, *more]
        import torch

        import pretrain_gpt_swap
        from megatron.swap.trainer.prepare import prepare

        prepare(sys.argv)  # before Megatron is imported
        for name in (*PRELOADED, *request.requires):
            importlib.import_module(name)
        watch = Stopwatch(request, channel, pkgutil.resolve_name(request.wrap) if request.wrap else None)
        _install_stopwatch(watch)
        if request.sequence_schedule:
            cut(pretrain_gpt_swap, lambda: length_at(request.sequence_schedule, watch.step))
        watch.began_cuda = torch.cuda.is_initialized()
        channel.report("ready")
        channel.await_word("go")
        watch.start()
        with contextlib.suppress(EnoughSteps):
            pretrain_gpt_swap.main()
        result = watch.result(summary)
        if os.environ.get("RANK", "0") == "0":
            result_path.write_text(json.dumps(result))
        channel.report("done")
    if channel.is_open:
        leave(0)


def _install_stopwatch(watch: Stopwatch) -> None:
    from megatron.swap.trainer.session import SwapSession

    install = SwapSession.install

    @functools.wraps(install)
    def install_and_watch(args: Any, model_config: Any = None) -> SwapSession:
        session = install(args, model_config)
        watch.before_model(args, session)
        model_config.pre_wrap_hooks.append(watch.attach)
        return session

    SwapSession.install = install_and_watch  # type: ignore[method-assign, assignment]


def leave(code: int) -> None:
    """End the process at once: an orderly shutdown of CUDA, process groups and pinned memory takes up to a minute."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        main()
    except SystemExit as stop:
        if stop.code is not None and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
        if stop.code:
            leave(stop.code if isinstance(stop.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        leave(1)
