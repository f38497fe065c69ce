"""Plausible mistakes: each ends with an error of a few lines that says what was given and what to do instead.

A new mistake is a new line: what is typed, and words that its message must have.
"""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.harness import CHECKED, PROGRAM, ROOT, Trainer
from tests.integration.rows import BOTH, FULL, KINDS, MLA, SELECTIVE

MOST_LINES = 6
Words = list[str]
MODEL_IS_BUILT, TRAINS = "number of parameters on", "iteration        1/"


def assert_told(output: str, words: Sequence[str]) -> None:
    """Check that ``output`` ends in a short error with all ``words``."""
    assert "Traceback" not in output, output
    _, found, message = output.rpartition("error: ")
    assert found, output
    assert len(message.splitlines()) <= MOST_LINES, output
    assert "\n\n" not in message.strip(), output
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in the message:\n{output}"


SHORT: list[tuple[str, Words]] = [
    ("--swap-layer all", ["--swap-layer is not a flag", "nearest is --swap-layers"]),
    ("--swap-plan none.json", ["none.json", "No such file", "path of a megatron-swap plan file"]),
    ("--swap-disk-dir nowhere --swap-layers all", ["--swap-disk-dir nowhere", "a folder that is there"]),
    ("--swap-layers 0-8", ["--swap-layers '0-8'", "layer 8 is out of range", "0 to 7"]),
    ("--swap-layers all --swap-modules mlp attn", ["--swap-modules 'attn'", "core_attention", "linear_fc1"]),
    ("--swap-layers all --swap-host-gib 1000000", ["1000000.00 GiB", "Lower --swap-host-gib", "--swap-host-unchecked"]),
    ("--swap-layers all --swap-min-mib 0.001 --swap-host-gib 0.001",
     ["--swap-layers all", "3.00 MiB", "1.02 MiB", "Swap fewer layers", "--swap-host-gib"]),
    ("--swap-layers all --cuda-graph-impl local", ["--cuda-graph-impl local", "Drop", "--swap-layers none"]),
    ("--hybrid-layer-pattern *-*-", ["--hybrid-layer-pattern *-*-: the flag is for hybrid models", "Drop it"]),
]
"""Mistakes of the short run."""
MORE: list[tuple[str, Words]] = [
    ("--swap-memory-gib 24GB", ["--swap-memory-gib", "'24GB'", "Most device memory"]),
    ("--swap-recompute norm,activation", ["--swap-recompute norm,activation", "norm or activation", "with spaces"]),
    ("--swap-oom-guard --swap-cpu-memory-gib 0.00001", ["--swap-cpu-memory-gib 1e-05", "0.0016 GiB", "Raise it"]),
    ("--swap-layers all --swap-memory-gib 1", ["--swap-memory-gib 1", "--swap-layers all", "Drop one"]),
    ("--transformer-impl transformer_engine", ["transformer_engine: TransformerEngine cannot", "local", "pip install"]),
    ("^--train-iters ^3", ["neither --train-iters nor --train-samples", "add one"]),
    ("--num-layers 0", ["Megatron refuses these flags", "division by zero", "Change the flags"]),
    ("--hidden-size 66", ["hidden_size % args.num_attention_heads == 0", "--hidden-size 66, --num-attention-heads 4"]),
    ("--attention-backend fast", ["--attention-backend", "'fast'"]),
    (f"{MLA} --mtp-num-layers 1 --swap-layers all", ["--mtp-num-layers 1", "--multi-latent-attention", "Drop --mtp"]),
    ("--yaml-cfg model.yaml --swap-layers all", ["--yaml-cfg model.yaml", "ignores all flags", "drop --yaml-cfg"]),
    (f"{KINDS} {SELECTIVE} mlp --disable-bias-linear", ["--recompute-modules mlp", "Drop activation"]),
    ("--swap-recompute residual --hidden-dropout 0.1", ["needs --hidden-dropout 0; 0.1 is set", "drop residual"]),
    (f"{BOTH} {FULL} uniform",
     ["--swap-recompute norm activation", "--recompute-method uniform", "Drop --swap-recompute"]),
    ("^--mock-data --data-path /nowhere/x", ["--data-path /nowhere/x", "no /nowhere/x.idx", "preprocess_data"]),
    ("--seq-length 100000000 --max-position-embeddings 100000000",
     ["needs at least", "for the activations", "2 x 100000000 tokens", "are available", "--micro-batch-size"]),
]
REAL = ("--swap-layer all", "--swap-memory-gib 24GB", "--hidden-size 66", "--num-layers 0")
"""Mistakes whose runs are processes of their own."""


@pytest.mark.parametrize(("flags", "words"), [
    pytest.param(*mistake, id=mistake[0][:60], marks=pytest.mark.short if mistake in SHORT else ())
    for mistake in (*SHORT, *MORE)
])  # fmt: skip
def test_of_a_training_command(trainer: Trainer, flags: str, words: Words) -> None:
    run = trainer.failing(flags, timeout_s=20.0) if flags in REAL else trainer.refused(flags)
    assert_told(run.output, words)
    assert MODEL_IS_BUILT not in run.output, run.tail


@pytest.mark.short
def test_known_module_that_this_model_lacks(trainer: Trainer) -> None:
    """The module is known only when the model is built, which is still before the first step."""
    run = trainer.failing("--swap-layers all --swap-modules router")
    assert_told(run.output, ["--swap-modules 'router'", "mlp.linear_fc1", "self_attention.core_attention"])
    assert TRAINS not in run.output


PATCHED = f"""
import runpy
import megatron.training.training as training
original = training.training_log
training.training_log = lambda *arguments, **options: original(*arguments, **options)
runpy.run_path({str(PROGRAM)!r}, run_name='__main__')
"""


@pytest.mark.nightly
def test_upstream_of_another_source(trainer: Trainer, tmp_path: Path) -> None:
    """A vendor's build of the same version: the message names the symbol and the remedy, which then works."""
    program = tmp_path / "program.py"
    program.write_text(PATCHED)
    symbol = "megatron.training.training.training_log"
    run = trainer.failing("--swap-layers all --swap-min-mib 0.001", program=program)
    way_on = f"MEGATRON_SWAP_UNCHECKED_UPSTREAM={symbol}"
    words = [symbol, "patches/training_log.py", "megatron-core==0.19.2 (0.18.2, 0.19.0 fit too)", way_on]
    assert_told(run.output, words)
    name, value = way_on.split("=")
    run = trainer.run("--swap-layers all --swap-min-mib 0.001", program=program, env={name: value})
    assert TRAINS in run.output


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


def own_script(folder: Path, install: str) -> Path:
    """Return a script with these lines in place of ``{install}``."""
    path = folder / "own_script.py"
    path.write_text(OWN_SCRIPT.format(install=install))
    return path


@pytest.mark.parametrize(
    ("install", "flags", "words"),
    [
        pytest.param(
            FORGOTTEN, "--swap-layers=all", ["--swap-layers=all", "not called SwapSession", "Train by swap.pretrain("],
            marks=pytest.mark.short,
        ),
        (CLOSED, "--swap-layers all --swap-min-mib 0.001", ["SwapSession.install"]),
        (INSTALLED.replace(", model_config", ""), "--swap-layers all", ["does not know the model", "model_config"]),
    ],
    ids=["forgotten", "closed", "no model"],
)
def test_of_an_own_script(trainer: Trainer, tmp_path: Path, install: str, flags: str, words: Words) -> None:
    run = trainer.failing(flags, program=own_script(tmp_path, install))
    assert_told(run.output, words)
    assert MODEL_IS_BUILT not in run.output or "model_config" in words, "the model was built"


def test_an_own_script_that_asks_for_no_swapping_trains(trainer: Trainer, tmp_path: Path) -> None:
    run = trainer.run("--swap-host-gib 1 --not-a-flag-of-ours 3", program=own_script(tmp_path, FORGOTTEN))
    assert "iteration        3/" in run.output


@pytest.mark.parametrize(
    ("env", "flags", "words"),
    [
        ("MODEL=xyz", "", ["MODEL=xyz", "choose tiny, 125m"]),
        pytest.param("MODEL=tiny", "--mock-data --swap-layer 0-23",
                     ["--swap-layer is not a flag", "nearest is --swap-layers"], marks=pytest.mark.nightly),
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


@pytest.mark.slow
def test_help_begins_with_our_flags(trainer: Trainer) -> None:
    """Upstream's own help text of one flag has a bare ``%``."""
    run = trainer.run("--help")
    assert run.output.index("--swap-layers LAYERS") < run.output.index("--help") < run.output.index("--num-layers ")
    assert len(run.output[: run.output.index("--swap-layers LAYERS")].splitlines()) < 10, run.output[:2000]
    assert "--moe-paged-stash-buffer-size-factor-cuda" in run.output, run.tail
