"""Runs the real trainer in separate processes, and compares the results of two runs to the bit."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.fuzz.records import Bits, Record, difference, leaves_of
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "pretrain_gpt_swap.py"

TINY = shlex.split(
    "--transformer-impl local --distributed-backend gloo --num-workers 0 "
    "--no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion "
    "--no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-bias-swiglu-fusion "
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 3 --log-interval 1 "
    "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-decay-iters 6 --clip-grad 1.0 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --eval-interval 1000 "
    "--no-create-attention-mask-in-dataloader"
)
# The host limit makes these tests independent of the memory that other programs take.
SWAP_SMALL = "--swap-min-mib 0.001 --swap-cpu-delay-ms 0.2 --swap-host-gib 0.5 --swap-host-unchecked"
CHECKED = {"MEGATRON_SWAP_PYTHON": sys.executable, "SWAP_CHECKED": f"run {sys.executable}"}
"""For the scripts: this Python, as one that another script has checked. ``test_the_first_command`` has it checked."""
TIMED_OUT = -int(signal.SIGKILL)
WITH_FUSION = "^--no-bias-gelu-fusion ^--no-bias-swiglu-fusion"
"""Flags to leave out of ``TINY``, so that Megatron's fused activation functions run: not compiled on the CPU."""
SUMMARY = "--swap-summary summary.json"
SAVE = {
    # Fast; every rank writes its own part, the state of the random generators included.
    "torch": "--save {} --save-interval 1000 --ckpt-format torch",
    "torch_dist": "--save {} --save-interval 1000 --ckpt-format torch_dist",
}


@dataclass(frozen=True)
class Run:
    command: str
    returncode: int
    output: str
    directory: Path

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())

    @property
    def tail(self) -> str:
        lines = "\n".join(self.output.splitlines()[-60:])
        return f"{self.command}\nexit code {self.returncode}, last lines:\n{lines}"

    @property
    def error(self) -> str:
        """The program's own message: the text after the last ``error:`` at the start of a line.

        Once there are process groups, torch names the rank before it.
        """
        return re.split(r"^(?:\[rank\d+\]: )?error: ", self.output, flags=re.MULTILINE)[-1].strip()


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # Megatron-LM may be there
    return {
        "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
    }  # fmt: skip


def arguments(flags: str) -> list[str]:
    words = shlex.split(flags)
    dropped = {word.removeprefix("^") for word in words if word.startswith("^")}
    return [word for word in TINY if word not in dropped] + [word for word in words if not word.startswith("^")]


def run_fresh(
    directory: Path,
    flags: str = "",
    *,
    ranks: int = 1,
    program: Path = PROGRAM,
    env: dict[str, str] | None = None,
    timeout_s: float = 150.0,
) -> Run:
    """Run ``program`` with the tiny model's flags and ``flags`` as a user would. Several ranks start with torchrun."""
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(program), *arguments(flags)]
    # Port 0: the only rank serves the store itself, so any free port will do, and none is lost to a race.
    full_env = {**os.environ, **environment(0, 1, 0), **(env or {})}
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    log_path = directory / "log"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            command, cwd=directory, env=full_env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            returncode = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            returncode = TIMED_OUT
        finally:  # no rank outlives its run, whatever became of the launcher
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Run(shlex.join(command), returncode, log_path.read_text(errors="replace"), directory)


class Zygote:
    """The process that forks trainers and worlds (``tests/zygote.py``). It starts when it is first needed.
    ``folder``: has another Megatron than the installed one."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def run(
        self,
        directory: Path,
        flags: str,
        *,
        ranks: int = 1,
        program: Path = PROGRAM,
        timeout_s: float = 120.0,
    ) -> Run:
        """Run as ``run_fresh`` does, but from a process that has imported Megatron already."""
        port = 0 if ranks == 1 else free_port()
        argv = arguments(flags)
        codes = self._request({
            "program": str(program), "argv": argv, "cwd": str(directory), "log": new_log(directory),
            "timeout_s": timeout_s, "ranks": [environment(rank, ranks, port) for rank in range(ranks)],
        })  # fmt: skip
        return run_of(f"{ranks} x {shlex.join([str(program), *argv])}", codes, directory)

    def live(self, directory: Path, flags: str, *, ranks: int = 1, timeout_s: float = 120.0) -> Run:
        """Run the program in ranks that live on from run to run. Digests of all results are in the run's directory."""
        argv = arguments(flags)
        request = {"argv": argv, "cwd": str(directory), "log": new_log(directory)}
        answers = self.ask({"main": "tests.integration.living:answering", "options": {}, "num_ranks": ranks}, request,
                           timeout_s=timeout_s)  # fmt: skip
        codes = [answer.get("code", TIMED_OUT) for answer in answers]
        return run_of(f"{ranks} living x {shlex.join(argv)}", codes, directory)

    def ask(self, world: dict[str, Any], request: dict[str, Any], *, timeout_s: float) -> list[dict[str, Any]]:
        """Return the answers of a world's ranks. The world is forked if it does not live."""
        return list(self._request({"world": world, **request, "timeout_s": timeout_s, "port": free_port()}))

    def end(self, world: dict[str, Any]) -> None:
        self._request({"end": world})

    def _request(self, request: dict[str, Any]) -> Any:
        if self._process is None:
            env = {**os.environ, **environment(0, 1, 0), "PYTHONWARNINGS": "ignore"}
            if self._folder is not None:
                env["PYTHONPATH"] += f"{os.pathsep}{self._folder}"  # behind our portion, before site-packages
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.zygote"], cwd=ROOT, env=env, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            assert answer, "the process that forks trainers has died"
            return json.loads(answer)
        except BaseException:  # a test that is out of time leaves an answer, which the next one would read
            self._process.kill()
            self._process.wait()
            self._process = None
            raise


def new_log(directory: Path) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "log").write_text("")
    return str(directory / "log")


def run_of(command: str, codes: list[int], directory: Path) -> Run:
    returncode = next((code for code in codes if code), 0)
    return Run(command, returncode, (directory / "log").read_text(errors="replace"), directory)


class Trainer:
    """Runs training in ``runs``. Each unswapped configuration runs once for all tests and workers, in ``shared``."""

    def __init__(self, zygote: Zygote, runs: Path, shared: Path) -> None:
        self._zygote = zygote
        self._runs = runs
        self._shared = shared
        self._count = 0

    def _folder(self) -> Path:
        self._count += 1
        return self._runs / str(self._count)

    def run(self, flags: str = "", *, check: bool = True, fresh: bool = False, **options: Any) -> Run:
        """Run once in processes of its own; the run must succeed if ``check``. ``fresh``: use a new interpreter."""
        start = run_fresh if fresh or "env" in options else self._zygote.run
        run = start(self._folder(), flags, **options)
        if check:
            assert run.returncode == 0, run.tail
        return run

    def failing(self, flags: str, **options: Any) -> Run:
        return failed(self.run(flags, check=False, **options))

    def live(self, flags: str, *, ranks: int = 1) -> Run:
        """Run once in ranks that live on. The run must succeed."""
        run = self._zygote.live(self._folder(), f"{flags} {SUMMARY}", ranks=ranks)
        assert run.returncode == 0, run.tail
        return run

    def refused(self, flags: str) -> Run:
        """Run once in a rank that lives on. The run must end with an error."""
        return failed(self._zygote.live(self._folder(), flags, timeout_s=20.0))

    def unswapped(
        self, flags: str = "", *, ranks: int = 1, saved: str | None = None, program: Path = PROGRAM
    ) -> Run:
        """Return the run without swapping. The first caller makes it: in ranks that live on, unless a checkpoint is
        ``saved`` or the program is another one."""
        flags = " ".join(flags.split())
        name = hashlib.sha256(f"{ranks} {saved} {program.name} {flags}".encode()).hexdigest()[:16]
        directory = self._shared / name
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (directory / "run.json").exists():
                plain = f"{flags} --swap-layers none"
                if saved is None and program == PROGRAM:
                    run = self._zygote.live(directory, f"{plain} {SUMMARY}", ranks=ranks)
                else:
                    plain = f"{plain} {recorded(saved or 'torch')}"
                    run = self._zygote.run(directory, plain, ranks=ranks, program=program)
                (directory / "run.json").write_text(json.dumps([run.command, run.returncode, run.output]))
        run = Run(*json.loads((directory / "run.json").read_text()), directory)
        assert run.returncode == 0, run.tail
        return run

    def pair(self, flags: str, swap: str, *, ranks: int = 1) -> tuple[Run, Run]:
        """Run the same training without and with swapping, and compare the two to the bit."""
        plain = self.unswapped(flags, ranks=ranks)
        swapped = self.live(f"{flags} {SWAP_SMALL} {swap}", ranks=ranks)
        assert_same_training(plain, swapped)
        return plain, swapped


def failed(run: Run) -> Run:
    assert run.returncode != 0, f"should have failed\n{run.tail}"
    assert run.returncode != TIMED_OUT, run.tail
    return run


def recorded(saved: str) -> str:
    return f"{SUMMARY} {SAVE[saved].format('checkpoint')}"


def assert_same_training(first: Run, second: Run) -> None:
    """Check that all losses, gradient norms and final states are equal to the bit.

    The states are those of the last checkpoints, or the digests of runs in ranks that live on: all gradients of each
    step, parameters, optimizer state and random generators.
    """
    one, two = first.summary, second.summary
    assert one["losses"], first.tail
    assert one["losses"] == two["losses"], second.tail
    assert one["grad_norms"]
    assert one["grad_norms"] == two["grad_norms"], second.tail
    assert len(set(one["losses"])) == len(one["losses"]), "the model did not learn anything"
    names = sorted(path.name for path in first.directory.glob("digests-*.json"))
    if not names:
        assert_same_checkpoints(first.directory / "checkpoint", second.directory / "checkpoint")
    for name in names:
        before, after = (json.loads((run.directory / name).read_text()) for run in (first, second))
        assert len(before) > 100
        assert before.keys() == after.keys()
        different = [leaf for leaf in before if before[leaf] != after[leaf]]
        assert not different, f"{name}: {len(different)} of {len(before)} differ: {different[:8]}\n{second.tail}"


def assert_swapped(run: Run) -> None:
    """Check that bytes were offloaded and reloaded through leased host memory, and that the figures agree with each
    other."""
    summary = run.summary
    first = summary["steps"][0]
    assert first["swapped_out_bytes"] > 0, run.tail
    for step in summary["steps"]:
        assert 0 <= step["swapped_in_bytes"] <= step["swapped_out_bytes"], run.tail
    assert summary["swapped_layers"], run.tail
    assert 0 < summary["host_leased_peak_bytes"] <= summary["host_booked_bytes"]
    assert summary["wait_ms"] >= 0.0
    by_layer = {entry["layer"]: entry["swapped_out_bytes"] for entry in summary["layers"]}
    assert {layer for layer, num_bytes in by_layer.items() if num_bytes} <= set(summary["swapped_layers"])
    assert sum(by_layer.values()) == summary["swapped_out_bytes"]


def assert_same_checkpoints(first: Path, second: Path) -> None:
    """Check that parameters, optimizer state and scheduler state of the last checkpoints are equal to the bit."""
    one, two = Record(), Record()
    for record, folder in ((one, first), (two, second)):
        record.note("checkpoint", load_checkpoint(folder))
    num_compared = sum(len(leaf.values) for leaf in one.leaves.values() if isinstance(leaf, Bits))
    assert num_compared > 1_000_000, f"only {num_compared} elements were compared"
    assert difference(one, two) is None, difference(one, two)


def load_checkpoint(directory: Path) -> dict[str, Any]:
    iteration = int((directory / "latest_checkpointed_iteration.txt").read_text())
    last = directory / f"iter_{iteration:07d}"
    if (last / "metadata.json").exists():
        with tempfile.TemporaryDirectory() as folder:
            dcp_to_torch_save(last, f"{folder}/all.pt")
            content = {"": torch.load(f"{folder}/all.pt", weights_only=False)}
    else:
        paths = sorted(last.rglob("*.pt"))
        content = {str(path.relative_to(last)): torch.load(path, weights_only=False) for path in paths}
    return {name: value for name, value in leaves_of("", content) if "/args" not in name}
