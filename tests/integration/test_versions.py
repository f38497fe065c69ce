"""Each version of Megatron that the patches fit trains with and without swapping to the same bits.

``tests/support.py`` makes the table of versions in docs/reference/support.md from ``CASES`` and ``REFUSED``.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.swap.common.types import GIB
from megatron.swap.patches.registry import VERSIONS
from tests.commands import guides_script
from tests.integration.harness import SWAP_SMALL, Run, Trainer, Zygote, assert_same_training, recorded
from tests.integration.rows import FULL, FUSED_LLAMA, KINDS, MOE, PLANNING
from tests.integration.test_gradient_fusion import FUSION, assert_added_alike
from tests.integration.versions import folder_of
from tests.pages import DOCS
from tests.sizes import IS_NIGHTLY, sized

OLDEST, *_ = MEGATRON = VERSIONS["megatron-core"]
PROVIDER = Path(__file__).with_name("provider_script.py")


CASES = {
    "offload, with half of the optimizer state": ("--bf16", "--swap-layers all --swap-optimizer 0.5", 1),
    "recompute: all kinds": (f"--bf16 {FUSED_LLAMA}", f"--swap-layers 0-3 {KINDS}", 1),
    "Megatron's full recomputation": (f"--bf16 {FULL} uniform", "--swap-layers all", 1),
    "two data-parallel ranks, distributed optimizer":
        ("--bf16 --use-distributed-optimizer", "--swap-layers all --swap-optimizer 1", 2),
    "experts, two pipeline stages of two chunks":
        (f"{MOE} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", "--swap-layers all", 2),
}  # fmt: skip
"""Flags of Megatron, ours, and ranks, by the feature that they use."""
MTP = "`--mtp-num-layers 1`"
REFUSED = {MTP: ("0.18.2",)}
"""Versions that refuse a feature, by name, before the model is built."""
EQUAL = (
    *CASES, "planner", "`--gradient-accumulation-fusion`", "`swap.pretrain` with a model provider",
    "the script of [start](../guide/start.md)",
)  # fmt: skip
"""Features whose runs are equal to the bit with each version."""

OF_MEGATRON = """
import megatron.core, megatron.training
print("megatron", megatron.core.__version__, megatron.core.__file__, megatron.training.__file__, megatron.swap.__file__)
"""


@pytest.fixture(params=[OLDEST, *(pytest.param(version, marks=pytest.mark.nightly) for version in MEGATRON[1:])])
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def trainer(version: str, zygote: Zygote, tmp_path: Path, shared_runs: Path) -> Iterator[Trainer]:
    """Runs training with a version. The installed one shares its processes and unswapped runs with other tests."""
    folder = folder_of(version)
    if folder is None:
        yield Trainer(zygote, tmp_path, shared_runs)
        return
    with Zygote(folder) as other:
        yield Trainer(other, tmp_path, tmp_path)


def pair(trainer: Trainer, flags: str, swap: str, **options: Any) -> Run:
    plain = trainer.unswapped(flags, ranks=options.get("ranks", 1), saved="torch")
    run = trainer.run(f"{flags} {SWAP_SMALL} {swap} {recorded('torch')}", **options)
    assert_same_training(plain, run)
    return run


def test_equal_to_the_bit(trainer: Trainer, version: str, tmp_path: Path) -> None:
    """All in one test: a process that has imported Megatron forks all runs of a version. ``--all`` has the first."""
    assert_is_of(version, trainer, tmp_path)
    for flags, swap, ranks in [*CASES.values()][: sized(1, nightly=len(CASES))]:
        swapped = pair(trainer, flags, swap, ranks=ranks)
        assert "swap: without" not in swapped.output, swapped.tail
    if not IS_NIGHTLY:
        return
    budget_gib = 0.7 * trainer.unswapped(PLANNING, saved="torch").summary["saved_peak_bytes"] / GIB
    planned = pair(trainer, PLANNING, f"--swap-memory-gib {budget_gib}")
    assert planned.summary["planning"]["stages"][-1]["stage"] == "stable"
    pair(trainer, "", "--swap-layers all", program=PROVIDER)
    assert_added_alike(trainer, FUSION, ["--swap-layers all"])
    own = tmp_path / "own_pretrain.py"
    own.write_text(guides_script())
    losses = {
        layers: re.findall(r"lm loss: (\S+)", trainer.run(f"--swap-layers {layers} {SWAP_SMALL}", program=own).output)
        for layers in ("none", "all")
    }
    assert losses["none"] == losses["all"]
    assert len(set(losses["all"])) == 3
    if version in REFUSED[MTP]:
        run = trainer.failing(f"--mtp-num-layers 1 {SWAP_SMALL} --swap-layers all")
        assert "--mtp-num-layers: this Megatron makes no such model from flags" in run.error


def assert_is_of(version: str, trainer: Trainer, folder: Path) -> None:
    """Check that trainers import Megatron ``version`` from where it is meant to be, and our portion beside it."""
    program = folder / "version.py"
    program.write_text(OF_MEGATRON)
    _, found, core, training, ours = trainer.run(program=program).output.split()
    assert found.split("+")[0] == version
    where = folder_of(version)
    assert (where is None) or all(Path(path).is_relative_to(where) for path in (core, training))
    assert Path(ours).is_relative_to(DOCS.parent)
