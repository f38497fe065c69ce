"""Plausible mistakes: each ends with an error of a few lines that says what was given and what to do instead.

A table for each program. A new mistake is a new line: what is typed, and words that its message must have.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.suites import command as bench
from benchmarks.sweeps import command as sweep
from megatron.swap.cli import main as cli
from tests.integration.harness import CHECKED, ROOT, Run, Trainer
from tests.integration.test_training import MLA

MOST_LINES = 6
Words = list[str]


def assert_told(output: str, words: Sequence[str]) -> None:
    """Check that ``output`` ends in a short error with all ``words``."""
    assert "Traceback" not in output, output
    _, found, message = output.rpartition("error: ")
    assert found, output
    assert len(message.splitlines()) <= MOST_LINES, output
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in the message:\n{output}"


# ------------------------------------------------------------------------------------------------- training

MISSPELT: list[tuple[str, Words]] = [
    ("--swap-layer all", ["--swap-layer is not a flag", "nearest is --swap-layers"]),
    ("--swap-lay all", ["--swap-lay is not a flag", "nearest is --swap-layers"]),
    ("--swap_layers=all", ["--swap_layers is not a flag", "nearest is --swap-layers"]),
    ("–-swap-memory-gb 3", ["–-swap-memory-gb is not a flag", "nearest is --swap-memory-gib"]),
    ("--num-layer 4", ["--num-layer is not a flag", "nearest is --num-layers"]),
    ("--swap-layers 0-3 5", ["'5' belongs to no flag", "quotes"]),
]
VALUES: list[tuple[str, Words]] = [
    ("--swap-layers", ["--swap-layers: expected one argument", "0-23 | 0,4-7 | every:2 | all | none"]),
    ("--swap-layers 0-99999999999999999999", ["layer 8 is out of range", "0 to 7"]),
    ("--swap-layers all --num-layers 99999999999999999999", ["--num-layers 99999999999999999999", "at most 100000"]),
    (f"--swap-layers every:{'9' * 5000}", ["neither a layer nor a range", "every:2"]),
    ("--swap-memory-gib 24GB", ["--swap-memory-gib", "'24GB'", "Most device memory"]),
    ("--swap-memory-gib 1e9", ["--swap-memory-gib 1e+09", "at most what the device has"]),
    ("--swap-memory-fraction 80", ["--swap-memory-fraction 80", "above 0 and at most 1"]),
    ("--swap-recompute norm,activation", ["--swap-recompute norm,activation", "norm or activation", "with spaces"]),
    ("--swap-optimizer half", ["--swap-optimizer half", "0 to 1, or auto"]),
    ("--swap-log-level loud", ["--swap-log-level", "'loud'", "'quiet', 'info', 'debug'"]),
    ("--swap-layers all --swap-cpu-delay-ms 1e9", ["--swap-cpu-delay-ms 1000000000", "at most 1000"]),
    ("--swap-profile-steps 4:5 --swap-profile x", ["--swap-profile-steps '4:5'", "4-5"]),
]
DEVICES_OF_A_FEW_KIB = [
    (f"{flags} --swap-cpu-memory-gib 0.00001", ["--swap-cpu-memory-gib 1e-05", "0.0016 GiB", "Raise it"])
    for flags in ("--swap-layers all --swap-min-mib 0.001", "--swap-policy auto", "--swap-oom-guard")
]
FILES: list[tuple[str, Words]] = [
    ("--swap-plan none.json", ["none.json", "No such file", "path of a megatron-swap plan file"]),
    ("--swap-plan /dev/zero", ["/dev/zero", "device or a pipe", "path of a megatron-swap plan file"]),
    ("--swap-plan .", [".: cannot be read", "directory", "path of a megatron-swap plan file"]),
    ("--swap-plan log", ["log: is not JSON", "path of a megatron-swap plan file"]),
    ("--swap-summary .", ["--swap-summary .", "a file, not a folder"]),
    ("--swap-disk-dir nowhere --swap-layers all", ["--swap-disk-dir nowhere", "a folder that is there"]),
]
OF_MEGATRON: list[tuple[str, Words]] = [
    ("--transformer-impl transformer_engine", ["transformer_engine: TransformerEngine cannot", "local", "pip install"]),
    ("^--train-iters ^3", ["neither --train-iters nor --train-samples", "add one"]),
    ("--num-layers 0", ["Megatron refuses these flags", "division by zero", "Change the flags"]),
    ("--hidden-size 66", ["hidden_size % args.num_attention_heads == 0", "--hidden-size 66, --num-attention-heads 4"]),
    ("--seq-length 128", ["max_position_embeddings (64)", "seq_length (128)", "--swap-log-level debug"]),
    ("--bf16 --fp16", ["not args.bf16", "Change the flags"]),
    ("--tensor-model-parallel-size 2", ["world size (1)", "total_model_size=2", "Change the flags"]),
    ("--attention-backend fast", ["--attention-backend", "'fast'"]),
    (f"{MLA} --mtp-num-layers 1 --swap-layers all", ["--mtp-num-layers 1", "--multi-latent-attention", "Drop --mtp"]),
    ("--yaml-cfg model.yaml --swap-layers all", ["--yaml-cfg model.yaml", "ignores all flags", "drop --yaml-cfg"]),
]
COMBINATIONS: list[tuple[str, Words]] = [
    ("--swap-layers all --swap-memory-gib 1", ["--swap-memory-gib 1", "--swap-layers all", "Drop one"]),
    ("--swap-modules mlp", ["--swap-modules mlp", "Add --swap-layers"]),
    ("--swap-save-profile p.json --swap-layers all", ["--swap-save-profile p.json", "Add --swap-memory-gib"]),
    ("--swap-disk-gib 4", ["--swap-disk-gib 4", "--swap-disk-dir DIR"]),
    ("--swap-optimizer auto", ["--swap-optimizer auto", "Give --swap-memory-gib"]),
]


@pytest.mark.parametrize(
    ("flags", "words"),
    [pytest.param(*mistake, id=mistake[0][:60])
     for mistake in (*MISSPELT, *VALUES, *DEVICES_OF_A_FEW_KIB, *FILES, *OF_MEGATRON, *COMBINATIONS)],
)  # fmt: skip
def test_of_a_training_command(trainer: Trainer, flags: str, words: Words) -> None:
    assert_told(trainer.failing(flags, timeout_s=20.0).output, words)


def test_debug_shows_the_traceback(trainer: Trainer) -> None:
    run = trainer.failing("--hidden-size 66 --swap-log-level debug")
    assert "Traceback" in run.output, run.tail
    assert run.output.splitlines()[-1] == "AssertionError", run.tail


# ------------------------------------------------------------------------------------- a script of the user

OWN_SCRIPT = """
import sys
from megatron.swap.prepare import prepare
prepare(sys.argv)
import pretrain_gpt_swap as ours
from megatron import swap
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

args = parse_and_validate_args(extra_args_provider=swap.add_swap_args, ignore_unknown_args=True)
model_config = gpt_config_from_args(args)
{install}
container = pretrain_cfg_container_from_args(args, model_config)
pretrain(container, ours.provide_datasets, ModelType.encoder_or_decoder, ours.forward_step)
"""
INSTALLED, FORGOTTEN = "swap.SwapSession.install(args, model_config)", ""
CLOSED = f"{INSTALLED}.close()"


@pytest.fixture
def own_script(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a script with these lines in place of ``{install}``."""

    def write(install: str) -> Path:
        path = tmp_path / "own_script.py"
        path.write_text(OWN_SCRIPT.format(install=install))
        return path

    return write


@pytest.mark.parametrize(
    ("install", "flags", "words"),
    [
        (FORGOTTEN, "--swap-layers=all", ["--swap-layers=all", "not called SwapSession", "Train by swap.pretrain("]),
        (FORGOTTEN, "--swap-memory-gib 1", ["--swap-memory-gib", "SwapSession.install", "or drop"]),
        (CLOSED, "--swap-layers all --swap-min-mib 0.001", ["SwapSession.install"]),
        (INSTALLED, "--swap-layer all", ["--swap-layer is not a flag", "nearest is --swap-layers"]),
        (INSTALLED, "--swap-layers 0-99", ["layer 8 is out of range"]),
        (INSTALLED.replace(", model_config", ""), "--swap-layers all", ["does not know the model", "model_config"]),
    ],
    ids=["forgotten", "forgotten by a plan", "closed", "misspelt", "out of range", "no model"],
)
def test_of_an_own_script(
    trainer: Trainer, own_script: Callable[[str], Path], install: str, flags: str, words: Words
) -> None:
    run = trainer.failing(flags, program=own_script(install))
    assert_told(run.output, words)
    assert "number of parameters on" not in run.output or "model_config" in words, "the model was built"


@pytest.mark.parametrize("flags", ["", "--swap-host-gib 1", "--not-a-flag-of-ours 3"])
def test_an_own_script_that_asks_for_no_swapping_trains(
    trainer: Trainer, own_script: Callable[[str], Path], flags: str
) -> None:
    run = trainer.run(flags, program=own_script(FORGOTTEN))
    assert "iteration        3/" in run.output


# --------------------------------------------------------------------------------------------- other programs

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --vocab-size 100 "
    "--bf16"
)
PLAN: list[tuple[str, Words]] = [
    ("plan", ["--profile --show --gpu is required", "--help"]),
    ("plam", ["'plam'", "'plan', 'doctor'"]),
    ("plan --profile none.json", ["none.json", "No such file", "path of a megatron-swap profile file"]),
    ("plan --profile /dev/zero", ["/dev/zero", "device or a pipe"]),
    ("plan --gpu h200 --memory-gib 80GB", ["--memory-gib", "'80GB'", "device memory that a step may reserve"]),
    ("plan --gpu h200 --memory-gb 80", ["--memory-gb is not a flag", "nearest is --memory-gib"]),
    (f"plan --gpu h200 {MODEL}", ["--num-layers is a training flag", "go behind --", "--gpu h100 -- --num-layers"]),
    ("plan --gpu h200 -- --num-layers many", ["--num-layers", "'many'"]),
    (f"plan --gpu h300 -- {MODEL}", ["--gpu h300", "h200, h100"]),
]
BENCH: list[tuple[str, Words]] = [
    ("", ["required: --suite", "--help"]),
    ("--suite quik", ["--suite quik", "h200-dense", "quick"]),
    ("--suite quick --method ours", ["--method ours", "none, full-recompute"]),
    ("--suite quick --rounds x", ["--rounds", "'x'", "number of rounds"]),
    ("--suite quick --output rows.json", ["--output rows.json", "must end in .jsonl"]),
    ("--suite quick --output /proc/x/rows.jsonl", ["--output /proc/x/rows.jsonl", "cannot be written", "another file"]),
    ("--suite quick --metod none", ["--metod is not a flag", "nearest is --method"]),
]
SWEEP: list[tuple[str, Words]] = [
    ("--sweep qick", ["--sweep qick", "h200-depth", "quick"]),
    ("--sweep quick --method nothing", ["--method nothing", "none, full-recompute"]),
    ("--sweep h200-depth --dry-run --gpu h2000", ["--gpu h2000", "h200, h100"]),
]


@pytest.mark.parametrize(
    ("main", "command", "words"),
    [pytest.param(main, *mistake, id=f"{main.__module__.split('.')[1]} {mistake[0][:60]}")
     for main, mistakes in ((cli.main, PLAN), (bench.main, BENCH), (sweep.main, SWEEP)) for mistake in mistakes],
)  # fmt: skip
def test_of_another_program(
    main: Callable[[list[str]], int], command: str, words: Words, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(command.split())
    except SystemExit as stop:
        code = stop.code
    assert code in (1, 2)
    assert_told(capfd.readouterr().err, words)


@pytest.mark.parametrize(
    ("env", "flags", "words"),
    [
        ("NUM_GPUS=x", "", ["NUM_GPUS=x", "a number of ranks from 1"]),
        ("MODEL=xyz", "", ["MODEL=xyz", "choose tiny, 125m"]),
        ("MEGATRON_SWAP_PYTHON=nowhere/python", "", ["MEGATRON_SWAP_PYTHON=nowhere/python", "no such program"]),
        ("MODEL=tiny", "--mock-data --swap-layer 0-23", ["--swap-layer is not a flag", "nearest is --swap-layers"]),
    ],
)
def test_of_the_example(env: str, flags: str, words: Words, tmp_path: Path) -> None:
    name, value = env.split("=")
    given = {**os.environ, **CHECKED, "OMP_NUM_THREADS": "1", name: value}
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / "pretrain_gpt_swap.sh"), *flags.split()],
        cwd=tmp_path, env=given, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode in (1, 2)
    assert_told(done.stdout + done.stderr, words)


# ---------------------------------------------------------------------------------------------------- --help


def test_help_begins_with_our_flags(trainer: Trainer) -> None:
    """Upstream's own help text of one flag has a bare ``%``."""
    run = trainer.run("--help")
    assert_help(run)


def test_help_of_an_own_script(trainer: Trainer, own_script: Callable[[str], Path]) -> None:
    assert_help(trainer.run("--help", program=own_script(INSTALLED)))


def assert_help(run: Run) -> None:
    assert run.output.index("--swap-layers LAYERS") < run.output.index("--help") < run.output.index("--num-layers ")
    assert len(run.output[: run.output.index("--swap-layers LAYERS")].splitlines()) < 10, run.output[:2000]
    assert "--moe-paged-stash-buffer-size-factor-cuda" in run.output, run.tail
