"""Imports Megatron once, and forks a trainer for each request: a run takes one second instead of five.

A request is one line of JSON on the standard input: program, argv, cwd, log, timeout_s, and for each rank its
environment. The answer is one line: the exit codes. Nothing of the program itself has run before the fork.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import json
import multiprocessing.context
import os
import runpy
import signal
import sys
import time
from typing import Any

PRELOADED = (
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "megatron.training.training",
    "megatron.training.argument_utils",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.tokenizers.text",  # transformers, where that is installed: half of a run
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.swap.trainer.session",
)


def child(request: dict[str, Any], env: dict[str, str]) -> int:
    """Run one rank as the interpreter runs a script, up to its exit code."""
    os.environ.update(env)
    os.chdir(request["cwd"])
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = [request["program"], *request["argv"]]
    # For a checkpoint in the format torch_dist, Megatron spawns a process that serves a queue. It imports torch again,
    # which takes longer than the run: here it is forked. The commands of pages that save checkpoints spawn it.
    contexts: Any = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["fork"]
    try:
        runpy.run_path(request["program"], run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def start(request: dict[str, Any], env: dict[str, str]) -> int:
    pid = os.fork()
    if pid == 0:
        os.setsid()
        code = 1
        try:
            code = child(request, env)
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    return pid


def serve(request: dict[str, Any]) -> list[int]:
    """Return the exit codes of all ranks. If one fails, or time is up, the others are stopped."""
    running = {start(request, env): rank for rank, env in enumerate(request["ranks"])}
    pids = list(running)
    codes = [-signal.SIGKILL] * len(pids)
    deadline = time.monotonic() + request["timeout_s"]
    while running and time.monotonic() < deadline:
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank = running.pop(pid)
                codes[rank] = os.waitstatus_to_exitcode(status)
                if codes[rank] != 0:
                    deadline = min(deadline, time.monotonic() + 2.0)
        time.sleep(0.01)
    for pid in pids:  # the rank and whatever it has started (processes that write checkpoints, say)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    for pid in running:
        os.waitpid(pid, 0)
    return codes


def remember_help_texts() -> None:
    """Read the help texts of Megatron's flags once, from its source: a fifth of a short run."""
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.arguments import add_megatron_arguments

    read = functools.cache(functools.partial(ArgumentGroupFactory._get_field_docstrings, ArgumentGroupFactory))
    ArgumentGroupFactory._get_field_docstrings = staticmethod(read)  # type: ignore[method-assign,assignment]
    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for name in PRELOADED:
        importlib.import_module(name)
    remember_help_texts()
    gc.freeze()  # no collection in a trainer looks at what was imported here, nor copies its pages
    for line in sys.stdin:
        answers.write(json.dumps(serve(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
