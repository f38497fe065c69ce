"""Start the processes of measured runs, direct them, and collect their outcomes."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.machine import ROOT, host_used_bytes
from benchmarks.rows import GIB
from benchmarks.runner.outcome import STAGES, TIMED_OUT, classify, tail
from benchmarks.runner.request import Request
from megatron.swap.common.leftovers import own_folder

POLL_S = 0.1
READY_S = 180.0
GPU_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
# The CPU path does not use the compiler, and more threads would compete for few cores.
CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
LONE_RANK = {  # port 0: the only rank serves the store itself, so any free port works
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}  # fmt: skip


@dataclass(frozen=True)
class Finished:
    outcome: str
    result: dict[str, Any]  # The measurements of the process; empty unless the outcome is `ok`
    output_tail: str


class Child:
    """The process of one run. It imports at once and trains after `say("go")`; leaving the context ends it."""

    def __init__(self, request: Request, *, on_gpu: bool, num_ranks: int = 1) -> None:
        self.request = request
        self._closing = contextlib.ExitStack()
        folder, owner = self._closing.enter_context(own_folder("measured-run-"))
        (folder / "request").write_bytes(pickle.dumps(request))
        self._result, self._log = folder / "result.json", folder / "log"
        self._stage = "starting"
        self._unread = b""
        self._channel: int | None = None
        self._quiet_by = time.monotonic() + READY_S
        self._why_stopped = ""
        command = ["-m", "benchmarks.runner.child", str(folder / "request"), str(self._result)]
        passed: tuple[int, ...] = (owner,)  # while the run lives, nobody removes its folder
        env = {**(GPU_ENVIRONMENT if on_gpu else CPU_ENVIRONMENT), **os.environ, **request.env}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        if not on_gpu:
            env["CUDA_VISIBLE_DEVICES"] = ""
        if num_ranks == 1:
            env.update(LONE_RANK)
            self._channel, theirs = os.pipe()
            command.append(str(theirs))
            passed += (theirs,)
        else:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
            command = [*launcher, *command]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=log,
                stderr=subprocess.STDOUT, pass_fds=passed, start_new_session=True,
            )  # fmt: skip
        for descriptor in passed[1:]:
            os.close(descriptor)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def is_quiet(self) -> bool:
        """Return whether the process has finished its imports or has ended, so that it disturbs no measurement."""
        self._listen(0.0)
        if self._stage == "starting" and self._process.poll() is None and time.monotonic() > self._quiet_by:
            self._kill()
            self._why_stopped = f"\nstopped: it was still importing after {READY_S:g} s"
        return self._stage != "starting" or self._process.poll() is not None

    def say(self, word: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{word}\n".encode())
            self._process.stdin.flush()

    def finish(
        self, timeout_s: float, host_limit_gib: float | None = None, on_poll: Callable[[], None] = lambda: None
    ) -> Finished:
        """Wait for the end of the run; stop it at the time limit or the limit of host memory in use."""
        deadline = time.monotonic() + timeout_s
        code: int | None = None
        note = ""
        while code is None:
            on_poll()
            self._listen(POLL_S)
            code = self._process.poll()
            used_gib = host_used_bytes() / GIB if host_limit_gib is not None else 0.0
            if code is None and time.monotonic() > deadline:
                code, note = TIMED_OUT, f"\nstopped: not done after {timeout_s:g} s"
            elif code is None and host_limit_gib is not None and used_gib > host_limit_gib:
                code = -signal.SIGKILL
                note = f"\nstopped: {used_gib:.1f} GiB of host memory are in use, the suite allows {host_limit_gib:g}"
        self._kill()
        self._listen(0.0)
        output = self._log.read_text(errors="replace")
        stage = "done" if self._channel is None and self._result.exists() else self._stage
        # By the signal alone, a process that `is_quiet` stopped would look like one out of host memory.
        outcome = f"failed ({code})" if self._why_stopped else classify(code, output, stage, self.request.requires)
        result = json.loads(self._result.read_text()) if outcome == "ok" else {}
        return Finished(outcome, result, tail(output + note + self._why_stopped))

    def close(self) -> None:
        self._kill()
        if self._channel is not None:
            os.close(self._channel)
            self._channel = None
        self._closing.close()

    def _kill(self) -> None:
        """Kill the process and its children: data loaders would notice its end only after a while."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _listen(self, timeout_s: float) -> None:
        if self._channel is None:
            time.sleep(timeout_s)
            return
        readable, _, _ = select.select([self._channel], [], [], timeout_s)
        said = os.read(self._channel, 4096) if readable else b""
        if readable and not said:
            time.sleep(timeout_s)  # the process has closed its end and is about to end
        *words, self._unread = (self._unread + said).split(b"\n")
        for word in words:
            assert word.decode() in STAGES, f"the measured process said {word!r}"
            self._stage = word.decode()


def run(request: Request, *, on_gpu: bool, num_ranks: int = 1, timeout_s: float) -> Finished:
    with Child(request, on_gpu=on_gpu, num_ranks=num_ranks) as child:
        child.say("go")
        child.say("time")
        return child.finish(timeout_s)
