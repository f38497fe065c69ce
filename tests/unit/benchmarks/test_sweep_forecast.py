"""The memory model against measured runs, and the values that it prunes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.sweeps.forecast import MARGIN, PROCESSES_GIB, Tiers, forecast
from benchmarks.sweeps.sweep import find_sweep, load_sweep
from megatron.swap.common.types import GIB, KIB, UsageError
from megatron.swap.forecast.flags import read_flags
from megatron.swap.forecast.gpus import find_gpu, gpu_of
from megatron.swap.forecast.states import States
from tests.unit.benchmarks.sweep_cases import SHAPE, TIERS

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"
H200 = find_gpu("h200")


def measured(file: str, case: str, method: str) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]
    return [row for row in rows if (row["case"], row["method"]) == (case, method) and row["outcome"] == "ok"]


@pytest.mark.parametrize(
    ("file", "case", "method"),
    [
        ("h200-dense.jsonl", "L16-h4096", "none"),
        ("h200-dense.jsonl", "L16-h4096", "full-recompute"),
        ("h200-dense.jsonl", "L16-h4096", "recompute-mlp"),
        ("h200-dense.jsonl", "L4-h8192", "ours-all"),
        ("h200-optimizer.jsonl", "8b", "megatron-0.5"),
        ("h200-depth-sweep.jsonl", "22 layers", "megatron-optimizer-0.5-full-recompute"),
        ("h200-depth-sweep.jsonl", "54 layers", "ours-auto"),
        ("h200-depth-sweep.jsonl", "18 layers", "megatron-optimizer-1"),
        ("h200-depth-sweep.jsonl", "34 layers", "megatron-optimizer-0.5-full-recompute"),
        ("h200-depth-sweep.jsonl", "38 layers", "megatron-optimizer-0.55-unpinned-full-recompute"),
        ("h200-optimizer.jsonl", "8b", "ours-0.5"),
        ("h200-optimizer.jsonl", "8b", "ours-0.3"),
        ("h200-depth-sweep.jsonl", "50 layers", "ours-fit"),
    ],
)
def test_what_was_measured_is_within_the_margin(file: str, case: str, method: str) -> None:
    rows = measured(file, case, method)
    assert rows
    for row in rows:
        # The row has the memory of the trainer, without that of the data loader's workers.
        predicted = forecast([*str(row["flags"]).split(), "--num-workers", "0"], TIERS, H200)
        assert not predicted.is_bound
        peak_gib, device = row["device_peak_gib"], predicted.of("device")
        assert device == pytest.approx(peak_gib, rel=MARGIN), (device, peak_gib)
        if "megatron" in method or "--swap-optimizer" in str(row["flags"]):
            assert predicted.of("host") == pytest.approx(row["host_peak_gib"], rel=0.07)


def shape(more: str, layers: int = 32) -> list[str]:
    return f"{SHAPE} --num-layers {layers} {more}".split()


def test_what_it_says_of_tiers() -> None:
    none = forecast(shape(""), TIERS, H200)
    half = forecast(shape("--swap-optimizer 0.5"), TIERS, H200)
    assert (none.of("host"), none.of("disk")) == (0.0, None)
    assert not none.fits
    assert none.excess is not None
    assert none.excess.tier == "device"
    assert half.fits
    assert half.excess is None
    params = 10.48e9
    assert half.of("host") == pytest.approx(0.5 * 10 * params / 2**30, rel=0.01)
    assert half.static_gib == pytest.approx((4 + 5) * params / 2**30, rel=0.01)


def test_a_plan_file_says_how_much_state_is_offloaded() -> None:
    sweep = load_sweep(find_sweep("h200-sequence"))
    for place, offloaded in (5, 0.0), (7, 0.125):
        trial = sweep.trial("ours-planned", place, TIERS, H200)
        assert trial.forecast.static_gib == pytest.approx((14 - offloaded * 10) * trial.params / 2**30, rel=0.01)
        assert trial.forecast.fits, "the plan was made for less than the device has"


def test_a_value_may_stand_behind_an_equals_sign() -> None:
    apart = forecast(shape("--swap-optimizer 0.5 --swap-host-gib 20"), TIERS, H200)
    assert forecast(shape("--swap-optimizer=0.5 --swap-host-gib=20"), TIERS, H200) == apart
    assert not apart.fits


def test_what_a_peer_may_take_is_no_flag_of_ours() -> None:
    flags = "--optimizer-cpu-offload --optimizer-offload-fraction 1 --num-workers 0"
    predicted = forecast(shape(f"{flags} --swap-host-gib 20", 18), TIERS, H200)
    (host,) = (need for need in predicted.needs if need.tier == "host")
    assert host.limit_gib == TIERS.host - PROCESSES_GIB


@pytest.mark.parametrize("disk_gib", [*(pytest.param(gib, marks=pytest.mark.slow) for gib in (20, 40)), 60])
def test_a_disk_makes_no_planned_model_smaller(disk_gib: int) -> None:
    flags = "--swap-memory-gib 134 --swap-optimizer auto --swap-host-gib 112"
    tiers = Tiers(139.8, 122.0, 60.0)
    assert forecast(shape(flags, 50), tiers, H200).fits
    assert forecast(shape(f"{flags} --swap-disk-dir /tmp --swap-disk-gib {disk_gib}", 50), tiers, H200).fits


def test_what_host_memory_has_no_room_for_goes_to_disk() -> None:
    flags = shape("--swap-optimizer 1 --swap-disk-dir /tmp --swap-disk-gib 60", 48)
    predicted = forecast(flags, Tiers(139.8, 118.0, 50.0), H200)
    params_gib = 15.55e9 / 2**30
    assert predicted.of("host") == pytest.approx(112 - 7 * (0.25 + 64 * KIB / GIB))
    assert predicted.of("disk") == pytest.approx(10 * params_gib - 110.25, rel=0.01)
    assert predicted.fits
    tight = forecast(flags, Tiers(139.8, 118.0, 20.0), H200)
    assert tight.excess is not None
    assert (tight.excess.tier, tight.excess.limit_gib) == ("disk", 20.0)


@pytest.mark.parametrize(
    "more",
    [
        "--fine-grained-activation-offloading --offload-modules core_attn",
        "--cpu-offloading-num-layers 3",
        "--num-experts 8",
    ],
)
def test_of_others_it_knows_the_least(more: str) -> None:
    predicted = forecast(shape(more), TIERS, H200)
    assert predicted.is_bound
    assert predicted.of("device") == predicted.static_gib


def test_megatrons_offload_has_gradients_in_fp32_wherever_its_state_is() -> None:
    """The model has 7.94 B parameters. Where gradients are in bf16 there are two of each."""
    flags = shape("--optimizer-cpu-offload --optimizer-offload-fraction 0.25 --num-workers 0", 24)
    predicted, gib = forecast(flags, TIERS, H200), 7.94e9 / 2**30
    assert predicted.static_gib == pytest.approx((4 + 0.75 * 16) * gib, rel=0.01)
    assert predicted.of("host") == pytest.approx(0.25 * 19.2 * gib, rel=0.01), "pinned gradients take 1.8 x their size"
    unpinned = forecast([*flags, "--no-pin-cpu-grads"], TIERS, H200)
    assert unpinned.of("host") == pytest.approx(0.25 * 16 * gib, rel=0.01)
    shared = forecast([*flags, "--context-parallel-size", "2", "--use-distributed-optimizer"], TIERS, H200)
    assert shared.of("host") == pytest.approx(predicted.of("host") / 2)
    in_fp32 = forecast([word for word in flags if word not in ("--main-grads-dtype", "bf16")], TIERS, H200)
    assert in_fp32.static_gib == pytest.approx((2 + 4 + 0.75 * 12) * gib, rel=0.01)


def test_workers_of_the_data_loader_keep_what_megatrons_offload_replaces() -> None:
    """What did not fit a machine with 122 GiB is predicted not to fit, and what fitted is predicted to fit."""
    rows = [json.loads(line) for line in (RESULTS / "h200-depth-sweep.jsonl").read_text().splitlines()]
    ran = [
        row for row in rows
        if row["method"].startswith("megatron-optimizer") and row["outcome"] != "pruned"
        and "--num-workers" not in row["flags"]
    ]  # fmt: skip
    assert {row["outcome"] for row in ran} == {"ok", "oom_host"}
    for row in ran:
        predicted = forecast(row["flags"].split(), Tiers(**row["tiers_gib"]), H200)
        assert predicted.fits == (row["outcome"] == "ok"), (row["method"], row["case"])


def test_a_peer_around_the_model_is_not_known() -> None:
    assert forecast(shape(""), TIERS, H200, by_flags=False).is_bound


def test_a_planned_run_takes_what_it_may() -> None:
    predicted = forecast(shape("--swap-memory-gib 130", 16), TIERS, H200)
    assert predicted.fits
    assert (predicted.of("device") or 0) <= 130
    near = forecast(shape("--swap-memory-gib 80", 16), TIERS, H200)
    assert (near.of("device") or 0) > (1 - MARGIN) * 80
    assert near.fits, "it could do with less"
    short = forecast(shape("--swap-memory-gib 60", 16), TIERS, H200)
    assert short.excess is not None
    assert short.excess.limit_gib == 60


@pytest.mark.slow
def test_what_may_rest_is_what_training_lets_rest() -> None:
    """Both take nine tenths of --swap-host-gib, however much the machine has."""
    flags = shape("--swap-optimizer auto --swap-memory-gib 136", 48)
    for host_gib in (122.0, 100.0):
        predicted = forecast(flags, Tiers(139.8, host_gib, 0.0), H200)
        assert predicted.static_gib == pytest.approx(14 * 15.55e9 / 2**30 - 0.9 * min(112.0, host_gib), rel=0.01)
        assert predicted.of("host") == pytest.approx(min(112.0, host_gib), rel=0.1)
        assert predicted.fits, "activations can do with less"
    disk = forecast([*flags, "--swap-disk-dir", "/tmp"], Tiers(139.8, 122.0, 80.0), H200)
    assert disk.static_gib == pytest.approx(14 * 15.55e9 / 2**30 - 0.9 * 56.0 - 80.0, rel=0.01)


def test_without_a_gpu_all_is_host_memory() -> None:
    flags = [word for word in shape("--transformer-impl local --swap-optimizer 0.5", 2) if word != "--bf16"]
    training = read_flags([word for word in flags if "aware" not in word])
    assert training.states == States(gradient_bytes=4, state_bytes=8, weight_bytes=4, offload_fraction=0.5)
    assert training.states.param_bytes == 16
    predicted = forecast(flags, Tiers(None, 1.0, 0.0), None)
    assert predicted.of("device") is None
    assert predicted.excess is not None
    assert (predicted.excess.tier, predicted.excess.limit_gib) == ("host", 1.0)


def test_wrong_flags_are_named() -> None:
    with pytest.raises(UsageError, match="--swap-host-gib lots: a number is expected"):
        forecast(shape("--swap-host-gib lots"), TIERS, H200)
    with pytest.raises(UsageError, match="--hidden-size is missing"):
        forecast(["--num-layers", "2"], TIERS, H200)


def test_gpus_by_their_name() -> None:
    assert gpu_of("NVIDIA H200") is H200
    assert gpu_of("NVIDIA H100 PCIe") is find_gpu("h100-pcie")
    assert gpu_of("NVIDIA T4") is None
    assert all(gpu.tflops < gpu.peak_tflops for gpu in (H200, find_gpu("h100"), find_gpu("l40s")))
