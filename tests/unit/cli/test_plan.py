"""megatron-swap plan: wrong input is refused in one line, before planning."""

import io
import json
import re
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from megatron.swap.cli import plan as program
from megatron.swap.planner.profile import save_profile
from tests.unit.planner.cases import random_profile

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --bf16 "
    "--vocab-size 256"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_profile(random_profile(5), tmp_path / "profile.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(monkeypatch: pytest.MonkeyPatch, line: str) -> str:
    """Return the error that the program prints instead of planning."""
    def planned(*_: Any) -> None:
        raise AssertionError("it has begun to plan")

    monkeypatch.setattr("megatron.swap.forecast.options.simulate", planned)
    with redirect_stderr(io.StringIO()) as said:
        assert program.main(line.split()) == 1
    assert said.getvalue().endswith("\n")
    return said.getvalue()[:-1]


PROFILE, GPU = "--profile profile.json", "--gpu h200"
REFUSED = (
    *((f"{flag} {given} {PROFILE}", f"error: {flag} {given}: must be a number ")
      for flag, given in (("--memory-gib", "nan"), ("--host-gib", "inf"), ("--link-gb-s", "1e+308"))),
    (f"{PROFILE} --memory-gib 0", "--memory-gib 0: must be"),
    (f"{PROFILE} --pipeline-rank 0", "--pipeline-rank 0: does not go with --profile"),
    (f"{PROFILE} -- {FLAGS}", "--num-layers: does not go with --profile"),
    (f"{PROFILE} --curve curve.foo", "error: --curve curve.foo: must be a picture"),
    ("--show plan.json --memory-gib 4", "--memory-gib 4.0: does not go with --show"),
    (f"{PROFILE} --seq-length 0", "seq_length: 0 is given"),
    (f"{GPU} --", "--gpu needs the flags of the training command, behind --"),
    (f"{GPU} --num-gpus 0 -- {FLAGS}", "--num-gpus 0: must be a multiple of 1"),
    (f"{GPU} --num-gpus 8 --gpus-per-host 3 -- {FLAGS}", "--gpus-per-host 3: must divide the 8 GPUs"),
    (f"{GPU} --pipeline-rank 7 -- {FLAGS}", "--pipeline-rank 7: must be 0 to 0"),
    (f"{GPU} --memory-gib 140 -- {FLAGS}", "--memory-gib 140: NVIDIA H200 has 139.8 GiB"),
    (f"{GPU} --summary none.json -- {FLAGS}", "--summary none.json: is not what --swap-summary writes today"),
    (f"{GPU} --memory-gib 60 -- {FLAGS} --swap-memory-gib 50", "--memory-gib 60 and --swap-memory-gib 50 among"),
    (f"{GPU} -- {FLAGS.replace('--vocab-size 256', '')}", "give --vocab-size"),
)
REFUSED_FLAGS = (
    ("--num-layers 0", "--num-layers 0: must be at least 1"),
    (f"--seq-length 1{'0' * 400}", "must be at least 1 and at"),
    ("--seq-length many", "error: among the training flags: argument --seq-length: invalid int value: 'many'."),
    ("--max-position-embeddings 32", "--max-position-embeddings 32: must be at least --seq-length 64"),
    ("--swap-host-gib lots", "--swap-host-gib lots: a number is expected"),
    ("--optimizer sgd", "--optimizer sgd: its memory and time are not known without a measurement"),
    ("--recompute-granularity=full --bf16", "error: --recompute-granularity=full is not needed."),
    ("--swap-layers all", "error: --swap-layers all: plan chooses what is swapped. Leave --swap-layers "),
    ("--fp16", "--bf16 and --fp16 cannot be combined"),
    ("--swap-memory-fraction 0.5 --swap-memory-gib 40", "--swap-memory-gib 40 and --swap-memory-fraction 0.5 both"),
    ("--swap-memory-fraction 1.5", "fraction 1.5: must be above 0"),
    ("--num-experts 4", "error: --num-experts 4: cannot be planned without a measurement."),
    ("--use-fsdp", "has this training flag. Leave it out."),
    ("--num-attention-heads 5", "--hidden-size 64: must be a multiple of 5, --num-attention-heads"),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
     "--num-layers 4: must be a multiple of 6, stages x --num-layers-per-virtual-pipeline-stage"),
    ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 7",
     "error: micro-batches a step: 7 is given; with virtual pipeline"),
    ("--lr --min-lr 1e-5", "error: --lr: needs a value among the training flags."),
    ("--num-experst 8", "--num-experst: neither Megatron 0.19.2 nor Megatron Swap has"),
    ("--swap-optimiser=auto", "Did you mean --swap-optimizer?"),
    ("--memory-gib 3", "--memory-gib: is an option of plan, not of training. Give it before the -- ."),
    ("--save plan.json", "--save plan.json: behind -- it is the folder of checkpoints. Give it before the -- ."),
)


def test_invalid_input_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    for line, message in (*REFUSED, *((f"{GPU} -- {FLAGS} {flags}", message) for flags, message in REFUSED_FLAGS)):
        said = refusal(monkeypatch, line)
        assert message in said, (line, said)
        assert "\n" not in said, line


def test_outputs_that_cannot_be_or_would_overwrite_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    (folder / "folder.png").mkdir()
    (folder / "profile.png").symlink_to("profile.json")
    before, content = sorted(folder.iterdir()), (folder / "profile.json").read_bytes()
    for flag in ("--save", "--save-profile", "--curve"):
        for path, message in (
            ("folder.png", "must be a file, not a folder"),
            ("/proc/x.png", "must be a file that can be written; "),
            ("profile.png", "must be another file than that of --profile, which it would overwrite."),
        ):
            said = refusal(monkeypatch, f"--profile profile.json {flag} {path}")
            assert said.startswith(f"error: {flag} {path}: ")
            assert message in said
    assert sorted(folder.iterdir()) == before
    assert (folder / "profile.json").read_bytes() == content
    said = refusal(monkeypatch, "--profile profile.json --save x.json --save-profile ./x.json")
    assert said.endswith("must be another file than that of --save, which it would overwrite.")


def test_missing_folders_are_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    line = "--profile profile.json --save a/plan.json --save-profile b/profile.json --curve c/curve.svg"
    monkeypatch.setattr(program, "curve", lambda profile: [program.of_profile(profile, 1.0)[-1].solution])
    assert program.main(line.split()) == 0
    assert all((folder / name).is_file() for name in ("a/plan.json", "b/profile.json", "c/curve.svg"))


def test_a_disk_that_is_full_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--profile", "profile.json", "--save", "/dev/full"]) == 1
    assert re.fullmatch(r"error: .*No space left on device.*\n", capsys.readouterr().err)


def test_what_files_say_cannot_command_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Line ends in a name would be lines of their own, and half a pair of surrogates cannot be printed."""
    bad, shown = "a\x1b[2J\nb\ud800", r"a\x1b[2J\nb\ud800"
    assert program.main(["--profile", "profile.json", "--save", "plan.json", "--memory-gib", "4"]) == 0
    text = Path("plan.json").read_text()
    capsys.readouterr()
    model = json.loads(text)["model"]["dtype"]
    Path("plan.json").write_text(text.replace(json.dumps(model), json.dumps(bad), 1))
    assert program.main(["--show", "plan.json"]) == 0
    assert f", {shown}" in capsys.readouterr().out
    assert program.main(["--show", bad]) == 1
    assert capsys.readouterr().err.startswith(f"error: {shown}: ")
