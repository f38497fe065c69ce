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
    rank = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        mine = path.relative_to(ROOT / "benchmarks").parts[0].removesuffix(".py")
        parts = {module.split(".")[1] for module in imports(path) if module.startswith("benchmarks.")}
        for theirs in parts & set(rank) if mine in rank else ():
            assert rank[theirs] > rank[mine] or theirs == mine, f"{path} imports {theirs}"
