"""megatron-swap plan: verdict, command to paste, table of options, GPUs of a host, stages of a pipeline, notes."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.swap.cli import plan as program
from megatron.swap.cli import remedies
from megatron.swap.cli.remedies import GRADIENTS, changes, is_needed, remedy_line
from megatron.swap.common.settings import USUAL_FRACTION
from megatron.swap.common.types import UsageError
from megatron.swap.forecast.flags import not_counted, read_flags
from megatron.swap.forecast.gpus import GPUS, SHARED_GB_S, find_gpu
from megatron.swap.forecast.options import DISK, FULL, NOTHING, PLANNED, STATE, Option, best, of_training
from megatron.swap.forecast.stages import decide

LAYERS = "--num-layers 4"
SIZES = (
    "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--swiglu --bf16 --seq-length 8192 --micro-batch-size 1 --vocab-size 32000 --hidden-dropout 0 "
    "--max-position-embeddings 131072"
)
FLAGS = f"{LAYERS} {SIZES}"
LLAMA = f"--num-layers 32 {SIZES.replace('32000', '128256')} --untie-embeddings-and-output-weights"


def planned(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, list[str]]:
    """Return exit status and the paragraphs that the program prints. Tests that ask for the same share the answer."""
    if line not in _ANSWERS or "--save" in line:
        status = program.main(line.split())
        found = capsys.readouterr()
        assert found.err == ""
        _ANSWERS[line] = status, found.out
    status, out = _ANSWERS[line]
    return status, out.strip().split("\n\n")


_ANSWERS: dict[str, tuple[int, str]] = {}


def rows(table: str) -> dict[str, list[str]]:
    """Return the rows of the table of options by their names."""
    cells = [re.split(r"\s{2,}", line) for line in table.splitlines()]
    return {name: rest for name, *rest in cells[1:]}


def words(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", ""))


@pytest.mark.slow
def test_the_command_reads_as_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The printed flags, planned again, are the same run, and the budget that they give is the one of the plan."""
    _, (_, command, _, table, *_) = planned(capsys, f"--gpu h100 --memory-gib 20.5 -- {FLAGS}")
    flags = " ".join(words(command)[6:])
    status, (verdict, again, _, same, *_) = planned(capsys, f"--gpu h100 -- {flags}")
    assert status == 0
    assert verdict.startswith("Fits in 20.5 of the 79.1 GiB")
    assert (again, same) == (command, table)


@pytest.mark.slow
def test_a_model_whose_state_is_too_large_is_told_how_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """8B on 80 GB: activations alone cannot free enough."""
    status, (verdict, _, _, table, *_) = planned(capsys, f"--gpu h100 -- {LLAMA} --use-distributed-optimizer")
    assert status == 0
    assert verdict.endswith(" GiB of host memory: --swap-memory-gib 75.14 --swap-optimizer auto")
    found = rows(table)
    assert [found[name][-1] for name in (NOTHING, PLANNED)] == ["no", "--swap-memory-gib …"]
    assert found[PLANNED][0].startswith("at least 1")
    assert found[STATE][-2:] == ["yes", "--swap-memory-gib … --swap-optimizer auto"]


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ("", "alone take 44.9 GiB. Lower it by one or several of: --tensor-model-parallel-size 2, 16-bit gradients"),
        ("--micro-batch-size 2 --swap-optimizer 0.5", "of: --swap-optimizer auto, --tensor-model-parallel-size 2"),
        pytest.param(
            "--num-layers 8 --seq-length 131072",
            "of: --mlp-chunks-for-training 8, --swap-loss-chunks 17, a shorter --seq-length, --tensor-model",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_the_least(capsys: pytest.CaptureFixture[str], flags: str, hint: str) -> None:
    status, (verdict, table, *_) = planned(capsys, f"--gpu rtx4090 -- {LLAMA} {flags}")
    assert status == 1
    assert verdict.startswith("Does not fit in 22.32 of the 23.5 GiB of NVIDIA GeForce RTX 4090. The least is ")
    assert hint in verdict
    assert {row[-1] if row[-1] in ("yes", "no") else row[-2] for row in rows(table).values()} == {"no"}


def test_the_default_budget_is_that_of_training(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("h100", "l40s"):
        _, (verdict, *_) = planned(capsys, f"--gpu {name} -- --num-layers 1 {SIZES}")
        assert verdict.startswith(f"Fits in {USUAL_FRACTION * GPUS[name].memory_gib:.4g} of the ")
    _, (verdict, *_) = planned(capsys, f"--gpu h100 -- {FLAGS} --swap-memory-gib 25")
    assert verdict.startswith("Fits in 25 of the ")


@pytest.mark.slow
def test_gpus_of_one_host_share_memory_and_link(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{LAYERS} {SIZES} --use-distributed-optimizer"
    status, parts = planned(capsys, f"--gpu h200 --num-gpus 8 --host-gib 400 --memory-gib 11 -- {flags}")
    assert status == 0
    one_way, both = SHARED_GB_S[8]
    assert parts[-1] == (
        f"8 GPUs of a host share its memory and its link: each copies at {one_way:g} GB/s in one direction, {both:g} "
        "in each of both, as measured on an H200 host."
    )
    assert words(parts[1])[-2:] == ["--swap-host-gib", "50"]
    assert words(parts[1])[3:5] == ["--nproc-per-node", "8"]
    _, alone = planned(capsys, f"--gpu h200 --num-gpus 8 --gpus-per-host 1 --memory-gib 11 -- {flags}")
    assert not any("share" in part for part in alone)
    assert re.search(r"with \d+ MiB of host memory for each GPU: --swap-memory-gib 11 --swap-host-gib 50$", parts[0])
    assert words(alone[1])[4:9] == ["1", "--nnodes", "8", "--node-rank", "$NODE_RANK"]


def test_speeds_of_several_gpus_are_those_that_were_measured() -> None:
    for per_host, nearest in ((2, 2), (3, 4), (8, 8)):
        gpu = find_gpu("h200").beside(per_host)
        assert (gpu.link_gb_s, gpu.link_both_gb_s) == SHARED_GB_S[nearest]
    slow = find_gpu("a100-80")
    assert slow.beside(2).link_gb_s == slow.link_gb_s  # its own link is slower than its share of the host
    assert find_gpu("gb200").beside(4) == find_gpu("gb200")  # each pair of GPUs has a processor of its own
    assert find_gpu("h200").beside(16).link_both_gb_s == SHARED_GB_S[8][1] / 2


@pytest.mark.parametrize(
    ("name", "message"), [("custom:80,989", "three numbers above 0"), ("h1000", "did you mean h100?")]
)
def test_unknown_gpus_are_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        find_gpu(name)


def test_flags_that_change_memory_uncounted_are_told_once() -> None:
    flags = f"{FLAGS} --qk-layernorm --overlap-grad-reduce --qk-layernorm --train-iters 3"
    assert not_counted(flags.split()) == ["--qk-layernorm", "--overlap-grad-reduce"]
    assert not_counted(["--num-layers", "1"]) == ["--hidden-dropout 0.1"]  # Megatron's default


def test_packed_documents_are_not_known_to_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Their lengths set the time of attention, but not what is saved: the figures are those of whole sequences."""
    _, without = planned(capsys, f"--gpu h200 -- {FLAGS}")
    _, said = planned(capsys, f"--gpu h200 -- {FLAGS} --sft")
    assert said[3] == without[3]
    told = "--sft: attention is predicted over whole sequences."
    assert [told in " ".join(" ".join(text).split()) for text in (without, said)] == [False, True]


@pytest.mark.nightly
def test_host_memory_limits_what_is_offloaded() -> None:
    training = read_flags(f"{LLAMA} --global-batch-size 8".split())
    found = {one.name: one for one in of_training(training, find_gpu("h100"), 75.0, 40.0)}
    assert not found[STATE].fits
    assert found[DISK].fits
    assert found[DISK].host_gib <= 40.0 + 1e-6
    assert found[DISK].disk_gib > 0
    unlimited = {one.name: one for one in of_training(training, find_gpu("h100"), 75.0, None)}
    assert unlimited[STATE].fits
    speeds = [one.prediction.step_ms for one in (found[DISK], unlimited[STATE]) if one.prediction]
    assert speeds[0] > speeds[1]  # a disk is slower than host memory


def option(name: str, step_ms: float) -> Option:
    """Return an option that fits and takes ``step_ms``."""
    training = read_flags(FLAGS.split())
    kept = of_training(training, find_gpu("h200"), 130.0, None)[0]
    assert kept.prediction is not None
    return replace(kept, name=name, prediction=replace(kept.prediction, step_ms=step_ms))


def test_a_disk_is_the_last_choice() -> None:
    slow, fast = (option(name, ms) for name, ms in ((STATE, 9000.0), (DISK, 1000.0)))
    assert best([slow, fast]) is slow
    assert best([slow, fast], is_disk_given=True) is fast
    assert best([replace(slow, fits=False), fast]) is fast


def test_an_option_is_chosen_that_fits_both_stages() -> None:
    def of(name: str, ms: float, fits: bool = True) -> Option:
        return replace(option(name, ms), fits=fits)

    found = {
        0: [of(NOTHING, 1.0, fits=False), of(FULL, 4.0), of(PLANNED, 2.0), of(STATE, 3.0)],
        3: [of(NOTHING, 9.0), of(FULL, 1.0), of(PLANNED, 2.0, fits=False), of(STATE, 3.5)],
    }
    decision = decide(found, lambda options: next((one for one in options if one.fits and one.name != FULL), None))
    assert (decision.rank, decision.chosen) == (3, found[3][3])
    assert decision.unfit == {NOTHING: 0}
    slower = decide(found, lambda options: next(one for one in options if one.fits))
    assert (slower.rank, slower.chosen) == (0, found[0][1])
    assert slower.unfit == {PLANNED: 3}


@pytest.mark.slow
def test_a_fraction_among_the_training_flags_is_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    _, (verdict, command, *_) = planned(capsys, f"--gpu h100 -- {FLAGS} --swap-memory-fraction 0.26")
    budget_gib = 0.26 * GPUS["h100"].memory_gib
    assert verdict.startswith(f"Fits in {budget_gib:.4g} of the ")
    assert words(command)[-2:] == ["--swap-memory-gib", f"{int(budget_gib * 100) / 100:g}"]


FLAGS_15B = (
    "--num-layers 40 --hidden-size 5120 --ffn-hidden-size 17920 --num-attention-heads 40 --group-query-attention "
    "--num-query-groups 8 --vocab-size 128256 --swiglu --bf16 --seq-length 8192 --max-position-embeddings 8192 "
    "--micro-batch-size 4 --global-batch-size 16 --untie-embeddings-and-output-weights --hidden-dropout 0"
)
"""A 15B."""
CHUNKS, SMALLER = ("--mlp-chunks-for-training", "2"), ("--micro-batch-size", "2")


def remedy(name: str = PLANNED, step_ms: float = 1000.0, flags: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(name=name, prediction=SimpleNamespace(step_ms=step_ms), flags=flags)


def decision(chosen: Any) -> Any:
    return SimpleNamespace(chosen=chosen, found=[remedy("nothing", 500.0)])


@pytest.mark.parametrize(
    ("flags", "num_gpus", "expected"),
    [("", 1, [GRADIENTS, CHUNKS, SMALLER]), ("", 2, [GRADIENTS, ("--use-distributed-optimizer",), CHUNKS, SMALLER]),
     ("--micro-batch-size 1", 1, [GRADIENTS]), (" ".join(GRADIENTS), 2, [CHUNKS, SMALLER])],
)  # fmt: skip
def test_changes_leave_gpus_and_tokens_alone(flags: str, num_gpus: int, expected: list) -> None:
    assert changes(read_flags(f"{FLAGS_15B} {flags}".split(), num_gpus)) == expected


def test_the_smallest_changes_that_do_are_ordered_by_speed() -> None:
    training = read_flags(FLAGS_15B.split(), 2)
    asked: list[tuple[str, ...]] = []
    times = {GRADIENTS: 900.0, CHUNKS: 850.0, SMALLER: 800.0}

    def decide(flags: Sequence[str]) -> Any:
        asked.append(tuple(flags))
        if flags == ("--use-distributed-optimizer",):
            return decision(remedy(DISK, 100.0))
        return decision(remedy(step_ms=times[tuple(flags)]))

    found = remedies.remedies(training, decide)
    assert [one.flags for one in found] == [SMALLER, CHUNKS, GRADIENTS]
    assert [one.times for one in found] == [1.6, 1.7, 1.8]
    assert max(map(len, asked)) == len(GRADIENTS), "pairs are not tried if one change does"


def test_pairs_are_tried_if_no_single_change_does() -> None:
    training = read_flags(FLAGS_15B.split())

    def decide(flags: Sequence[str]) -> Any:
        if {*CHUNKS} <= {*flags}:
            return decision(None)
        if flags == SMALLER:
            raise UsageError("the batch does not divide")
        return decision(remedy(STATE, flags=("--swap-optimizer", "auto")) if {*SMALLER} <= {*flags} else None)

    (found,) = remedies.remedies(training, decide)
    assert found.flags == (*GRADIENTS, *SMALLER)
    assert remedies.remedies(training, lambda _: decision(None)) == []
    line = remedy_line([found], 4096, has_chosen=False)
    assert line.startswith("It fits with --main-grads-dtype bf16")
    assert line.endswith("--micro-batch-size 2 (4,096 tokens/s, 2.00 x the unswapped step time, with --swap-optimizer "
                         "auto).")  # fmt: skip


@pytest.mark.parametrize(
    ("chosen", "flags", "expected"),
    [(None, "", True), (remedy(DISK, 600.0), "", True), (remedy(DISK, 599.0), "", False),
     (remedy(STATE, 5000.0), "", False), (remedy(DISK, 600.0), "--swap-optimizer auto --swap-disk-dir /d", False)],
)  # fmt: skip
def test_a_disk_that_was_asked_for_or_that_is_fast_needs_no_remedy(chosen: Any, flags: str, expected: bool) -> None:
    assert is_needed(chosen, remedy("nothing", 500.0), read_flags(f"{FLAGS_15B} {flags}".split())) is expected
