"""megatron-swap plan --hf: rows of a Hugging Face model from its config file, and wrong input in one line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.swap.cli import plan as program
from megatron.swap.cli import plan_hf
from megatron.swap.dry.steps import DryStep

pytest.importorskip("transformers")

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip
OF_LLAMA = "--gpu h200 --hf config.json --seq-length 4096"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(text: str) -> dict[str, list[str]]:
    """Return the cells of the table of options, by the first."""
    lines = text[text.index("option ") :].splitlines()[1:]
    return {cells[0]: cells[1:] for cells in (re.split(r"  +", line.strip()) for line in lines if line)}


def planned(capsys: pytest.CaptureFixture[str], line: str, status: int = 0) -> str:
    assert program.main(line.split()) == status
    return capsys.readouterr().out


@pytest.mark.nightly
def test_the_rows_and_the_line_to_type(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = f"{OF_LLAMA} --micro-batch-size 16"  # so that the host does not limit the speed
    whole = planned(capsys, f"{large} --optimizer none --save-profile p.json")
    assert whole.startswith("Fits in 132.8 of the 139.8 GiB of NVIDIA H200, as it is")
    found = rows(whole)
    assert list(found) == ["nothing", "checkpointing", "planned"]
    assert found["checkpointing"][-1] == "model.gradient_checkpointing_enable()"
    assert found["planned"][-1] == "swap.activations(model, memory_gib=…)"
    nothing, least = float(found["nothing"][0]), float(found["checkpointing"][0])
    assert least < nothing

    budget = f"{(nothing + least) / 2:.3g}"
    tight = planned(capsys, f"{large} --optimizer none --memory-gib {budget} --table")
    assert f"swap.activations(model, memory_gib={budget})" in tight.splitlines()[0]
    assert rows(tight)["nothing"][4] == "no"
    assert float(rows(tight)["planned"][0]) <= float(budget)
    assert "self_attn.q_proj/0" in tight
    assert ("--host-gib says how much" in tight) == (rows(tight)["planned"][1] != "0.00")

    of_profile = planned(capsys, f"--profile p.json --memory-gib {budget}")
    assert float(rows(of_profile)["planned"][0]) <= float(budget)


@pytest.mark.parametrize(("is_full", "found"), [(False, "100.00"), (True, "at least 150.4")])
def test_a_plan_that_wants_more_than_the_gpu_has_runs_within_its_memory(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_full: bool, found: str
) -> None:
    """If that is enough, the plan takes what it reserves there, else it needs what it wants."""

    def ran(*_: Any, is_limited: bool, **__: Any) -> DryStep:
        return DryStep(1.0, 100.0, is_full) if is_limited else DryStep(1.0, 150.0)

    monkeypatch.setattr(plan_hf, "dry_planned_step", ran)
    said = planned(capsys, OF_LLAMA)
    assert rows(said)["planned"][0] == found


def test_a_loss_in_chunks_swaps_the_model_without_its_head(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 65536}))
    found = rows(planned(capsys, f"{OF_LLAMA} --optimizer none --loss-chunk-tokens 512"))
    assert found["planned"][-1] == "swap.activations(model.model, memory_gib=…)"
    assert float(found["nothing"][0]) < 6 * 4096 * 65536 / 2**30  # the logits in bf16 and fp32


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--hf config.json --profile p.json --seq-length 8", "--hf config.json: needs --gpu, one of h200, h100"),
        ("--gpu h200 --hf config.json", "--hf config.json: needs --seq-length"),
        (f"{OF_LLAMA} --pipeline-rank 0", "--pipeline-rank 0: does not go with --hf"),
        (f"{OF_LLAMA} --memory-gib 150", "--memory-gib 150: NVIDIA H200 has 139.8 GiB."),
        (f"{OF_LLAMA} --micro-batch-size 0", "--micro-batch-size 0: must be at least 1."),
        ("--gpu h200 --hf config.json --seq-length 8192", "--seq-length 8192: the config has max_position_embeddings"),
        ("--gpu h200 --optimizer none -- --num-layers 4", "--optimizer none: is for --hf alone."),
        ("--gpu h200 --hf nowhere.json --seq-length 8", "--hf nowhere.json: is no config.json of transformers (File"),
        ("--gpu h200 --hf other.json --seq-length 8", "--hf other.json: model_type 'no-such-model' is not in "),
        ("--gpu h200 --hf t5.json --seq-length 8", "--hf t5.json: t5 is no causal language model"),
    ],
)
def test_wrong_input(folder: Path, capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    (folder / "other.json").write_text(json.dumps({"model_type": "no-such-model"}))
    (folder / "t5.json").write_text(json.dumps({"model_type": "t5"}))
    assert program.main(line.split()) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {message}")
    assert said.err.count("\n") == 1
    assert said.out == ""
