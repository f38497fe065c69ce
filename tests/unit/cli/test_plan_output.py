"""megatron-swap plan: verdict, command to paste, table of options, GPUs of a host, stages of a pipeline, notes."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.swap.cli import plan as program
from megatron.swap.cli.training_command import training_command
from megatron.swap.common.settings import USUAL_FRACTION
from megatron.swap.common.types import UsageError
from megatron.swap.forecast.flags import not_counted, read_flags
from megatron.swap.forecast.gpus import GPUS, SHARED_GB_S, find_gpu
from megatron.swap.forecast.options import DISK, FULL, NOTHING, PLANNED, STATE, Option, best, of_training
from megatron.swap.forecast.stages import decide, planned_ranks

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


def test_first_the_verdict_then_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    status, (verdict, command, speed, table, *notes) = planned(
        capsys, f"--gpu h100 --memory-gib 20.5 -- {FLAGS} --swap-layers none"
    )
    assert status == 0
    assert re.fullmatch(
        r"Fits in 20\.5 of the 79\.1 GiB of NVIDIA H100 SXM at 1\.\d\d x the unswapped step time, with [\d.]+ [GM]iB "
        r"of host memory: --swap-memory-gib 20\.5", verdict,
    ), verdict  # fmt: skip
    assert words(command) == [
        "CUDA_DEVICE_MAX_CONNECTIONS=1", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "torchrun",
        "--nproc-per-node", "1", "pretrain_gpt_swap.py", *FLAGS.split(), "--swap-memory-gib", "20.5",
    ]  # fmt: skip
    assert [line.split()[0] for line in speed.splitlines()] == [
        "tokens/s", "step", "device", "host", "waits", "recomputed", "profile",
    ]  # fmt: skip
    assert list(rows(table)) == [NOTHING, FULL, PLANNED, STATE, DISK]
    assert rows(table)[NOTHING][-1] == "no"
    assert rows(table)[PLANNED][-2:] == ["yes", "--swap-memory-gib …"]
    assert notes == [
        "The loss sets the peak. --swap-loss-chunks 2 takes up to 250 MiB less there, and computes the logits twice.",
        "Host memory is taken for unlimited: --host-gib says how much of it a host can pin.",
    ]


def test_the_command_reads_as_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The printed flags, planned again, are the same run, and the budget that they give is the one of the plan."""
    _, (_, command, _, table, *_) = planned(capsys, f"--gpu h100 --memory-gib 20.5 -- {FLAGS}")
    flags = " ".join(words(command)[6:])
    status, (verdict, again, _, same, *_) = planned(capsys, f"--gpu h100 -- {flags}")
    assert status == 0
    assert verdict.startswith("Fits in 20.5 of the 79.1 GiB")
    assert (again, same) == (command, table)


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
        ("--global-batch-size 2", "--use-precision-aware-optimizer), or take"),
        ("--micro-batch-size 2 --swap-optimizer 0.5", "of: --swap-optimizer auto, --tensor-model-parallel-size 2"),
        ("--num-layers 8 --seq-length 131072",
         "of: --mlp-chunks-for-training 8, --swap-loss-chunks 17, a shorter --seq-length, --tensor-model"),
        ("--num-layers 8 --seq-length 131072 --mlp-chunks-for-training 8", "of: --swap-loss-chunks 17, a shorter"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_the_least(capsys: pytest.CaptureFixture[str], flags: str, hint: str) -> None:
    num_gpus = 2 if "global-batch-size 2" in flags or "tensor" in flags else 1
    status, (verdict, table, *_) = planned(capsys, f"--gpu rtx4090 --num-gpus {num_gpus} -- {LLAMA} {flags}")
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


def test_gpus_of_one_host_share_memory_and_link(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{LAYERS} {SIZES} --use-distributed-optimizer"
    status, parts = planned(capsys, f"--gpu h200 --num-gpus 8 --host-gib 400 --memory-gib 11 -- {flags}")
    assert status == 0
    assert read_flags(f"{flags} --global-batch-size 16".split(), 8).tokens == 16 * 8192
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
    _, given = planned(capsys, f"--gpu h200 --num-gpus 8 --link-gb-s 21 --memory-gib 11 -- {flags}")
    assert any(part.endswith("at 21 GB/s in one direction, 21 in each of both, as given.") for part in given)


@pytest.mark.parametrize(("per_host", "nearest"), [(2, 2), (3, 4), (4, 4), (5, 8), (8, 8)])
def test_speeds_of_several_gpus_are_those_that_were_measured(per_host: int, nearest: int) -> None:
    gpu = find_gpu("h200").beside(per_host)
    assert (gpu.link_gb_s, gpu.link_both_gb_s) == SHARED_GB_S[nearest]
    assert find_gpu("h200").beside(1) == find_gpu("h200")
    slow = find_gpu("a100-80")
    assert slow.beside(2).link_gb_s == slow.link_gb_s  # its own link is slower than its share of the host
    assert find_gpu("gb200").beside(4) == find_gpu("gb200")  # each pair of GPUs has a processor of its own
    assert find_gpu("h200").beside(16).link_both_gb_s == SHARED_GB_S[8][1] / 2


@pytest.mark.parametrize(
    ("name", "message"),
    [("custom:80,989", "three numbers above 0"), ("custom:80,989,x", "three numbers"),
     ("custom:0,1,1", "three numbers"), ("custom:1,nan,1", "three numbers"), ("h1000", "did you mean h100?")],
)  # fmt: skip
def test_unknown_gpus_are_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        find_gpu(name)


def test_a_gpu_can_be_described() -> None:
    """An H100's three figures give the H100's speeds in bf16."""
    known, described = find_gpu("H100"), find_gpu("custom:79.1,989,63")
    known = replace(known, fp8_tflops=0.0, fp8_recipes=(), flash_speeds=(1.0, 1.0), own_flash_speeds=(1.0, 1.0))
    assert replace(described, name="", source="", cuda_name="", memory_gb_s=0, optimizer_gb_s=0) == replace(
        known, name="", source="", cuda_name="", memory_gb_s=0, optimizer_gb_s=0
    )
    assert described.memory_gb_s == pytest.approx(known.memory_gb_s, rel=0.01)


def test_flags_that_change_memory_uncounted_are_told_once() -> None:
    flags = f"{FLAGS} --qk-layernorm --overlap-grad-reduce --qk-layernorm --train-iters 3"
    assert not_counted(flags.split()) == ["--qk-layernorm", "--overlap-grad-reduce"]
    assert not_counted(["--num-layers", "1"]) == ["--hidden-dropout 0.1"]  # Megatron's default


@pytest.mark.parametrize(
    ("flag", "is_told"),
    [("--sft", True), ("--dataloader-inter-document-masking", True), ("--use-rope-scaling --rotary-base 9", False)],
)
def test_packed_documents_are_not_known_to_a_plan(
    capsys: pytest.CaptureFixture[str], flag: str, is_told: bool
) -> None:
    """Their lengths set the time of attention, but not what is saved: the figures are those of whole sequences."""
    assert program.main(f"--gpu h200 -- {FLAGS}".split()) == 0
    without = capsys.readouterr().out
    assert program.main(f"--gpu h200 -- {FLAGS} {flag}".split()) == 0
    said = capsys.readouterr().out
    told = f"{flag}: attention is predicted over whole sequences."
    assert [told in " ".join(text.split()) for text in (without, said)] == [False, is_told]
    tables = [re.findall(r"^(?:nothing|full|planned).*", text, re.MULTILINE) for text in (without, said)]
    assert len(tables[0]) >= 4
    assert tables[0] == tables[1]


def test_lines_of_the_command_are_short_and_shells_read_it() -> None:
    flags = [*FLAGS.split(), "--data-path", "a folder/$x", "--swap-modules", "mlp", "core", "--swap-optimizer=1"]
    command = training_command(flags, ["--swap-memory-gib", "3"], 16, 8)
    assert all(len(line) <= 120 for line in command.splitlines())
    assert words(command)[-4:] == ["--data-path", "a folder/$x", "--swap-memory-gib", "3"]
    assert '--nnodes 2 --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"' in command.replace("\\\n    ", "")


def test_the_simplest_of_nearly_equal_options_is_best() -> None:
    training = read_flags(f"{FLAGS} --global-batch-size 8".split())
    found = of_training(training, find_gpu("h200"), 21, None)
    chosen = best(found)
    assert chosen is not None
    assert chosen.name == PLANNED
    fastest = min(one.prediction.step_ms for one in found if one.fits and one.prediction)
    assert chosen.prediction is not None
    assert chosen.prediction.step_ms <= 1.02 * fastest
    assert best([replace(one, fits=False) for one in found]) is None


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


SMALL_HOST = f"{LLAMA} --global-batch-size 8 --use-distributed-optimizer"


@pytest.mark.slow
def test_a_disk_is_chosen_unasked_only_if_nothing_else_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """8B on 80 GB with little host memory: the disk's speed makes the step many times longer."""
    _, (verdict, *_) = planned(capsys, f"--gpu h100 --host-gib 40 -- {SMALL_HOST}")
    said = re.search(
        r" only with a disk, at ([\d.]+) x the unswapped step time, "
        r"with [\d.]+ GiB of host memory and [\d.]+ GiB of disk",
        verdict,
    )
    assert said, verdict
    assert float(said[1]) > 2
    _, (given, *_) = planned(capsys, f"--gpu h100 --host-gib 40 -- {SMALL_HOST} --swap-disk-dir /tmp")
    assert " only " not in given
    slow, fast = (option(name, ms) for name, ms in ((STATE, 9000.0), (DISK, 1000.0)))
    assert best([slow, fast]) is slow
    assert best([slow, fast], is_disk_given=True) is fast
    assert best([replace(slow, fits=False), fast]) is fast


def option(name: str, step_ms: float) -> Option:
    """Return an option that fits and takes ``step_ms``."""
    training = read_flags(FLAGS.split())
    kept = of_training(training, find_gpu("h200"), 130.0, None)[0]
    assert kept.prediction is not None
    return replace(kept, name=name, prediction=replace(kept.prediction, step_ms=step_ms))


def test_an_option_that_may_do_more_needs_no_more() -> None:
    host_gib = 1.0
    training = read_flags(f"{LLAMA} --use-distributed-optimizer".split())
    found = {one.name: one for one in of_training(training, find_gpu("rtx4090"), 22.0, host_gib)}
    least = [found[name].needed_gib for name in (PLANNED, STATE, DISK)]
    assert least == sorted(least, reverse=True)
    assert not any(one.fits for one in found.values())
    budget_gib = least[0]  # now the simplest of them fits
    assert all(one.fits for one in of_training(training, find_gpu("h200"), budget_gib, host_gib)[2:])


LONG = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 65536 --micro-batch-size 1 "
    "--vocab-size 256000 --bf16 --hidden-dropout 0 --pipeline-model-parallel-size 2 --max-position-embeddings 65536"
)
TWO = "--gpu h100 --num-gpus 2 --host-gib 300"


@pytest.mark.nightly
def test_the_stage_that_does_not_fit_decides(capsys: pytest.CaptureFixture[str]) -> None:
    """The last stage holds the logits of 64k tokens."""
    status, (verdict, table, *_) = planned(capsys, f"{TWO} --memory-gib 40 -- {LONG}")
    assert status == 1
    assert verdict.startswith("Does not fit in 40 of the ")
    assert verdict.splitlines()[1] == "Stage 1 of 2 does not fit (stages count from 0)."
    _, (last, same, *_) = planned(capsys, f"{TWO} --memory-gib 40 --pipeline-rank 1 -- {LONG}")
    assert (verdict, table) == (last, same)
    status, (first, *_) = planned(capsys, f"{TWO} --memory-gib 40 --pipeline-rank 0 -- {LONG}")
    assert status == 0
    assert first.splitlines()[1] == "Figures of stage 0 of 2 (stages count from 0)."


def test_a_saved_plan_says_its_stage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, parts = planned(capsys, f"{TWO} --memory-gib 40 --save {tmp_path}/plan.json -- {LONG}")
    assert status == 0
    assert "The plan is for stage 0 of 2. --pipeline-rank plans another stage." in parts


def test_stages_to_plan() -> None:
    assert planned_ranks(1, None, False) == (0,)
    assert planned_ranks(4, None, False) == (0, 3)
    assert planned_ranks(4, 2, False) == (2,)
    assert planned_ranks(4, None, True) == (0,)


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


def test_a_fraction_among_the_training_flags_is_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    _, (verdict, command, *_) = planned(capsys, f"--gpu h100 -- {FLAGS} --swap-memory-fraction 0.26")
    budget_gib = 0.26 * GPUS["h100"].memory_gib
    assert verdict.startswith(f"Fits in {budget_gib:.4g} of the ")
    assert words(command)[-2:] == ["--swap-memory-gib", f"{int(budget_gib * 100) / 100:g}"]


@pytest.mark.slow
def test_the_smaller_limit_of_host_memory_counts(capsys: pytest.CaptureFixture[str]) -> None:
    for host_gib, flag, smaller in (("50", "30", "30"), ("30", "50", "30")):
        line = f"--gpu h100 --memory-gib 20.5 --host-gib {host_gib} -- {FLAGS} --swap-host-gib {flag}"
        _, (_, command, *_) = planned(capsys, line)
        assert words(command)[-2:] == ["--swap-host-gib", smaller]


def test_a_missing_flag_of_megatron_is_told_behind_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    without = re.sub(r"--max-position-embeddings \d+", "", FLAGS)
    note = "Megatron also needs --max-position-embeddings (at least the sequence length)."
    assert planned(capsys, f"--gpu h200 -- {without}")[1][2] == note
    assert note not in planned(capsys, f"--gpu h200 -- {FLAGS}")[1]


SHARED = "Add --use-distributed-optimizer: the 2 data-parallel ranks then share the optimizer state."


@pytest.mark.parametrize(
    ("gpu", "flags", "is_told"),
    [("rtx4090", "", True), ("h200", "--num-layers 8", False), ("rtx4090", "--use-distributed-optimizer", False)],
)  # fmt: skip
def test_shared_optimizer_state_is_advised_once(
    capsys: pytest.CaptureFixture[str], gpu: str, flags: str, is_told: bool
) -> None:
    _, parts = planned(capsys, f"--gpu {gpu} --num-gpus 2 -- {LLAMA} {flags}")
    assert (SHARED in parts) is is_told
    assert "--use-distributed-optimizer" not in parts[0]
    assert "Communication between GPUs is not counted." in parts
    assert not any("Communication" in part for part in planned(capsys, f"--gpu {gpu} -- {FLAGS}")[1])
