"""Output for users, cleanup after a run, and runs that fail."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.integration.harness import (
    PROGRAM,
    SWAP_SMALL,
    Run,
    Trainer,
    assert_same_checkpoints,
    assert_swapped,
    recorded,
)
from tests.integration.rows import BOTH, FULL

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


@pytest.mark.short
def test_lines_and_tables(trainer: Trainer) -> None:
    run = trainer.live(SWAP)
    lines = run.output.splitlines()
    assert any("swap:" in line and "0-7" in line for line in lines), run.tail
    assert sum("swap: out" in line and "waited" in line for line in lines) == 3, run.tail
    head = next(i for i, line in enumerate(lines) if "layers" in line and "out a step" in line)
    assert head > max(i for i, line in enumerate(lines) if "swap: out" in line)
    assert "Traceback" not in run.output


def assert_verdict(run: Run) -> None:
    """Check that the verdict's two lines follow the table, behind the last iteration."""
    lines = run.output.splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith(" swap: autograd held"))
    table, held, following = lines[place - 1 : place + 2]
    assert not any(" iteration  " in line for line in lines[place:]), run.tail
    assert "stays" in table, run.tail
    assert held.startswith(" swap: autograd held at most "), run.tail
    assert following.startswith(" swap: next: the same command with --swap-layers none"), run.tail


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_verdict_follows_training(trainer: Trainer, ranks: int) -> None:
    run = trainer.run(f"{SWAP} --eval-iters 1 --tensor-model-parallel-size {ranks}", ranks=ranks)
    assert "validation loss at iteration 3 on test set" in run.output
    assert_verdict(run)


def test_the_verdict_where_training_stops_early(trainer: Trainer) -> None:
    assert_verdict(trainer.run(f"{SWAP} --exit-interval 2"))


@pytest.mark.parametrize("flags", ["", f"{FULL} uniform"])
def test_the_verdict_is_what_an_unswapped_run_shows(trainer: Trainer, flags: str) -> None:
    """What autograd would hold is what it held in the run without swapping, but for what others held at its peak."""
    plain = trainer.unswapped(flags).summary
    swapped = trainer.live(f"{SWAP} {flags}").summary
    counted = swapped["ranks"][0]["counted"]
    assert counted["iteration"] == 3
    assert counted["saved_bytes"] == plain["ranks"][0]["counted"]["saved_bytes"]
    assert 0 <= plain["saved_peak_bytes"] - counted["saved_bytes"] <= 0.02 * plain["saved_peak_bytes"]
    assert 0 < counted["held_bytes"] <= swapped["saved_peak_bytes"] < plain["saved_peak_bytes"]


def test_the_verdict_of_a_run_that_writes_no_summary(trainer: Trainer) -> None:
    """It counts in a few steps only, and finds the same."""
    held = [
        next(line for line in trainer.run(f"{SWAP} {flags}").output.splitlines() if "autograd held" in line)
        for flags in ("--train-iters 5", "--train-iters 5 --swap-summary summary.json")
    ]
    figures = [re.findall(r"[\d.]+ [KM]iB", line) for line in held]
    assert len(figures[0]) == 2
    assert figures[0] == figures[1]


def test_the_line_that_averages_two_iterations_is_announced(trainer: Trainer) -> None:
    run = trainer.run(f"{SWAP} --swap-summary summary.json --save checkpoint --save-interval 2 --train-iters 4")
    losses = [float.fromhex(loss) for loss in run.summary["losses"]]
    printed = [float(loss) for loss in re.findall(r"lm loss: (\S+)", run.output)]
    assert printed == pytest.approx([losses[0], sum(losses[:2]) / 2, *losses[2:]], rel=1e-5)
    said = "Megatron's next line shows the mean loss and time of iterations"
    assert run.output.count(said) == 1
    assert f"{said} 1 to 2," in run.output
    again = trainer.run(f"{SWAP} --load {run.directory / 'checkpoint'} --ckpt-step 2 --train-iters 4")
    assert f"{said} 3 to 4," in again.output
    assert said not in trainer.run(f"{SWAP} --log-interval 2 --train-iters 4").output


def test_a_kind_that_nothing_makes_is_told(trainer: Trainer) -> None:
    run = trainer.live(f"{SWAP_SMALL} --swap-layers none {BOTH} --swap-min-mib 1000")
    assert "--swap-recompute norm does nothing here" in run.output
    assert "--swap-recompute activation does nothing here" in run.output


def test_log_interval(trainer: Trainer) -> None:
    run = trainer.live(f"{SWAP} --train-iters 4 --log-interval 2")
    logged = sum(" iteration " in line for line in run.output.splitlines())
    assert run.output.count("swap: out") in (logged, 2)
    assert len(run.summary["losses"]) == 4


def test_quiet(trainer: Trainer) -> None:
    run = trainer.live(f"{SWAP} --swap-log-level quiet")
    assert " swap: " not in run.output, run.tail
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


@pytest.mark.short
def test_none_installs_nothing(trainer: Trainer, tmp_path: Path) -> None:
    """The run has no hooks, no replaced forward and no patch of the training loop, and trains the same."""
    run = trainer.run("--swap-layers none --save checkpoint --save-interval 1000 --ckpt-format torch",
                      program=probe(tmp_path, LOOK))  # fmt: skip
    assert "PROBE 0 []" in run.output, run.tail
    assert "swap:" not in run.output
    assert_same_checkpoints(run.directory / "checkpoint", trainer.unswapped(saved="torch").directory / "checkpoint")


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
