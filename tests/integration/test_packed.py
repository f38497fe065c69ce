"""Packed documents through the real trainer: equal to the bit, whatever the documents' lengths.

Megatron packs them for TransformerEngine's attention alone. On the CPU ``packed_script.py`` stands in for it.
"""

import random
from pathlib import Path

import pytest
import torch

from megatron.swap.common.types import GIB
from tests.integration.harness import SWAP_SMALL, Run, Trainer, assert_same_training, assert_swapped, recorded
from tests.integration.rows import EVERY_KIND, FUSED_LLAMA, OF_DOCUMENTS
from tests.integration.rows import PACKED as FLAG
from tests.integration.test_fp8 import MODEL, SMALL
from tools.indexed_text import BYTE_LEVEL_FLAGS, write_byte_level

PACKED = Path(__file__).with_name("packed_script.py")
LENGTHS = (1, 2, 5, 13, 39)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return flags for documents of 2 to 40 tokens: a sample of 64 has two to some twenty of them."""
    drawn = random.Random(1)
    texts = ["".join(drawn.choices("abcdefgh", k=drawn.choice(LENGTHS))) for _ in range(600)]
    prefix = tmp_path_factory.mktemp("documents") / "short"
    write_byte_level(prefix, texts)
    return f"^--mock-data --data-path {prefix} --split 100,0,0 {BYTE_LEVEL_FLAGS}"


def compared(trainer: Trainer, flags: str, swap: str, ranks: int = 1) -> Run:
    """Return the run with swapping, which equals the run without."""
    run = trainer.run(f"{flags} {SWAP_SMALL} {swap} {recorded('torch')}", ranks=ranks, program=PACKED)
    assert_same_training(trainer.unswapped(flags, ranks=ranks, program=PACKED), run)
    return run


@pytest.mark.parametrize(("flags", "swap", "ranks"), [
    pytest.param(*run, id=name, marks=[pytest.mark.nightly] * (run[2] > 1)) for name, run in OF_DOCUMENTS.items()
])  # fmt: skip
def test_equal_to_the_bit(trainer: Trainer, documents: str, flags: str, swap: str, ranks: int) -> None:
    run = compared(trainer, f"{documents} {FLAG} {flags}", swap, ranks)
    assert_swapped(run)
    assert (run.summary["recomputed_bytes"] > 0) == ("--swap-recompute" in swap)
    assert run.summary["num_late"] == 0
    assert not [line for line in run.summary["recompute_refused"] if "different bits" in line]


@pytest.mark.nightly
def test_a_planner_is_not_disturbed_by_their_number(trainer: Trainer, documents: str) -> None:
    """Unfused rotary embeddings save some tensors of each document: more or fewer in each step, as many bytes."""
    flags = f"{documents} {FLAG} {FUSED_LLAMA} --train-iters 14 --lr-decay-iters 14"
    budget_gib = 0.6 * trainer.unswapped(flags, program=PACKED).summary["saved_peak_bytes"] / GIB
    run = compared(trainer, flags, f"--swap-memory-gib {budget_gib}")
    planning = run.summary["planning"]
    assert planning["stages"][-1]["stage"] == "stable", planning
    assert planning["num_replans"] == 0
    assert run.summary["saved_peak_bytes"] <= budget_gib * GIB
    last = run.summary["steps"][-1]
    assert last["swapped_out_bytes"] + last["recomputed_bytes"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(trainer: Trainer, documents: str, tmp_path: Path) -> None:
    """With TransformerEngine's attention and fused rotary embedding: swapped, recomputed, planned, in chunks."""
    pytest.importorskip("transformer_engine.pytorch")
    flags = f"{MODEL} {documents} --group-query-attention --num-query-groups 2 --train-iters 24 --lr-decay-iters 24"

    def trained(more: str) -> Run:
        return trainer.run(f"{flags} {more} {recorded('torch')}", env={"CUDA_VISIBLE_DEVICES": "0"})

    plan, plain = tmp_path / "plan.json", trained(f"{FLAG} --swap-layers none")
    assert plain.summary["losses"] != trained("--swap-layers none").summary["losses"], "documents see one another"
    swapped = trained(f"{FLAG} {SMALL} --swap-layers all {EVERY_KIND} --swap-verify --swap-save-plan {plan}")
    by_plan = trained(f"{FLAG} {SMALL} --swap-plan {plan} --swap-loss-chunks 1")
    for run in (swapped, by_plan):
        assert_same_training(plain, run)
        assert_swapped(run)
        assert run.summary["recomputed_bytes"] > 0
        assert not [line for line in run.summary["recompute_refused"] if "different bits" in line]
    planned = trained(f"{FLAG} {SMALL} --swap-memory-fraction 0.9")
    assert_same_training(plain, planned)
    assert planned.summary["planning"]["stages"][-1]["stage"] == "stable"
