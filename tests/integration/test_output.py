"""Output for users, cleanup after a run, and runs that fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.integration.harness import (
    PROGRAM,
    SWAP_SMALL,
    Trainer,
    assert_same_checkpoints,
    assert_swapped,
    recorded,
)

USER_SCRIPT = Path(__file__).with_name("user_script.py")
SWAP = f"--swap-layers all {SWAP_SMALL}"

# Replaces the program's forward step by one that inspects the model and Megatron, or raises.
PROBE = """
import runpy, sys
sys.path.insert(0, {root!r})
import pretrain_gpt_swap as program
original, count = program.forward_step, 0

def forward_step(data_iterator, model):
    global count
    count += 1
    {body}
    return original(data_iterator, model)

program.forward_step = forward_step
program.main()
"""
LOOK = """
    from megatron.training import training
    from megatron.core.transformer import transformer_block
    names = [name for name, module in model.named_modules() if "forward" in vars(module)
             or any("swap" in hook.__module__ for hooks in (module._forward_hooks, module._forward_pre_hooks)
                    for hook in hooks.values())]
    functions = training.train, training.training_log, transformer_block.checkpointed_forward
    patched = [f.__name__ for f in functions
               if hasattr(f, "__wrapped__") and "patches" in f.__code__.co_filename]
    print("PROBE", len(names), patched, flush=True)
"""
RAISE = """
    import torch
    if count == 4 and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        raise ValueError("the user's own error")
"""


def probe(directory: Path, body: str) -> Path:
    path = directory / "probe.py"
    path.write_text(PROBE.format(root=str(PROGRAM.parent), body=body.strip("\n").strip()))
    return path


def test_lines_and_tables(trainer: Trainer) -> None:
    run = trainer.run(SWAP)
    lines = run.output.splitlines()
    assert any("swap:" in line and "0-7" in line for line in lines), run.tail
    assert sum("swap: out" in line and "waited" in line for line in lines) == 3, run.tail
    head = next(i for i, line in enumerate(lines) if "layers" in line and "out a step" in line)
    assert head > max(i for i, line in enumerate(lines) if "swap: out" in line)
    assert "Traceback" not in run.output


def test_log_interval(trainer: Trainer) -> None:
    run = trainer.run(f"{SWAP} --train-iters 4 --log-interval 2 --swap-summary summary.json")
    logged = sum(" iteration " in line for line in run.output.splitlines())
    assert run.output.count("swap: out") in (logged, 2)
    assert len(run.summary["losses"]) == 4


def test_quiet(trainer: Trainer) -> None:
    run = trainer.run(f"{SWAP} --swap-log-level quiet --swap-summary summary.json")
    assert "swap" not in run.output.replace(str(run.directory), "").lower(), run.tail
    assert "out a step" not in run.output
    assert_swapped(run)


def test_tensorboard(trainer: Trainer) -> None:
    run = trainer.run(f"{SWAP} --tensorboard-dir tensorboard --tensorboard-log-interval 1")
    events = EventAccumulator(str(run.directory / "tensorboard"))
    events.Reload()
    for name in ("swap/out-gib", "swap/in-gib", "swap/wait-ms"):
        points = events.Scalars(name)
        assert [point.step for point in points] == [1, 2, 3]
        assert all(point.value >= 0 for point in points)
    assert events.Scalars("swap/out-gib")[-1].value > 0


def test_none_installs_nothing(trainer: Trainer, tmp_path: Path) -> None:
    """The run has no hooks, no replaced forward and no patch of the training loop, and trains the same."""
    run = trainer.run("--swap-layers none --save checkpoint --save-interval 1000 --ckpt-format torch",
                      program=probe(tmp_path, LOOK))  # fmt: skip
    assert "PROBE 0 []" in run.output, run.tail
    assert "swap:" not in run.output
    assert_same_checkpoints(run.directory / "checkpoint", trainer.unswapped().directory / "checkpoint")


def test_the_probe_sees_what_swapping_installs(trainer: Trainer, tmp_path: Path) -> None:
    run = trainer.run(SWAP, program=probe(tmp_path, LOOK))
    assert "'train', 'training_log'" in run.output, run.tail
    assert "PROBE 0" not in run.output


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_breaks_off(trainer: Trainer, tmp_path: Path, ranks: int) -> None:
    """The user's error is printed unchanged, no process waits, and no summary reports success."""
    program = probe(tmp_path, RAISE)
    flags = f"{SWAP} --swap-summary summary.json --pipeline-model-parallel-size {ranks}"
    run = trainer.failing(flags, program=program, ranks=ranks, fresh=True, timeout_s=90)
    assert "ValueError: the user's own error" in run.output, run.tail
    assert "During handling of the above exception" not in run.output, run.tail
    assert not (run.directory / "summary.json").exists()


def test_a_script_of_the_users_own(trainer: Trainer) -> None:
    """A script as a user would write it has one more line than without swapping, and the same result."""
    plain = trainer.run(recorded("torch"), program=USER_SCRIPT)
    swapped = trainer.run(f"{SWAP} --swap-verify {recorded('torch')}", program=USER_SCRIPT)
    assert_swapped(swapped)
    assert plain.summary["losses"] == swapped.summary["losses"]
    assert_same_checkpoints(plain.directory / "checkpoint", swapped.directory / "checkpoint")
