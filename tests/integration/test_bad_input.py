"""Invalid input is refused before the model is built. The message names the value, the allowed values and the
remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.harness import PROGRAM as ROOT_PROGRAM
from tests.integration.harness import Run, Trainer

MODEL_IS_BUILT = "number of parameters on"
TRAINS = "iteration        1/"


def assert_refused(run: Run, *words: str) -> None:
    """Check that the error is one paragraph without a traceback, that it has all ``words``, and that nothing was
    built."""
    assert "Traceback" not in run.output, run.tail
    assert MODEL_IS_BUILT not in run.output, run.tail
    assert "error: " in run.output, run.tail
    assert "\n\n" not in run.error, run.tail
    missing = [word for word in words if word not in run.error]
    assert not missing, f"{missing} not in the message\n{run.tail}"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--swap-layers 0-8", ["--swap-layers '0-8'", "layer 8 is out of range", "0 to 7"]),
        ("--swap-layers 23", ["--swap-layers '23'", "layer 23 is out of range", "0 to 7"]),
        ("--swap-layers 1,,2", ["--swap-layers '1,,2'", "every:2"]),
        ("--swap-layers first", ["--swap-layers 'first'", "0-23"]),
        ("--swap-layers=-1", ["--swap-layers '-1'", "0-23"]),
        ("--swap-layers every:0", ["every:0", "at least 1"]),
        ("--swap-layers 5-2", ["--swap-layers '5-2'", "backwards", "2-5"]),
        (
            "--swap-layers all --swap-modules mlp attn",
            ["--swap-modules 'attn'", "core_attention", "linear_fc1"],
        ),
        ("--swap-layers all --swap-min-mib -1", ["--swap-min-mib", "0 or more"]),
        ("--swap-layers all --swap-prefetch-gib 0", ["--swap-prefetch-gib", "above 0"]),
        ("--swap-layers all --swap-host-gib -3", ["--swap-host-gib", "above 0"]),
        (
            "--swap-layers all --swap-host-gib 1000000",
            ["--swap-host-gib", "1000000.00 GiB", "Lower --swap-host-gib", "--swap-host-unchecked"],
        ),
        (
            "--swap-layers all --swap-min-mib 0.001 --swap-host-gib 0.001",
            ["--swap-layers all", "3.00 MiB", "1.02 MiB", "Swap fewer layers", "--swap-host-gib"],
        ),
        (
            "--swap-layers all --cpu-offloading-num-layers 2",
            ["--swap-layers all", "--cpu-offloading-num-layers 2", "Drop"],
        ),
        (
            "--swap-layers all --cuda-graph-impl local",
            ["--cuda-graph-impl local", "Drop", "--swap-layers none"],
        ),
        ("--hybrid-layer-pattern *-*-", ["--hybrid-layer-pattern *-*-: the flag is for hybrid models", "Drop it"]),
        ("--hybrid-override-pattern *- --swap-layers all", ["--hybrid-override-pattern *-", "model_provider"]),
        ("--mtp-hybrid-override-pattern *- --mtp-num-layers 1", ["--mtp-hybrid-override-pattern *-", "Drop it"]),
    ],
)
def test_refused_before_the_model_is_built(trainer: Trainer, flags: str, words: list[str]) -> None:
    assert_refused(trainer.failing(flags), *words)


def test_from_a_fresh_process(trainer: Trainer) -> None:
    """The message is the whole output that a user sees."""
    run = trainer.failing("--swap-layers 5-2", fresh=True)
    assert_refused(run, "backwards")
    assert run.returncode == 1


@pytest.mark.parametrize("swap", ["--swap-layers all", "--swap-layers none"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("^--mock-data --data-path /nowhere/x", ["--data-path /nowhere/x", "no /nowhere/x.idx", "preprocess_data"]),
        ("--tokenizer-type TikTokenizer", ["Megatron refuses these flags", "Tokenizer path"]),
        ("--seq-length 100000000 --max-position-embeddings 100000000",
         ["needs at least", "for the activations", "2 x 100000000 tokens", "are available", "--micro-batch-size"]),
    ],
    ids=["data", "tokenizer", "memory"],
)  # fmt: skip
def test_what_the_machine_lacks(trainer: Trainer, swap: str, flags: str, words: list[str]) -> None:
    assert_refused(trainer.failing(f"{flags} {swap}"), *words)


def test_data_of_few_documents(trainer: Trainer, tmp_path: Path) -> None:
    """All of it is trained on, unless an evaluation is asked for. The last document is shorter than a sequence."""
    import indexed_text  # tools/ is on the path where tests run, and not where ``python -m tests.pages`` reads them

    indexed_text.write_byte_level(tmp_path / "few", ["One document a line."] * 30)
    flags = f"^--mock-data --data-path {tmp_path}/few --vocab-size 257 --swap-layers none"
    words = ["--split 969, 30, 1", "no document for the test", "30 documents", "--split 28,1,1", "--eval-iters 0"]
    assert_refused(trainer.failing(f"{flags} --eval-iters 1", timeout_s=20.0), *words)
    assert TRAINS in trainer.run(f"{flags} --train-iters 1", timeout_s=20.0).output


def test_host_memory_that_grows_on_demand(trainer: Trainer) -> None:
    run = trainer.run("--swap-layers all --swap-host-gib 1000000 --swap-host-unchecked --swap-min-mib 0.001")
    assert TRAINS in run.output


def test_known_module_that_this_model_lacks(trainer: Trainer) -> None:
    """The module is known only when the model is built, which is still before the first step."""
    run = trainer.failing("--swap-layers all --swap-modules router")
    assert "Traceback" not in run.output, run.tail
    assert TRAINS not in run.output
    for word in ("--swap-modules 'router'", "mlp.linear_fc1", "self_attention.core_attention"):
        assert word in run.error, run.tail


# Flags that Megatron itself refuses first on this machine, or never checks: our own check is called.
@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"cuda_graph_impl": "transformer_engine"}, "--cuda-graph-impl transformer_engine"),
        ({"fine_grained_activation_offloading": True}, "--fine-grained-activation-offloading"),
    ],
)
def test_other_ways_to_move_activations(trainer: Trainer, tmp_path: Path, changes: dict, flag: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import runpy\n"
        "from megatron.training import argument_utils\n"
        "original = argument_utils.gpt_config_from_args\n"
        "def gpt_config_from_args(args):\n"
        "    config = original(args)\n"
        f"    vars(args).update({changes!r})\n"
        "    return config\n"
        "argument_utils.gpt_config_from_args = gpt_config_from_args\n"
        f"runpy.run_path({str(ROOT_PROGRAM)!r}, run_name='__main__')\n"
    )
    run = trainer.failing("--swap-layers all", program=program)
    assert_refused(run, flag, f"Drop {flag}", "--swap-layers none")


@pytest.mark.slow
def test_upstream_of_another_source(trainer: Trainer, tmp_path: Path) -> None:
    """A vendor's build of the same version: the message names the symbol and the remedy, which then works."""
    program = tmp_path / "program.py"
    program.write_text(
        "import runpy\n"
        "import megatron.training.training as training\n"
        "original = training.training_log\n"
        "def training_log(*arguments, **options):\n"
        "    return original(*arguments, **options)\n"
        "training.training_log = training_log\n"
        f"runpy.run_path({str(ROOT_PROGRAM)!r}, run_name='__main__')\n"
    )
    symbol = "megatron.training.training.training_log"
    run = trainer.failing("--swap-layers all --swap-min-mib 0.001", program=program)
    way_on = f"MEGATRON_SWAP_UNCHECKED_UPSTREAM={symbol}"
    assert_refused(run, symbol, "patches/training_log.py", "megatron-core==0.19.2 (0.18.2, 0.19.0 fit too)", way_on)
    assert "Megatron refuses these flags" not in run.output
    name, value = way_on.split("=")
    run = trainer.run("--swap-layers all --swap-min-mib 0.001", program=program, env={name: value})
    assert TRAINS in run.output


def test_unswapped_runs_need_no_patch_for_swapping(trainer: Trainer) -> None:
    """An unswapped run still refuses wrong figures of swapping, but it does not check host memory."""
    trainer.failing("--swap-layers none --swap-prefetch-gib 0")
    trainer.run("--swap-layers none --swap-host-gib 1000000")
