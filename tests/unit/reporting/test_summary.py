"""Output for users: tables, the step line, the JSON file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.swap.common.counters import Totals
from megatron.swap.common.plan import Model, Plan, PlanClass, SitePlan
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import MIB, Site
from megatron.swap.devices.cuda import expands_segments
from megatron.swap.reporting.summary import (
    RankReport,
    StepRecord,
    build_summary,
    device_line,
    idle_line,
    layer_table,
    refused_lines,
    start_table,
    step_line,
    write_json,
)


def step(iteration: int, layers: dict[int, tuple[int, int]], loss: float | None, wait_ms: float = 1.0) -> StepRecord:
    moved = Totals(layers, len(layers), num_late=1, num_out_copies=3, num_in_copies=2, wait_ms=wait_ms)
    return StepRecord(iteration, moved, loss, None if loss is None else 2.5)


def rank(steps: list[StepRecord], layers: list[int], **changes: object) -> RankReport:
    figures: dict = {
        "device": "cpu (emulation)",
        "device_peak_bytes": None,
        "saved_peak_bytes": 100,
        "host_booked_bytes": 50,
        "host_leased_peak_bytes": 40,
        "stayed_bytes": 7,
        **changes,
    }
    return RankReport(steps=steps, swapped_layers=layers, **figures)


def test_the_step_line_has_bytes_and_stall_and_the_peak_where_there_is_one():
    line = step_line(step(1, {0: (3 * MIB, 2 * MIB)}, None, wait_ms=4.25), None)
    assert "out 3.00 MiB" in line
    assert "in 2.00 MiB" in line
    assert "4.2 ms" in line
    assert "peak" not in line
    assert "device peak 412 MiB" in step_line(step(1, {}, None), 412 * MIB)


def test_the_device_line_has_what_is_held_and_says_what_leaves_fewer_fragments():
    whole = build_summary(1, [rank([], [], device_peak_bytes=100 * MIB, device_reserved_bytes=120 * MIB)])
    line = device_line(whole, expands=False)
    assert line is not None
    assert "at most 120 MiB, 100 MiB of it in use" in line
    assert "expandable_segments:True" in line
    assert "expandable" not in str(device_line(whole, expands=True))
    tight = build_summary(1, [rank([], [], device_peak_bytes=100 * MIB, device_reserved_bytes=101 * MIB)])
    assert "expandable" not in str(device_line(tight, expands=False))
    assert device_line(build_summary(1, [rank([], [])]), expands=False) is None


@pytest.mark.parametrize(("retries", "expected"), [([0, 3, 1, 0], None), ([5, 0, 1, 2], "in 3 steps it was full")])
@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_device_that_is_full_in_many_steps_is_reported(retries: list[int], expected: str | None, full_rank: int):
    ranks = []
    for number in (0, 1):
        counts = retries if number == full_rank else [0] * 4
        steps = [replace(step(i, {}, None), num_alloc_retries=count) for i, count in enumerate(counts)]
        ranks.append(rank(steps, [], device_peak_bytes=100 * MIB, device_reserved_bytes=101 * MIB))
    full = build_summary(1, ranks)
    assert full["num_alloc_retries"] == sum(retries)
    assert [one["num_alloc_retries"] for one in full["steps"]] == (retries if full_rank == 0 else [0] * 4)
    line = str(device_line(full, expands=True))
    assert ("was full" in line) is (expected is not None)
    assert (expected or "") in line


class TestBuildSummary:
    def test_bytes_add_up_over_ranks_and_peaks_are_the_worst(self):
        first = rank([step(1, {0: (9, 9)}, None), step(2, {0: (10, 8)}, None, 5.0)], [0], saved_peak_bytes=300)
        second = rank([step(1, {1: (1, 1)}, 3.5), step(2, {1: (20, 15)}, 3.25, 2.0)], [1], device_peak_bytes=77)
        summary = build_summary(3, [first, second])
        assert summary["num_layers"] == 3
        assert summary["num_ranks"] == 2
        assert summary["swapped_layers"] == [0, 1]
        assert (summary["swapped_out_bytes"], summary["swapped_in_bytes"], summary["num_groups"]) == (30, 23, 2)
        assert summary["wait_ms"] == 5.0
        assert (summary["saved_peak_bytes"], summary["device_peak_bytes"]) == (300, 77)
        assert (summary["host_booked_bytes"], summary["host_leased_peak_bytes"]) == (100, 80)
        assert (summary["num_late"], summary["stayed_bytes"]) == (2, 14)
        assert [entry["swapped_out_bytes"] for entry in summary["layers"]] == [10, 20, 0]
        assert [entry["iteration"] for entry in summary["steps"]] == [1, 2]

    def test_losses_come_from_the_rank_that_has_them_and_keep_every_bit(self):
        losses = [1 / 3, 0.1, 2.0]
        last = rank([step(i, {}, loss) for i, loss in enumerate(losses)], [])
        summary = build_summary(1, [rank([step(0, {}, None)], []), last])
        assert [float.fromhex(text) for text in summary["losses"]] == losses
        assert [float.fromhex(text) for text in summary["grad_norms"]] == [2.5] * 3

    def test_it_holds_what_was_promised_and_is_json(self, tmp_path: Path):
        summary = build_summary(2, [rank([step(0, {0: (1, 1)}, 1.0)], [0])])
        promised = """num_layers swapped_layers swapped_out_bytes swapped_in_bytes num_groups host_booked_bytes
            host_leased_peak_bytes wait_ms device_peak_bytes saved_peak_bytes losses device layers steps"""
        assert set(promised.split()) <= set(summary)
        target = tmp_path / "new" / "folder" / "summary.json"
        for _ in range(2):  # the second replaces the first
            write_json(str(target), summary)
            assert json.loads(target.read_text()) == json.loads(json.dumps(summary))
        assert [path.name for path in target.parent.iterdir()] == ["summary.json"]


def test_either_variable_tells_whether_segments_expand(monkeypatch: pytest.MonkeyPatch):
    for name, value, expands in (
        ("PYTORCH_CUDA_ALLOC_CONF", "", False), ("PYTORCH_ALLOC_CONF", "expandable_segments: true", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", False),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            for one in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
                patch.delenv(one, raising=False)
            patch.setenv(name, value)
            assert expands_segments() is expands


def test_the_table_at_the_end_joins_layers_with_equal_figures():
    figures = [(MIB, MIB), (MIB, MIB), (0, 0), (MIB, MIB)]
    layers = [
        {"layer": layer, "swapped_out_bytes": out, "swapped_in_bytes": back}
        for layer, (out, back) in enumerate(figures)
    ]
    text = layer_table({"layers": layers})
    rows = [line.split() for line in text.splitlines()[2:]]
    assert [row[0] for row in rows] == ["0-1", "2", "3"]
    assert rows[0][-2:] == ["2.00", "MiB"]
    assert len({len(line) for line in text.splitlines()}) == 1, "columns line up"
    layers = [{"layer": 0, "swapped_out_bytes": 0, "swapped_in_bytes": 0}]
    assert "--swap-min-mib" in layer_table({"layers": layers, "planning": None})
    assert "plan" in layer_table({"layers": layers, "planning": {}})
    assert "--swap-min-mib" not in layer_table({"layers": layers, "planning": {}})


def test_the_table_at_the_start_names_layers_tail_and_memory():
    text = "\n".join(start_table(Settings(layers="all"), 24, 512 * MIB, 4096 * MIB))
    for word in ("0-23 of 24", "all modules", "22-23", "512 MiB", "4.00 GiB"):
        assert word in text
    config = Settings(layers="0,1", modules=("mlp",), prefetch_gib=2)
    narrow = "\n".join(start_table(config, 24, 0, MIB))
    for word in ("0-1 of 24", "mlp", "none", "2.00 GiB"):
        assert word in narrow
    model = Model(24, 64, 256, 4, 4, 64, 2, 256, "local", "fp32", gated=False)
    classes = (
        PlanClass("0-3", {"mlp/0": SitePlan("swap")}), PlanClass("22-23", {"mlp/0": SitePlan("swap")}),
        PlanClass("5", {"norm/0": SitePlan("recompute")}), PlanClass("7", {}, ("layer",)),
    )  # fmt: skip
    plan = Plan(model, None, None, None, classes)
    planned = "\n".join(start_table(Settings(plan=plan), 24, 0, MIB))
    recomputed = "recomputed       layers 5, 7 of"
    for word in ("0-3, 22-23 of 24: the sites that the plan names", "22-23: backward", recomputed):
        assert word in planned
    for settings in (Settings(layers="0"), Settings(policy="auto")):
        lines = start_table(settings, 4, 0, MIB, needs="at least 1 GiB")
        assert lines[0] == "memory           at least 1 GiB"
    assert start_table(Settings(layers="0"), 4, 0, MIB, needs="x")[1].startswith("chosen ")


def test_sites_that_are_not_recomputed_are_grouped_by_reason():
    refused = [(Site(0, "mlp", 1), "too big"), (Site(1, "mlp", 1), "too big"), (Site(1, "layer", 0), "no kernel")]
    assert refused_lines(refused) == [
        "not recomputed: layers.0/mlp/1 and 1 more: too big",
        "not recomputed: layers.1/layer/0: no kernel",
    ]
    assert refused_lines([]) == []
    assert "--swap-recompute norm does nothing" in idle_line("norm")


def test_recomputed_bytes_add_up_and_reasons_are_told_once():
    moved = Totals(recomputed_bytes=3 * MIB, num_recomputed=2)
    ranks = [rank([StepRecord(1, moved, 1.0, 1.0)], [], recompute_refused=["layers.0/mlp/1: why"]) for _ in range(2)]
    summary = build_summary(1, ranks)
    assert (summary["recomputed_bytes"], summary["num_recomputed"]) == (6 * MIB, 4)
    assert summary["recompute_refused"] == ["layers.0/mlp/1: why"]
    assert summary["steps"][0]["recomputed_bytes"] == 3 * MIB
    assert "recomputed 3.00 MiB" in step_line(ranks[0].steps[0], None)
