"""Output for users, cleanup after a run, and runs that fail."""

import re
from pathlib import Path

import pytest

from tests.integration.harness import (
    PROGRAM,
    SWAP_SMALL,
    Trainer,
    assert_same_checkpoints,
)

SWAP = f"--swap-layers all {SWAP_SMALL}"

# The program, whose forward step inspects the model and Megatron, or raises.
PROBE = f"""
import runpy, sys
sys.path.insert(0, {str(PROGRAM.parent)!r})
import pretrain_gpt_swap as program
original, count = program.forward_step, 0

def forward_step(data_iterator, model):
    global count
    count += 1
    look(model)
    return original(data_iterator, model)

program.forward_step = forward_step
"""
LOOK = """
def look(model):
    from megatron.training import training
    from megatron.core.transformer import transformer_block
    names = [name for name, module in model.named_modules() if "forward" in vars(module)
             or any("swap" in hook.__module__ for hooks in (module._forward_hooks, module._forward_pre_hooks)
                    for hook in hooks.values())]
    functions = training.train, training.training_log, transformer_block.checkpointed_forward
    patched = [f.__name__ for f in functions
               if hasattr(f, "__wrapped__") and "patches" in f.__code__.co_filename]
    print("PROBE", len(names), patched, flush=True)

program.main()
"""
RAISE = """
def look(model):
    import torch
    if count == 4 and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        raise ValueError("the user's own error")

program.main()
"""


@pytest.mark.short
def test_lines_and_tables(trainer: Trainer) -> None:
    run = trainer.live(f"{SWAP} --train-iters 4 --log-interval 2")
    lines = run.output.splitlines()
    assert any("swap:" in line and "0-7" in line for line in lines), run.tail
    assert sum("swap: out" in line and "waited" in line for line in lines) == 3, run.tail  # steps 1, 2, 4
    head = next(i for i, line in enumerate(lines) if "layers" in line and "out a step" in line)
    assert head > max(i for i, line in enumerate(lines) if "swap: out" in line)
    assert "Traceback" not in run.output
    assert len(run.summary["losses"]) == 4


@pytest.mark.nightly
def test_the_verdict_follows_training(trainer: Trainer) -> None:
    """Its two lines follow the table, behind the last iteration."""
    run = trainer.run(f"{SWAP} --eval-iters 1 --tensor-model-parallel-size 2", ranks=2)
    assert "validation loss at iteration 3 on test set" in run.output
    lines = run.output.splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith(" swap: autograd held at most "))
    assert not any(" iteration  " in line for line in lines[place:]), run.tail
    assert "stays" in lines[place - 1], run.tail
    assert lines[place + 1].startswith(" swap: next: the same command with --swap-layers none"), run.tail


def test_the_verdict_is_what_an_unswapped_run_shows(trainer: Trainer) -> None:
    """What autograd would hold is what it held in the run without swapping, but for what others held at its peak."""
    plain, swapped = trainer.unswapped().summary, trainer.live(SWAP).summary
    counted = swapped["ranks"][0]["counted"]
    assert counted["iteration"] == 3
    assert counted["saved_bytes"] == plain["ranks"][0]["counted"]["saved_bytes"]
    assert 0 <= plain["saved_peak_bytes"] - counted["saved_bytes"] <= 0.02 * plain["saved_peak_bytes"]
    assert 0 < counted["held_bytes"] <= swapped["saved_peak_bytes"] < plain["saved_peak_bytes"]


def test_the_line_that_averages_two_iterations_is_announced(trainer: Trainer) -> None:
    run = trainer.run(f"{SWAP} --swap-summary summary.json --save checkpoint --save-interval 2 --train-iters 4")
    losses = [float.fromhex(loss) for loss in run.summary["losses"]]
    printed = [float(loss) for loss in re.findall(r"lm loss: (\S+)", run.output)]
    assert printed == pytest.approx([losses[0], sum(losses[:2]) / 2, *losses[2:]], rel=1e-5)
    said = "Megatron's next line shows the mean loss and time of iterations"
    assert run.output.count(said) == run.output.count(f"{said} 1 to 2,") == 1


@pytest.mark.short
def test_none_installs_nothing(trainer: Trainer, tmp_path: Path) -> None:
    """The run has no hooks, no replaced forward and no patch of the training loop, and trains the same."""
    program = tmp_path / "probe.py"
    program.write_text(PROBE + LOOK)
    run = trainer.run("--swap-layers none --save checkpoint --save-interval 1000 --ckpt-format torch", program=program)
    assert "PROBE 0 []" in run.output, run.tail
    assert "swap:" not in run.output
    assert_same_checkpoints(run.directory / "checkpoint", trainer.unswapped(saved="torch").directory / "checkpoint")


@pytest.mark.nightly
def test_a_run_that_breaks_off(trainer: Trainer, tmp_path: Path) -> None:
    """The user's error is printed unchanged, no process waits, and no summary reports success."""
    program = tmp_path / "probe.py"
    program.write_text(PROBE + RAISE)
    flags = f"{SWAP} --swap-summary summary.json --pipeline-model-parallel-size 2"
    run = trainer.failing(flags, program=program, ranks=2, fresh=True, timeout_s=90)
    assert "ValueError: the user's own error" in run.output, run.tail
    assert "During handling of the above exception" not in run.output, run.tail
    assert not (run.directory / "summary.json").exists()
