"""What ``megatron-swap plan`` prints and saves, as it was: ``tests/goldens/plans``.

::

    PYTHONPATH=. python -m tests.unit.cli.test_plan_goldens    # writes them anew: a conscious act
"""

import io
import sys
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path

import pytest

from megatron.swap.cli import plan as program
from megatron.swap.planner.profile import save_profile
from tests.unit.planner.cases import random_profile

GOLDENS = Path(__file__).resolve().parents[2] / "goldens" / "plans"
MODEL = (
    "--bf16 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--transformer-impl transformer_engine --micro-batch-size 1 --global-batch-size 16 --num-layers 12 "
    "--hidden-size 2048 --ffn-hidden-size 5504 --num-attention-heads 16 --vocab-size 32000 --seq-length 8192 "
    "--max-position-embeddings 8192"
)
CASES = {
    "activations": f"--gpu h200 --memory-gib 22 --host-gib 100 -- {MODEL}",
    "a measured profile": "--profile profile.json --memory-gib 0.18",
    "optimizer": f"--gpu rtx4090 --memory-gib 14 --host-gib 56 -- {MODEL}",
    "stages": f"--gpu h100 --num-gpus 2 --memory-gib 16 -- {MODEL} --pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 3",
    "8 bits": f"--gpu h200 --memory-gib 20 -- {MODEL} --fp8-format hybrid --fp8-recipe blockwise",
    "loss in chunks": f"--gpu h200 --memory-gib 22 -- {MODEL} --swap-loss-chunks 4",
}
NIGHTLY = pytest.mark.nightly
WHEN = {"activations": (), "a measured profile": (), "8 bits": NIGHTLY, "loss in chunks": NIGHTLY}


def planned(name: str, folder: Path) -> dict[str, str]:
    """Return what is printed, and the plan file."""
    save_profile(random_profile(5), folder / "profile.json")
    options, _, flags = CASES[name].partition(" -- ")
    words = [*options.split(), "--table", "--save", "plan.json", *(["--", *flags.split()] if flags else [])]
    with chdir(folder), redirect_stdout(io.StringIO()) as said:
        status = program.main(words)
    assert status == 0, said.getvalue()
    return {f"{name}.txt": said.getvalue(), f"{name}.json": (folder / "plan.json").read_text()}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=WHEN.get(name, pytest.mark.slow)) for name in CASES
])  # fmt: skip
def test_it_is_as_it_was(name: str, tmp_path: Path) -> None:
    for file, text in planned(name, tmp_path).items():
        assert text == (GOLDENS / file).read_text()


if __name__ == "__main__":
    GOLDENS.mkdir(exist_ok=True)
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            for file, text in planned(name, Path(folder)).items():
                (GOLDENS / file).write_text(text)
                print(file, len(text), file=sys.stderr)
