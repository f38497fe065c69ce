"""Names that users and tools rely on, and that no move of modules may change: flags, keys of files, range names, import
paths.

``tests/goldens`` has it as it was; ``python -m tests.integration.test_goldens`` writes it anew, which is a conscious
act. Looked at from outside alone (programs, public import paths), so that modules may move. Flags, names that are
imported and suites may come on top; keys, scalars and ranges are compared as whole sets.
"""

import argparse
import contextlib
import dataclasses
import functools
import gzip
import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.suites import command as bench
from benchmarks.suites.suite import suite_names
from benchmarks.sweeps import command as sweep
from benchmarks.sweeps.sweep import SWEEPS, sweep_names
from tests.integration.harness import ROOT, SWAP_SMALL, Trainer, Zygote, environment

GOLDENS = ROOT / "tests" / "goldens"
VARYING = Path(__file__).with_name("varying_script.py")
PATIENCE_S = 240.0

ROWS = {
    "bench": "--suite quick --case L6-h64 --method ours-all",
    # One run that works, one that is refused: rows of both kinds.
    "verify": "equality --case tiny --spec local --steps 5 --settings '--swap-layers 0-99'",
    "sweep": "--sweep smallest.toml",
}

MODULES = {
    "megatron.swap": (
        "PlannedActivations", "SwapStats", "SwappedActivations", "TensorSwap", "WeightSwap", "activations", "weights",
    ),
    "megatron.swap.arguments": ("add_swap_args",),
    "megatron.swap.attention": ("sdpa_layer_spec",),
    "megatron.swap.prepare": ("prepare",),
    "megatron.swap.session": ("SwapSession",),
    "megatron.swap.tensors": ("TensorStats", "TensorSwap"),
}
CONSTRUCTED = ("TensorSwap",)
"""Classes that users construct. Functions return all other classes."""


def flags() -> dict[str, dict[str, Any]]:
    """Return each of our flags by its first name: its names, its type and its default."""
    parser = argparse.ArgumentParser(add_help=False)
    import_module("megatron.swap.arguments").add_swap_args(parser)
    found = {}
    for action in parser._actions:
        names = [name for name in action.option_strings if name.startswith("--swap-")]
        if names:
            found[names[0]] = {
                "options": names, "default": action.default, "nargs": action.nargs,
                "choices": None if action.choices is None else list(action.choices),
                "type": taken(parser, names[0], action.nargs, action.choices),
            }  # fmt: skip
    return found


def by_option(flags: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return flags by each of their names, so that aliases and further flags break no earlier command line."""
    return {option: {**flag, "options": []} for flag in flags.values() for option in flag["options"]}


def taken(
    parser: argparse.ArgumentParser, name: str, nargs: int | str | None, choices: Iterable[Any] | None
) -> str:
    words = [] if nargs == 0 else [str(next(iter(choices)))] if choices else ["7"]
    before, after = vars(parser.parse_args([])), vars(parser.parse_args([name, *words]))
    changed = [after[key] for key in after if key.startswith("swap_") and after[key] != before.get(key)]
    return type(changed[0]).__name__ if changed else "str"


def parameters(name: str, function: Callable[..., Any], *, is_bound: bool) -> Iterator[str]:
    """Yield a line for each parameter: ``name(parameter=default)``. Later versions may add optional parameters."""
    yield f"{name}()"
    for parameter in list(inspect.signature(function).parameters.values())[is_bound:]:
        yield f"{name}({str(parameter.replace(annotation=inspect.Parameter.empty)).replace(' ', '')})"


def members(name: str, kind: type) -> Iterator[str]:
    """Yield a line for each public method, its parameters, each property and each field."""
    yield name
    if name.split(".")[-1] in CONSTRUCTED:
        yield from parameters(name, kind, is_bound=False)
    fields = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    for member in {*dir(kind), *fields}:
        if not member.startswith("_"):
            there = inspect.getattr_static(kind, member, None)
            is_method = inspect.isroutine(there) and not isinstance(there, functools.cached_property)
            if is_method or isinstance(there, classmethod | staticmethod):
                is_bound = not isinstance(there, classmethod | staticmethod)
                yield from parameters(f"{name}.{member}", getattr(kind, member), is_bound=is_bound)
            else:
                yield f"{name}.{member}"


def imports() -> list[str]:
    """Return a line for each name that can be imported from the public paths."""
    found = [f"megatron.swap.__all__: {name}" for name in import_module("megatron.swap").__all__]
    for path, names in MODULES.items():
        for name in names:
            there = getattr(import_module(path), name)
            whole = f"{path}.{name}"
            found += members(whole, there) if inspect.isclass(there) else parameters(whole, there, is_bound=False)
    types = import_module("megatron.swap.types")
    for name, there in vars(types).items():
        if inspect.isclass(there) and issubclass(there, Exception):
            bases = there.__mro__[1 : there.__mro__.index(Exception)]
            found += [f"megatron.swap.types.{name} is a {base.__name__}" for base in bases]
    return sorted(found)


def said_by(command: list[str]) -> str:
    done = subprocess.run([sys.executable, *command], env=quiet(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def tool(name: str) -> str:
    return str(ROOT / "tools" / f"{name}.py")


def lists(main: Callable[[list[str]], int], option: str, ours: Iterable[str]) -> Iterator[tuple[str, str]]:
    for one in ours:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert main([option, one, "--list"]) == 0
        yield one, said.getvalue()


def names() -> dict[str, Any]:
    """Return the cases and methods of the suites, the values and methods of the sweeps, and the arguments of
    verify.py."""
    suites: dict[str, dict[str, list[str]]] = {}
    for suite, text in lists(bench.main, "--suite", suite_names()):
        cases = re.split(r"^(?=\S+ \(\d+ rounds?\)$)", text, flags=re.M)[1:]
        suites[suite] = {case.split()[0]: re.findall(r"^  (\S+): ", case, flags=re.M) for case in cases}
    sweeps = {}
    for one, text in lists(sweep.main, "--sweep", sweep_names()):
        axis = re.search(r"^([\w-]+): (.*)$", text.split("\n", 2)[2], flags=re.M)
        assert axis is not None, text
        methods = re.findall(r"^  (\S+): ", text, flags=re.M)
        sweeps[one] = {"axis": axis[1], "values": axis[2].split(", "), "methods": methods}
    choices = re.findall(r"\{([^}]+)\}", said_by([tool("verify"), "--help"]))
    return {"suites": suites, "sweeps": sweeps, "verify": sorted({name for one in choices for name in one.split(",")})}


def paths(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of all keys. Items of a list share one path; keys that are data (sites, layers) become ``*``."""
    if isinstance(value, dict):
        for key, inner in value.items():
            name = "*" if "/" in key or key.isdigit() else key
            below = f"{path}.{name}" if path else name
            yield below
            yield from paths(inner, below)
    elif isinstance(value, list):
        for inner in value:
            yield from paths(inner, f"{path}[]")


def keys(*values: Any) -> list[str]:
    return sorted({path for value in values for path in paths(value)})


def general(name: str) -> str:
    """Return a range's name without the parts that differ from run to run: layers, submodules, counts and sizes."""
    name = re.sub(r"\b(layers\.\d+)/[\w.]+/(\d+)", r"\1/PATH/\2", name)
    name = re.sub(r"\b[\d.]+ [KMG]iB\b", "SIZE", name)
    return re.sub(r"\d+", "N", name)


def ranges(trace: Path) -> list[str]:
    """Return the names on a profiler's timeline that are not PyTorch's own."""
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    named = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    return sorted({general(name) for name in named if "#" not in name and not name.startswith("gloo:")})


def from_training(trainer: Trainer) -> dict[str, Any]:
    """Return the goldens of a run that plans itself and of two traced runs: one by flags, one by a plan with
    sections."""
    found = trainer.run(
        f"--train-iters 7 --lr-decay-iters 14 {SWAP_SMALL} --swap-memory-gib 0.006 --swap-summary summary.json "
        "--swap-save-plan plan.json --swap-save-profile profile.json --tensorboard-dir tensorboard "
        "--tensorboard-log-interval 1"
    )
    files = {name: json.loads((found.directory / f"{name}.json").read_text()) for name in ("plan", "profile")}
    events = EventAccumulator(str(found.directory / "tensorboard"))
    events.Reload()

    traced = f"{SWAP_SMALL} --swap-summary summary.json --swap-profile ."
    # Storages of the first two steps are too small to be handled, so that recomputations are tried in the traced step.
    # The prefetch window is small, so that some storages are prefetched and some are late.
    by_flags = trainer.run(
        f"{traced} --swap-profile-steps 3 --train-iters 3 --lengths 2:16 1:64 --swap-layers 0-6 --swap-min-mib 0.03 "
        "--swap-recompute norm activation --swap-prefetch-gib 0.00001",
        program=VARYING,
    )
    plan = files["plan"] | {"budget_gib": None, "predicted": None, "profile_sha256": None}
    plan["classes"] = [
        {"layers": "0-3", "sites": {"mlp/0": {"action": "swap"}}, "sections": []},
        {"layers": "4-5", "sites": {}, "sections": ["layer"]},
    ]
    (found.directory / "whole.json").write_text(json.dumps(plan))
    by_plan = trainer.run(
        f"{traced} --swap-profile-steps 3 --swap-plan {found.directory / 'whole.json'}"
    )
    traces = [run.directory / "rank-0.json.gz" for run in (by_flags, by_plan)]
    folder = by_flags.directory
    files_of_trace = ["--summary", str(folder / "summary.json"), "--output", str(folder)]
    said_by([tool("analyze_trace"), str(traces[0]), *files_of_trace])
    return {
        "keys": {
            "summary": keys(found.summary), **{name: keys(content) for name, content in files.items()},
            "scalars": sorted(name for name in events.Tags()["scalars"] if "swap" in name),
            "findings": keys(json.loads((folder / "findings.json").read_text())),
            "copies": (folder / "copies.csv").read_text().splitlines()[0].split(","),
        },
        "ranges": sorted({name for trace in traces for name in ranges(trace)}),
    }  # fmt: skip


def quiet() -> dict[str, str]:
    ours = environment(0, 1, 0)
    names = ("PYTHONPATH", "OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "CUDA_VISIBLE_DEVICES")
    return {**os.environ, **{name: ours[name] for name in names}, "SWAP_COMMIT": "c0ffee"}


def from_tools(folder: Path) -> dict[str, list[str]]:
    """Return the keys of the rows that each tool writes, by the run's outcome. The tools run side by side."""
    smallest = (SWEEPS / "quick.toml").read_text().split("[methods]")[0] + '[methods]\nnone = "none"\n'
    for old, new in (("first = 4", "first = 2"), ("last = 20", "last = 2"), ("step = 4", "step = 2")):
        assert old in smallest
        smallest = smallest.replace(old, new)
    (folder / "smallest.toml").write_text(smallest)
    running = {
        name: subprocess.Popen(
            [sys.executable, tool(name), *shlex.split(words), "--output", f"{name}.jsonl"], cwd=folder,
            env={**quiet(), "TMPDIR": str(folder)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for name, words in ROWS.items()
    }  # fmt: skip
    said = {name: process.communicate(timeout=PATIENCE_S)[0] for name, process in running.items()}
    found = {}
    for name in ROWS:
        assert (folder / f"{name}.jsonl").exists(), said[name]
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for outcome in sorted({row["outcome"] for row in rows}):
            found[f"{name}: {outcome}"] = keys(*(row for row in rows if row["outcome"] == outcome))
    return found


def golden(name: str) -> Any:
    return json.loads((GOLDENS / f"{name}.json").read_text())


def gone(before: Any, now: Any, path: str = "") -> list[str]:
    if isinstance(before, dict):
        problems = [f"{path}{key} is gone" for key in before if key not in now]
        kept = [key for key in before if key in now]
        return problems + [line for key in kept for line in gone(before[key], now[key], f"{path}{key}: ")]
    if isinstance(before, list):
        return [f"{path}{item} is gone" for item in before if item not in now]
    return [] if before == now else [f"{path}was {before!r}, is {now!r}"]


def differences(before: Any, now: Any) -> list[str]:
    return gone(before, now) + [line.removesuffix("is gone") + "is new" for line in gone(now, before)]


@pytest.mark.short
def test_flags() -> None:
    assert gone(by_option(golden("flags")), by_option(flags())) == []


@pytest.mark.short
def test_import_paths() -> None:
    assert gone(golden("imports"), imports()) == []


def test_names_of_suites_and_sweeps() -> None:
    assert gone(golden("names"), names()) == []


@pytest.mark.nightly
def test_files_and_ranges_of_training(trainer: Trainer) -> None:
    now = from_training(trainer)
    assert differences(golden("keys"), now["keys"]) == []
    assert differences(golden("ranges"), now["ranges"]) == []


@pytest.mark.nightly
def test_rows_of_the_tools(tmp_path: Path) -> None:
    assert differences(golden("rows"), from_tools(tmp_path)) == []


def write() -> None:
    """Write all goldens from the current code."""
    with tempfile.TemporaryDirectory() as folder, Zygote() as zygote:
        base = Path(folder)
        trained = from_training(Trainer(zygote, base / "runs", base / "shared"))
        found = {"flags": flags(), "imports": imports(), "names": names(), **trained, "rows": from_tools(base)}
    GOLDENS.mkdir(exist_ok=True)
    for name, content in found.items():
        (GOLDENS / f"{name}.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    write()
