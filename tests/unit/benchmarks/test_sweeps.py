"""Sweeps: their files, the memory model beside measured runs, the search, rows, resuming, and the picture."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rows import Row, check_sweep_row, read_rows
from benchmarks.runner.grid import measure
from benchmarks.store import StoreError
from benchmarks.suites.toml_file import SuiteError
from benchmarks.sweeps.command import main
from benchmarks.sweeps.forecast import Tiers, forecast
from benchmarks.sweeps.results import Scene, SweepResults
from benchmarks.sweeps.search import following
from benchmarks.sweeps.sweep import Sweep, Trial, load_sweep, sweep_names
from benchmarks.sweeps.table import largest_by_method
from megatron.swap.common.types import GIB
from megatron.swap.forecast.gpus import find_gpu

H200 = find_gpu("h200")
SHAPE = """
--transformer-impl transformer_engine --bf16 --vocab-size 32000 --hidden-size 5120 --ffn-hidden-size 13824 --swiglu
--num-attention-heads 40 --seq-length 4096 --micro-batch-size 1 --untie-embeddings-and-output-weights
--use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype bf16 --swap-host-gib 112
"""
HEAD = """
description = "x"
device = "gpu"
axis = "depth"
first = 16
last = 80
step = 2
micro_batches = 8
time_limit_s = 60
host_limit_gib = 118
"""
METHODS = """
[methods]
none = "none"
deep = "torchtune-offload-one-stream"
ours = "ours --swap-optimizer fit + full-recompute"
"""
FILE = f'{HEAD}flags = """{SHAPE}"""\n{METHODS}'
MACHINE = {"gpu": "NVIDIA H200", "num_gpus": 1, "cores": 16, "device_memory_gib": 139.8}
FACTS: dict[str, Any] = {"versions": {"torch": "2"}, "machine": MACHINE, "commit": "c0ffee", "link": None}
TIERS = Tiers(139.8, 118.0, 0.0)
GOOD = {
    "step_ms_median": 1000.0, "step_ms_all": [1000.0], "first_step_ms": 2000.0, "tokens_per_step": 32768,
    "step_flops": 10**14, "num_params": None, "device_peak_gib": 100.0, "device_reserved_gib": 101.0,
    "device_static_gib": 90.0, "host_peak_gib": 5.0, "losses": [(10.0 - i / 10).hex() for i in range(20)],
}  # fmt: skip


def a_sweep(folder: Path, content: str = FILE) -> Sweep:
    path = folder / "small.toml"
    path.write_text(content)
    return load_sweep(str(path))


def results_in(sweep: Sweep, folder: Path, *methods: str, resume: bool = False, **facts: Any) -> SweepResults:
    scene = Scene({**FACTS, **facts}, TIERS, H200, "python tools/sweep.py")
    return SweepResults(sweep, methods or sweep.methods, folder / "rows.jsonl", scene, resume=resume)


class FakeTraining:
    """Trains what ``fits`` says, and records the requested runs."""

    def __init__(self, fits: Callable[[Trial], bool], stop_after: int | None = None):
        self.asked: list[tuple[str, int]] = []
        self._fits, self._stop_after = fits, stop_after

    def __call__(self, trial: Trial, _: Sequence[Trial]) -> dict[str, Any]:
        if len(self.asked) == self._stop_after:
            raise KeyboardInterrupt
        self.asked.append((trial.method.name, trial.value.number))
        if self._fits(trial):
            return {"outcome": "ok", **GOOD, "num_params": trial.params}
        return {"outcome": "oom_device", "output_tail": "its last words"}


def search(results: SweepResults, train: Callable[..., dict[str, Any]]) -> dict[str, list[Row]]:
    """Return the rows by method."""
    assert measure(results, None, train)
    rows = results.rows()
    return {name: [row for row in rows if row["method"] == name] for name in dict.fromkeys(r["method"] for r in rows)}


def layers(fits: int) -> Callable[[Trial], bool]:
    return lambda trial: trial.value.number <= fits


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "quick" else pytest.mark.slow) for name in sweep_names()]
)
def test_the_sweeps_that_are_here(name: str) -> None:
    sweep = load_sweep(name)
    assert sweep.methods["none"] == "none"
    tiers, gpu = (TIERS, H200) if sweep.on_gpu else (Tiers(None, 8.0, 8.0), None)
    for place, method in itertools.product((0, len(sweep.values) - 1), sweep.methods):
        trial = sweep.trial(method, place, tiers, gpu)
        assert trial.params > 0
        assert "fit" not in trial.flags
        assert sweep.request(trial).flags == trial.flags


def test_values_and_flags(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path, FILE.replace("none =", 'early = "ours --swap-layers 0-{value}"\nnone ='))
    assert [value.number for value in sweep.values] == list(range(16, 82, 2))
    trial = sweep.trial("early", 0, TIERS, H200)
    assert trial.flags[-4:] == ("--global-batch-size", "8", "--swap-layers", "0-16")
    assert (trial.label, trial.param_bytes) == ("early 16 layers", 14)


def test_the_part_that_fits_is_the_smallest(tmp_path: Path) -> None:
    """63 % would put 137.59 GiB on the device. PyTorch got 137.0, and that run failed. With 64 % it trained."""
    sweep = a_sweep(tmp_path)
    place = [value.number for value in sweep.values].index(58)
    trial = sweep.trial("ours", place, Tiers(139.8, 122.0, 0.0), H200)
    assert trial.flags[trial.flags.index("--swap-optimizer") + 1] == "0.64"
    assert trial.forecast.fullness < 1
    with pytest.raises(SuiteError, match=r"'fit' needs a prediction.* Give a fraction, 0 to 1, instead"):
        a_sweep(tmp_path, FILE.replace("--bf16", "--fp16")).trial("ours", 0, TIERS, H200)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('axis = "depth"', 'axis = "deep"', "axis = 'deep'; allowed: depth, width, family, sequence, micro-batch"),
        ("step = 2", "step = 0", "step = 0; at least 1"),
        ("first = 16", "values = [16, 8]\nfirst = 16", "8 layers: is no larger than 16 layers; values must grow"),
        ("micro_batches = 8", "micro_batches = 8\ntimed = 3", "unknown key 'timed'; allowed:"),
        ("--hidden-size 5120", "", "--hidden-size is missing"),
        ('"none"', '"ours --swap-layers {depth}"', "only {value} and {layers} are filled in"),
        ('"none"', '"ours --swap-memory-gib static+24"', "is relative to an unswapped run of the same size"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in FILE
    with pytest.raises(SuiteError, match=said) as error:
        a_sweep(tmp_path, FILE.replace(old, new))
    assert "small.toml" in str(error.value)


@pytest.mark.slow
def test_the_command_runs_nothing_where_it_should_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sweep", "h200-depth", "--dry-run", "--gpu", "h200", "--method", "none"]) == 0
    dry = capsys.readouterr().out
    assert "begins at 26 layers (8.58 B parameters): predicted 129.08 GiB of device" in dry
    assert "pruned from 30 layers on: 148.14 GiB of device memory, 139.80 GiB are there (the device's)" in dry


def shape(more: str, count: int = 32) -> list[str]:
    return f"{SHAPE} --num-layers {count} {more}".split()


def test_what_it_says_of_tiers() -> None:
    none, half = forecast(shape(""), TIERS, H200), forecast(shape("--swap-optimizer 0.5"), TIERS, H200)
    assert forecast(shape("--swap-optimizer=0.5"), TIERS, H200) == half
    assert (none.of("host"), none.of("disk"), none.fits, half.fits, half.excess) == (0.0, None, False, True, None)
    params_gib = 10.48e9 / GIB
    assert half.of("host") == pytest.approx(0.5 * 10 * params_gib, rel=0.01)
    assert half.static_gib == pytest.approx((4 + 5) * params_gib, rel=0.01)
    on_disk = shape("--swap-optimizer 1 --swap-disk-dir /tmp --swap-disk-gib 60", 48)
    predicted = forecast(on_disk, Tiers(139.8, 118.0, 50.0), H200)
    assert predicted.fits
    assert predicted.of("disk") == pytest.approx(10 * 15.55e9 / GIB - 110.25, rel=0.01)
    tight = forecast(on_disk, Tiers(139.8, 118.0, 20.0), H200)
    assert tight.excess is not None
    assert (tight.excess.tier, tight.excess.limit_gib) == ("disk", 20.0)
    assert forecast(shape("--num-experts 8"), TIERS, H200).is_bound


def path_of(count: int, start: int, trains: Callable[[int], bool], *, trusted: bool = True) -> list[int]:
    tried: dict[int, bool] = {}
    while (place := following(count, start, tried, trusted=trusted)) is not None:
        assert place not in tried
        tried[place] = trains(place)
    return list(tried)


def test_the_largest_is_found_from_everywhere() -> None:
    assert path_of(12, 11, lambda at: at <= 4, trusted=False) == [11, 5, 2, 3, 4], "from a bound it goes by halves"
    for trusted, start, largest in itertools.product((True, False), range(12), range(-1, 12)):
        tried = path_of(12, start, lambda at, largest=largest: at <= largest, trusted=trusted)
        assert max((at for at in tried if at <= largest), default=-1) == largest
        assert min((at for at in tried if at > largest), default=12) == largest + 1
        assert len(tried) <= 8


def test_a_search_begins_where_the_memory_model_says(tmp_path: Path) -> None:
    train = FakeTraining(lambda trial: trial.value.number <= {"none": 26, "deep": 20, "ours": 56}[trial.method.name])
    sweep = a_sweep(tmp_path)
    rows = search(results_in(sweep, tmp_path), train)
    assert train.asked[:2] == [("none", 26), ("none", 28)]
    assert ("ours", 54) in train.asked
    pruned = [row for row in rows["none"] if row["outcome"] == "pruned"]
    assert [row["values"] for row in pruned] == [list(range(30, 82, 2))]
    assert "30 layers is predicted to take 148.14 GiB of device memory, 139.80 GiB are there" in pruned[0]["why"]
    stored = read_rows(tmp_path / "rows.jsonl", check_sweep_row)
    found = {one.method: one for one in largest_by_method(stored)}
    best = {name: one.best["value"] for name, one in found.items() if one.best}
    assert best == {"deep": 20, "none": 26, "ours": 56}
    assert found["none"].stopped_by == "28 layers: out of device memory"
    for mine in rows.values():
        most = max(row["value"] for row in mine if row["outcome"] == "ok")
        larger = sorted(value for row in mine for value in row["values"] if value > most)
        assert larger == [value.number for value in sweep.values if value.number > most], "each was tried or pruned"


def test_interrupted_and_resumed_it_ends_as_it_would_have(tmp_path: Path) -> None:
    sweep, whole = a_sweep(tmp_path), FakeTraining(layers(24))
    search(results_in(sweep, tmp_path), whole)
    folder = tmp_path / "again"
    first, second = FakeTraining(layers(24), stop_after=len(whole.asked) // 2), FakeTraining(layers(24))
    with pytest.raises(KeyboardInterrupt):
        measure(results_in(sweep, folder), None, first)
    search(results_in(sweep, folder, resume=True), second)
    assert first.asked + second.asked == whole.asked
    with pytest.raises(StoreError, match=r"has commit 'c0ffee' for none .*this run has 'other'"):
        results_in(sweep, folder, resume=True, commit="other")
