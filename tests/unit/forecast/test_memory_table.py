"""The memory table: predictions for each tier, with measurements beside them."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.swap.cli import plan as program
from megatron.swap.common.types import GIB, MemoryRow
from megatron.swap.forecast.states import split_before_disk
from megatron.swap.reporting.memory_report import measure
from megatron.swap.reporting.summary import RankReport, build_summary

FLAGS = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --swiglu --seq-length 8192 --micro-batch-size 1 --global-batch-size 16 --bf16 "
    "--vocab-size 128256 --untie-embeddings-and-output-weights --swap-optimizer 0.5"
)
OFFLOADED_GIB = 44.87
KINDS = ("weights", "gradients", "optimizer", "libraries", "activations", "buffers", "fragments", "together")
MEASURED = [
    MemoryRow("weights", 15 * GIB),
    MemoryRow("gradients", 30 * GIB),
    MemoryRow("optimizer", 44 * GIB, 28 * GIB, 17 * GIB),
    MemoryRow("activations", 37 * GIB, GIB),
    MemoryRow("buffers", 0, 2 * GIB, GIB // 4),
    MemoryRow("fragments", GIB // 2),
]


def printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, options: str, flags: str = FLAGS
) -> list[str]:
    """Return the lines of the memory table."""
    status = program.main(["--gpu", "h200", "--table", *options.split(), "--", *flags.split()])
    found = capsys.readouterr()
    if status:
        raise SystemExit(found.err)
    (table,) = (part for part in found.out.split("\n\n") if part.startswith("memory "))
    return table.splitlines()


def figures(lines: list[str], columns: int = 3) -> dict[str, list[float]]:
    rows = {line.split()[0]: line.split()[1 : 1 + columns] for line in lines[1:]}
    assert tuple(rows) == KINDS
    return {kind: [float(cell) for cell in row if cell[0].isdigit()] for kind, row in rows.items()}


def test_columns_add_up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    lines = printed(monkeypatch, capsys, "--host-gib 30", f"{FLAGS} --swap-disk-dir x")
    assert " ".join(lines[0].split()) == "memory device GiB host GiB disk GiB"
    found = figures(lines)
    together = found.pop("together")
    assert [sum(column) for column in zip(*found.values(), strict=True)] == pytest.approx(together, abs=0.04)


@pytest.mark.parametrize(
    ("options", "flags", "in_host", "buffers", "on_disk"),
    [
        ("", "--swap-disk-dir x --swap-host-gib 30", 28.25, 1.75, OFFLOADED_GIB - 28.25),
        ("--host-gib 20", "--swap-disk-dir x --swap-host-gib 30", 18.25, 1.75, OFFLOADED_GIB - 18.25),
        ("--host-gib 1.6", "--swap-disk-dir x", 0.9, 0.7, OFFLOADED_GIB - 0.9),  # smaller buffers
    ],
)
def test_bytes_beyond_host_memory_are_on_disk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture,
    options: str, flags: str, in_host: float, buffers: float, on_disk: float,
) -> None:  # fmt: skip
    found = figures(printed(monkeypatch, capsys, options, f"{FLAGS} {flags}"))
    assert found["optimizer"][1:] == pytest.approx([in_host, on_disk], abs=0.011)
    assert found["buffers"][1:] == pytest.approx([buffers, 0.0], abs=0.011)
    activations = found["activations"][1]
    assert found["together"][1:] == pytest.approx([in_host + buffers + activations, on_disk], abs=0.02)


@pytest.mark.parametrize("activations_gib", [0.0, 10.0, 300.0])
def test_all_bytes_have_a_tier(activations_gib: float) -> None:
    for host_gib in (0.0, 0.1, 2.0, 50.0, 400.0, math.inf):
        found = split_before_disk(100.0, host_gib, activations_gib)
        assert found.state_in_host + found.state_on_disk == pytest.approx(100.0)
        assert found.activations_in_host + found.activations_on_disk == pytest.approx(activations_gib)
        assert found.state_in_host + found.activations_in_host + found.buffers <= max(host_gib, found.buffers) + 1e-9
        assert min(found.state_in_host, found.activations_in_host) >= 0
    assert found.state_on_disk == found.activations_on_disk == 0


def summary_of(folder: Path, *ranks: list[MemoryRow] | None, num_layers: int = 32) -> Path:
    reports = [RankReport([], "cpu", None, None, 0, 0, 0, memory=rows) for rows in ranks]
    path = folder / "run.json"
    path.write_text(json.dumps(build_summary(num_layers, reports)))
    return path


def test_measurements_beside_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    options, flags = "--host-gib 30", f"{FLAGS} --swap-disk-dir x"
    alone = figures(printed(monkeypatch, capsys, options, flags))
    lines = printed(monkeypatch, capsys, f"{options} --summary {summary_of(tmp_path, MEASURED)}", flags)
    assert " ".join(lines[0].split()) == "memory device GiB measured host GiB measured disk GiB measured"
    found = figures(lines, columns=6)
    assert found.pop("libraries")[:3] == alone["libraries"]  # not measured
    assert {kind: row[::2] for kind, row in found.items()} == {kind: alone[kind] for kind in found}
    assert {kind: row[1::2] for kind, row in found.items()} == {
        "weights": [15, 0, 0], "gradients": [30, 0, 0], "optimizer": [44, 28, 17], "activations": [37, 1, 0],
        "buffers": [0, 2, 0.25], "fragments": [0.5, 0, 0], "together": [126.5, 31, 17.25],
    }  # fmt: skip
    ends = [line.rindex(cell) + len(cell) for line, cell in ((lines[0], "measured"), (lines[3], "17.00"))]
    assert ends[0] == ends[1]


def test_every_kind_that_is_measured_has_a_row() -> None:
    """The sum would otherwise contain bytes that no row shows."""
    device = SimpleNamespace(torch_device=torch.device("cpu"), peak_reserved_bytes=lambda: None)
    rows = measure(RankReport([], "cpu", None, None, 0, 0, 0), device, [], [])  # type: ignore[arg-type]
    assert {row.kind for row in rows} == {row.kind for row in MEASURED} <= set(KINDS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"No such file"),
        ("{", r"is not what --swap-summary writes today \(JSONDecodeError"),
        ('{"num_layers": 32, "ranks": [{"memory": null}]}', r"memory: null is given; it must be a list"),
        (json.dumps({"num_layers": 4, "ranks": [{"memory": [asdict(MEASURED[0])]}]}), r"is of 4 layers, .* say 32"),
    ],
)
def test_invalid_summaries_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, content: str | None, message: str
) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit, match=rf"^error: .*{message}"):
        printed(monkeypatch, capsys, f"--summary {path}")
