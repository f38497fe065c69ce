"""One process: losses, gradient norms and the last checkpoint equal those without swapping to the bit."""

from __future__ import annotations

import pytest

from benchmarks.verify import MOE
from megatron.swap.common.types import GIB
from tests.integration.harness import (
    SWAP_SMALL,
    Trainer,
    assert_same_checkpoints,
    assert_same_training,
    assert_swaps_to_the_end,
    load_checkpoint,
    recorded,
)

MLA = (
    "--multi-latent-attention --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --kv-lora-rank 16 "
    "--q-lora-rank 16"
)
LLAMA = (
    "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)
EVALUATION = "--eval-interval 2 --eval-iters 2 --train-iters 4"


def case(name: str, flags: str, swap: str = "--swap-layers all", *, half: bool = False) -> object:
    """Run a case. ``half``: at its peak autograd holds at most half of the unswapped run's bytes."""
    return pytest.param(flags, swap, half, id=name)


@pytest.mark.supports
@pytest.mark.parametrize(
    ("flags", "swap", "half"),
    [
        case("fp32", "", "--swap-layers all --swap-verify", half=True),
        case("bf16", "--bf16", half=True),
        case("bf16-verify", "--bf16", "--swap-layers 0-7 --swap-verify"),
        case("dropout", "--attention-dropout 0.1 --hidden-dropout 0.1", half=True),
        case("dropout-bf16", "--bf16 --attention-dropout 0.1 --hidden-dropout 0.1", half=True),
        case("moe", MOE, "--swap-layers all --swap-verify", half=True),
        case("mla", MLA, half=True),
        case("mtp", "--mtp-num-layers 1"),
        case("fp16", "--fp16 --initial-loss-scale 1024", half=True),
        case("llama", LLAMA, half=True),
        case("llama-bf16", f"{LLAMA} --bf16", half=True),
        case("evaluation", EVALUATION, half=True),
        case("four-micro-batches", "--global-batch-size 8", half=True),
        case("given-mask", "--reset-attention-mask --reset-position-ids --eod-mask-loss"),
    ],
)
def test_equal_to_the_bit(trainer: Trainer, flags: str, swap: str, half: bool) -> None:
    plain, swapped = trainer.pair(flags, swap)
    assert_swaps_to_the_end(swapped)
    assert swapped.summary["num_late"] == 0
    if half:
        assert swapped.summary["saved_peak_bytes"] <= plain.summary["saved_peak_bytes"] / 2


@pytest.mark.parametrize(
    ("swap", "layers"),
    [
        ("--swap-layers 0,2-4", {0, 2, 3, 4}),
        ("--swap-layers every:3", {0, 3, 6}),
        ("--swap-layers 3-7 --swap-prefetch-gib 0.00001", {3, 4, 5, 6}),  # only the last layer stays
        ("--swap-layers all --swap-min-mib 0.1", {0, 1, 2, 3, 4, 5}),  # the window is one layer
    ],
)
def test_layer_sets_and_windows(trainer: Trainer, swap: str, layers: set[int]) -> None:
    _, swapped = trainer.pair("", swap)
    assert_swaps_to_the_end(swapped)
    assert set(swapped.summary["swapped_layers"]) == layers


def test_a_window_as_wide_as_the_model(trainer: Trainer) -> None:
    """The window would reload everything at once. So once the size of a layer is known, nothing is offloaded."""
    _, swapped = trainer.pair("", "--swap-layers all --swap-prefetch-gib 1")
    assert swapped.summary["swapped_out_bytes"] == 0


@pytest.mark.parametrize(
    "modules", ["mlp", "core_attention", "mlp.linear_fc1 self_attention.linear_qkv", "layer input_layernorm"]
)
def test_modules(trainer: Trainer, modules: str) -> None:
    plain, swapped = trainer.pair("", f"--swap-layers all --swap-modules {modules}")
    assert_swaps_to_the_end(swapped)
    assert swapped.summary["saved_peak_bytes"] < plain.summary["saved_peak_bytes"]
    every = trainer.run(f"{SWAP_SMALL} --swap-layers all --swap-summary summary.json")
    assert swapped.summary["swapped_out_bytes"] < every.summary["swapped_out_bytes"]


def test_what_others_hold_stays(trainer: Trainer) -> None:
    """Attention holds the input of ``linear_proj`` too, so offloading it would free no memory."""
    flags = "--swap-layers all --swap-modules linear_proj"
    run = trainer.run(f"{SWAP_SMALL} {flags} {recorded('torch')}")
    assert_same_training(trainer.unswapped(), run)
    assert run.summary["stayed_bytes"] > 0
    assert run.summary["swapped_out_bytes"] == 0


def test_checkpoints_of_the_distributed_format(trainer: Trainer) -> None:
    """``torch.distributed.checkpoint`` saves them, and the compared values are really in them."""
    _, swapped = trainer.pair("", saved="torch_dist")
    names = "\n".join(load_checkpoint(swapped.directory / "checkpoint"))
    assert "optimizer.state.exp_avg_sq" in names
    assert "mlp.linear_fc1.weight" in names


def test_the_comparison_sees_a_small_difference(trainer: Trainer) -> None:
    """Neither losses nor checkpoints are equal after a slightly larger step size."""
    other = trainer.run(f"--lr 1.000001e-3 {recorded('torch')}")
    with pytest.raises(AssertionError):
        assert_same_training(trainer.unswapped(), other)
    with pytest.raises(AssertionError, match="entries differ"):
        assert_same_checkpoints(trainer.unswapped().directory / "checkpoint", other.directory / "checkpoint")


@pytest.mark.parametrize(
    ("flags", "swap", "host_gib"),
    [("", "", 0.0073), ("--micro-batch-size 2", "--swap-verify", 0.0073), ("", "--swap-optimizer 1", 0.0195)],
)
def test_activations_on_disk_where_host_memory_is_short(
    trainer: Trainer, flags: str, swap: str, host_gib: float
) -> None:
    """Host memory has room for the buffers between disk and device, and little more."""
    plain = trainer.unswapped(flags)
    run = trainer.run(
        f"{SWAP_SMALL} {flags} --swap-layers all {swap} --swap-disk-dir . --swap-host-gib {host_gib} "
        f"{recorded('torch')}"
    )
    assert_same_training(plain, run)
    summary = run.summary
    assert summary["disk_leased_peak_bytes"] > 0
    assert summary["host_booked_bytes"] + summary["optimizer_host_bytes"] <= host_gib * GIB
    (rank,) = summary["ranks"]
    rows = {row["kind"]: row for row in rank["memory"]}
    assert rows["activations"]["disk_bytes"] == summary["disk_leased_peak_bytes"]
    on_disk = sum(row["disk_bytes"] for row in rows.values())
    assert on_disk == summary["disk_booked_bytes"] + summary["optimizer_disk_bytes"]


def test_the_planner_measures_host_memory_not_the_disk_behind_it(trainer: Trainer) -> None:
    """Measuring leaves nothing on the disk that training did not put there."""
    flags = "--train-iters 9 --lr-decay-iters 9"
    plain = trainer.unswapped(flags)
    run = trainer.run(
        f"{flags} {SWAP_SMALL} --swap-memory-gib 0.5 --swap-disk-dir . --swap-host-gib 0.5 {recorded('torch')}"
    )
    assert_same_training(plain, run)
    assert run.summary["disk_booked_bytes"] == 0
    assert run.summary["planning"]["stages"][-1]["stage"] == "stable"
