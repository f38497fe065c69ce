"""Imports Megatron once and forks all processes that tests train in: a fork takes 0.1 s, an import 5 s.

``Zygote`` starts this program and writes requests, one JSON object a line. The answer is one line.

- ``{"program": …}``: fork a trainer for this run. The answer: the exit codes of its ranks.
- ``{"world": …}``: ask a world, which is forked at the first request and lives on. The answer: one object a rank.
- ``{"end": …}``: end a world.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import runpy
import signal
import sys
import time
from multiprocessing.connection import Connection
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
MOST_REQUESTS = 50
"""Requests of one world. Upstream's caches hold models of the past, and these hold process groups with threads."""
PATIENCE_S = 5.0
"""What the other ranks get once one has failed: they may wait for it in vain."""
Answer = dict[str, Any]


def log_to(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def child(request: dict[str, Any], env: dict[str, str]) -> int:
    os.environ.update(env)
    os.chdir(request["cwd"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log_to(request["log"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
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


def forked(function: Any) -> int:
    """Fork a process that ends with the exit code of ``function``, and return its id."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nothing outlives the zygote
        code = 1
        try:
            code = function()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    return pid


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def run(request: dict[str, Any]) -> list[int]:
    """Return the exit codes of all ranks. If one fails, or time is up, the others are stopped."""
    running = {forked(functools.partial(child, request, env)): rank for rank, env in enumerate(request["ranks"])}
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
    for pid in pids:
        kill(pid)
    for pid in running:
        os.waitpid(pid, 0)
    return codes


class World:
    """Ranks that live on from request to request. Each calls ``main`` (``module:function``) with ``options``, its rank,
    the number of ranks and the port of their store: this returns the function that answers requests."""

    def __init__(self, main: str, options: dict[str, Any], num_ranks: int, port: int) -> None:
        self.num_requests = 0
        self._pids: list[int] = []
        self._pipes: list[Connection] = []
        for rank in range(num_ranks):
            mine, theirs = multiprocessing.Pipe()
            self._pids.append(forked(lambda rank=rank, pipe=theirs: live(pipe, main, options, rank, num_ranks, port)))
            theirs.close()
            self._pipes.append(mine)

    def ask(self, request: dict[str, Any], timeout_s: float) -> list[Answer]:
        """Return the answers of all ranks. A rank that died or has not answered in time says so in ``outcome``."""
        self.num_requests += 1
        answers: dict[int, Answer] = {}
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(request)
        deadline = time.monotonic() + timeout_s + 1.0  # the ranks dump their stacks first
        while waiting := [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]:
            ready = multiprocessing.connection.wait(waiting, deadline - time.monotonic())
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                answers[rank] = self._answer(rank)
                if answers[rank].get("is_last"):
                    deadline = min(deadline, time.monotonic() + PATIENCE_S)
        hung = {"outcome": "hung", "error": "no answer in time", "is_last": True}
        return [answers.get(rank, hung) for rank in range(len(self._pipes))]

    def _answer(self, rank: int) -> Answer:
        try:
            return dict(self._pipes[rank].recv())
        except (EOFError, ConnectionResetError):
            code = os.waitstatus_to_exitcode(os.waitpid(self._pids[rank], 0)[1])
            self._pids[rank] = 0
            return {"outcome": "died", "error": f"exit status {code}", "is_last": True}

    def end(self) -> None:
        for pid in filter(None, self._pids):
            kill(pid)
            os.waitpid(pid, 0)
        for pipe in self._pipes:
            pipe.close()


def live(pipe: Connection, main: str, options: dict[str, Any], rank: int, num_ranks: int, port: int) -> int:
    """Answer requests until the zygote ends this rank. An answer with ``is_last`` ends the world."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    answer = None
    while True:
        request = pipe.recv()
        log_to(request["log"])
        faulthandler.dump_traceback_later(request["timeout_s"])
        if answer is None:
            module, _, name = main.partition(":")
            answering = getattr(importlib.import_module(module), name)
            answer = answering(**options, rank=rank, num_ranks=num_ranks, port=port)
            gc.collect()
            gc.freeze()
        pipe.send(answer(request))
        faulthandler.cancel_dump_traceback_later()


class Worlds:
    """All worlds of a zygote, by what their requests call ``world``."""

    def __init__(self) -> None:
        self._worlds: dict[str, World] = {}

    def ask(self, request: dict[str, Any]) -> list[Answer]:
        name = json.dumps(request["world"])
        if name not in self._worlds:
            self._worlds[name] = World(**request["world"], port=request["port"])
        world = self._worlds[name]
        answers = world.ask(request, request["timeout_s"])
        if world.num_requests == MOST_REQUESTS or any(answer.get("is_last") for answer in answers):
            self.end(request["world"])
        return answers

    def end(self, name: dict[str, Any]) -> None:
        world = self._worlds.pop(json.dumps(name), None)
        if world is not None:
            world.end()


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
    worlds = Worlds()
    for line in sys.stdin:
        request = json.loads(line)
        if "end" in request:
            answer: Any = worlds.end(request["end"])
        else:
            answer = worlds.ask(request) if "world" in request else run(request)
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
