"""Sweep files: the committed ones are valid, and messages for wrong ones say what to change."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from benchmarks.suites.toml_file import SuiteError
from benchmarks.sweeps.command import main
from benchmarks.sweeps.forecast import Tiers
from benchmarks.sweeps.sweep import find_sweep, load_sweep, sweep_names
from megatron.swap.forecast.gpus import find_gpu
from tests.unit.benchmarks.sweep_cases import FILE, HEAD, METHODS, SHAPE, TIERS, a_sweep

H200 = find_gpu("h200")


@pytest.mark.parametrize("name", sweep_names())
def test_the_sweeps_that_are_here(name: str) -> None:
    sweep = load_sweep(find_sweep(name))
    assert sweep.methods["none"] == "none"
    for place in (0, len(sweep.values) - 1):
        for method in sweep.methods:
            tiers, gpu = (TIERS, H200) if sweep.on_gpu else (Tiers(None, 8.0, 8.0), None)
            trial = sweep.trial(method, place, tiers, gpu)
            assert trial.params > 0
            assert "fit" not in trial.flags
            assert sweep.request(trial).flags == trial.flags
    if name in ("h200-depth", "h200-family", "h200-width"):  # what the acceptance of the largest model asks for
        words = sweep.values[0].flags
        flag = {word: words[at + 1] for at, word in enumerate(words[:-1]) if word.startswith("--")}
        assert int(flag["--seq-length"]) >= 4096
        assert int(flag["--global-batch-size"]) >= 8
        assert flag["--train-iters"] == "20"


def test_values_and_flags(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path, FILE.replace("none =", 'early = "ours --swap-layers 0-{value}"\nnone ='))
    assert [value.number for value in sweep.values] == list(range(16, 82, 2))
    trial = sweep.trial("early", 0, TIERS, H200)
    assert trial.flags[-2:] == ("--swap-layers", "0-16")
    assert trial.flags[-4:-2] == ("--global-batch-size", "8")
    assert (trial.label, trial.param_bytes) == ("early 16 layers", 14)


def test_the_part_that_rests_leaves_cuda_its_share_of_the_device(tmp_path: Path) -> None:
    """63 % would put 137.59 GiB on the device. PyTorch got 137.0, and that run failed. With 64 % it trained."""
    sweep = a_sweep(tmp_path)
    place = [value.number for value in sweep.values].index(58)
    trial = sweep.trial("ours", place, Tiers(139.8, 122.0, 0.0), H200)
    assert trial.flags[trial.flags.index("--swap-optimizer") + 1] == "0.64"
    assert trial.forecast.fullness < 1


def test_widths_keep_their_ratios(tmp_path: Path) -> None:
    head = HEAD.replace('"depth"', '"width"').replace("first = 16", "first = 2048").replace("last = 80", "last = 8192")
    head = head.replace("step = 2", "factor = 2")
    narrow = SHAPE.replace("--hidden-size 5120 --ffn-hidden-size 13824", "--num-layers 4").replace(
        "--num-attention-heads 40", ""
    )
    sweep = a_sweep(tmp_path, f'{head}ffn_ratio = 2.7\nflags = """{narrow}"""\n{METHODS}')
    assert [value.label for value in sweep.values] == ["hidden size 2048", "hidden size 4096", "hidden size 8192"]
    flags = " ".join(sweep.values[1].flags)
    assert "--hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32" in flags


def test_the_part_that_fits_is_the_smallest(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path)
    numbers = [value.number for value in sweep.values]
    parts = {}
    for layers in (24, 32, 48, 58):
        trial = sweep.trial("ours", numbers.index(layers), TIERS, H200)
        parts[layers] = float(trial.flags[trial.flags.index("--swap-optimizer") + 1])
        text = f"ours --swap-optimizer {parts[layers] - 0.01:g} + full-recompute"
        less = sweep._trial("ours", text, numbers.index(layers), TIERS, H200)
        assert trial.forecast.fits == (layers < 58)
        assert layers == 58 or parts[layers] == 0.01 or not less.forecast.fits
    assert parts[24] == 0.01
    assert parts[24] < parts[32] < parts[48] < parts[58]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('axis = "depth"', 'axis = "deep"', "axis = 'deep'; allowed: depth, width, family, sequence, micro-batch"),
        ('device = "gpu"', 'device = "tpu"', "device = 'tpu'; allowed: cpu, gpu"),
        ("first = 16", "", "key 'first' is missing"),
        ("step = 2", "", "key 'step' is missing"),
        ("step = 2", "step = 0", "step = 0; at least 1"),
        ("last = 80", "last = 8", "last = 8; at least first, 16"),
        ("first = 16", "values = [16, 8]\nfirst = 16", "8 layers: is no larger than 16 layers; values must grow"),
        ("first = 16", 'values = ["x"]', r"values = \['x'\]; expected: whole numbers from 1 on"),
        ("micro_batches = 8", "micro_batches = 0", "micro_batches = 0; at least 1"),
        ("micro_batches = 8", "micro_batches = 8\nnum_steps = 3", "num_steps = 3; at least 4"),
        ("micro_batches = 8", "micro_batches = 8\ntimed = 3", "unknown key 'timed'; allowed:"),
        ("--micro-batch-size 1", "", "the flags have no --micro-batch-size"),
        ("--hidden-size 5120", "", "--hidden-size is missing"),
        ('"none"', '"nothing"', "'nothing' is no kind of method; known: none"),
        ('"none"', '"ours --swap-layers {depth}"', "only {value} and {layers} are filled in"),
        ('"none"', '"ours --swap-memory-gib static+24"', "is relative to an unswapped run of the same size"),
        ('"none"', "3", "none = 3; expected: str"),
        ('description = "x"', "description = ", "not TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in FILE
    with pytest.raises(SuiteError, match=said) as error:
        a_sweep(tmp_path, FILE.replace(old, new))
    assert "small.toml" in str(error.value)


def test_fit_needs_a_prediction(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path, FILE.replace("--bf16", "--fp16"))
    with pytest.raises(SuiteError, match=r"'fit' needs a prediction.* Give a fraction, 0 to 1, instead"):
        sweep.trial("ours", 0, TIERS, H200)


@pytest.mark.parametrize("form", ["--swap-disk-dir {} --swap-disk-gib 7", "--swap-disk-dir={} --swap-disk-gib=7"])
def test_of_an_assumed_machine_the_disk_is_what_the_sweep_says(form: str, tmp_path: Path) -> None:
    flags = form.format(tmp_path / "not-here")
    sweep = a_sweep(tmp_path, FILE.replace("--swap-optimizer fit", f"--swap-optimizer fit {flags}"))
    assert (sweep.disk_gib(), sweep.disk_gib(assumed=True)) == (0.0, 7.0)
    folder_alone = flags.partition(" --swap-disk-gib")[0]
    says_nothing = a_sweep(tmp_path, FILE.replace("--swap-optimizer fit", f"--swap-optimizer fit {folder_alone}"))
    assert says_nothing.disk_gib(assumed=True) == 0.0


def test_names_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match=r"--method other: there is none of that name; there are none, deep, ours"):
        a_sweep(tmp_path).chosen(["other"])
    with pytest.raises(SuiteError, match="--sweep slow: no such sweep; there are h200-depth"):
        find_sweep("slow")


def test_the_command_runs_nothing_where_it_should_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(["--sweep", "h200-depth", "--dry-run", "--gpu", "h200", "--method", "none", "ours-fit"]) == 0
    dry = capsys.readouterr().out
    assert "begins at 26 layers (8.58 B parameters): predicted 129.08 GiB of device" in dry
    assert "pruned from 30 layers on: 148.14 GiB of device memory, 139.80 GiB are there (the device's)" in dry
    with pytest.raises(SystemExit) as ended:
        main(["--sweep", "quick", "--gpu", "h200"])
    assert ended.value.code == 2
    assert "--gpu needs --dry-run" in capsys.readouterr().err
    assert main(["--sweep", "quick", "--dry-run", "--gpu", "k80"]) == 1
    assert "--gpu k80: is not in the table" in capsys.readouterr().err
