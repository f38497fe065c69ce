"""Import rules: training never imports ``benchmarks``, and imports within ``benchmarks`` point downwards."""

from pathlib import Path

from tests.unit.test_house import imported_names

ROOT = Path(__file__).resolve().parents[3]
LAYERS = [
    {"report"}, {"sweeps", "verify", "faults", "soak"}, {"suites"}, {"any_model", "trainer"}, {"offloaders"},
    {"training_loop"}, {"names"}, {"flags"}, {"runner", "traces"}, {"store", "pinned_memory"},
    {"rows", "table", "pictures", "machine"},
]  # fmt: skip
TRAINING = (ROOT / "megatron", ROOT / "patches")


def imports(path: Path) -> set[str]:
    return {name for _, name in imported_names(path.read_text())}


def part(module: str) -> str:
    """Return the part of a module: ``benchmarks.traces.kineto`` -> ``traces``."""
    return module.split(".")[1] if module.startswith("benchmarks.") else ""


def violations(benchmarks: Path) -> list[str]:
    """Return the imports that point to a higher part."""
    rank = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    found = []
    for path in sorted(benchmarks.rglob("*.py")):
        mine = path.relative_to(benchmarks).parts[0].removesuffix(".py")
        if mine == "__init__":
            continue
        for theirs in {part(module) for module in imports(path)} & set(rank):
            if rank[theirs] < rank[mine] or (rank[theirs] == rank[mine] and theirs != mine):
                found.append(f"{path.relative_to(benchmarks)} imports {theirs}")
    return found


def test_training_imports_nothing_that_measures_it():
    others = {"benchmarks", "tools", "tests"}
    paths = [ROOT / "pretrain_gpt_swap.py", *(path for folder in TRAINING for path in folder.rglob("*.py"))]
    assert len(paths) > 30
    for path in paths:
        assert not {module.split(".")[0] for module in imports(path)} & others, path


def test_imports_point_downwards():
    there = {path.name.removesuffix(".py") for path in (ROOT / "benchmarks").iterdir() if path.suffix != ".toml"}
    there -= {"__init__", "__pycache__"}
    assert there == {name for layer in LAYERS for name in layer}
    assert violations(ROOT / "benchmarks") == []
