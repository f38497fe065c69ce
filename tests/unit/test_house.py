"""The house rules that a machine can check. Each check is also shown a planted violation, which it must catch."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SWAP = ROOT / "megatron" / "swap"

# Top to bottom; a module imports its own row and the rows below. docs/architecture.md says what each is for.
LAYERS: list[set[str]] = [
    {"session", "prepare", "modules", "inference", "tensors"},
    {"auto"},
    {"layer", "optimizer", "arguments", "attention", "producers", "host_share"},  # the Megatron edge
    {"summary", "profiler", "plan_run", "ledger"},
    {"autograd"},
    {"observer"},
    {"calibration"},
    {"planner"},
    {"ranks"},
    {"stages"},
    {"switch"},
    {"policy", "site_log"},
    {"recipes", "made"},
    {"manager", "step_overlap", "storage_mover"},
    {"state_swap"},
    {"order", "state_mover", "guard", "lending", "reads"},
    {"group"},
    {"handle", "transfers", "operations", "packed_weights"},
    {"tiers", "staging", "resting"},
    {"host_pool", "host_arena", "disk_file"},
    {"host_memory"},
    {"recorder", "step_clock"},
    {"outside"},
    {"devices"},
    {"native"},
    {"checksum"},
    {"trace"},
    {"cross_entropy"},
    {"plan", "config", "types", "sites", "records", "recording", "footprint", "accumulators", "lives", "loss_kernels",
     "stash"},
]
MEGATRON_EDGE = LAYERS[2]
PATCHES_ALLOWED = {"session", "prepare"} | MEGATRON_EDGE

MAX_LINES = 500
SOURCE_SUFFIXES = {".py", ".sh", ".cpp", ".h"}
NOT_OURS = {".git", ".venv", ".data", ".whl", "__pycache__", "build", "runs", "checkpoints", "profile"}

# Runs in a process of its own, because `megatron.swap` may be imported here already, from the real tree.
IMPORT_GRAPH = """
import importlib.util, json, sys, grimp
spec = importlib.util.find_spec("megatron.swap")
graph = grimp.build_graph("megatron.swap", exclude_type_checking_imports=True, cache_dir=None)
edges = [
    (importer, graph.get_import_details(importer=importer, imported=imported)[0]["line_number"], imported)
    for importer in sorted(graph.modules)
    for imported in sorted(graph.find_modules_directly_imported_by(importer))
]
print(json.dumps({"origin": spec.origin or list(spec.submodule_search_locations)[0],
                  "modules": sorted(graph.modules), "edges": edges}))
"""


def import_graph(root: Path) -> tuple[list[str], list[tuple[str, int, str]]]:
    """Return the modules of `megatron.swap` under `root`, and who imports whom on which line (annotations aside)."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_GRAPH],
        cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert Path(found["origin"]).is_relative_to(root), f"looked at {found['origin']}, not at {root}"
    return found["modules"], [(importer, line, imported) for importer, line, imported in found["edges"]]


def component(module: str) -> str:
    """`megatron.swap.tiers.host` -> `tiers`; the package itself -> ''."""
    return (module.split(".") + [""] * 3)[2]


def layer_violations(root: Path) -> list[str]:
    """Say which imports point upwards, which modules have no layer, and which two components import each other."""
    row = {name: number for number, names in enumerate(LAYERS) for name in names}
    modules, edges = import_graph(root)
    problems = [f"{name} has no row in LAYERS" for name in sorted({component(m) for m in modules} - set(row) - {""})]
    for importer, line, imported in edges:
        above, below = component(importer), component(imported)
        # The package's own __init__ re-exports; nothing below may lean on it.
        if below == "" and above != "":
            problems.append(f"{importer}:{line} imports the package itself: name the module")
        elif above in row and below in row and row[below] < row[above]:
            problems.append(f"{importer}:{line} imports upwards: {imported}")
    pairs = {(component(a), component(b)) for a, _, b in edges if component(a) != component(b)}
    problems += [f"{a} and {b} import each other" for a, b in sorted(pairs) if a < b and (b, a) in pairs]
    return problems


def imported_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield every absolute module name that a source imports, wherever in it, importlib and __import__ included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield from ((node.lineno, str(a.value)) for a in node.args if isinstance(a, ast.Constant))


def edge_violations(root: Path) -> list[str]:
    """Say who imports Megatron, or our patches of it, without being the edge."""
    problems = []
    for path in sorted((root / "megatron" / "swap").rglob("*.py")):
        name = path.relative_to(root / "megatron" / "swap").with_suffix("").parts[0]
        for line, imported in imported_names(path.read_text()):
            words = imported.split(".")
            upstream = words[:2] in (["megatron", "core"], ["megatron", "training"])
            if upstream and name not in MEGATRON_EDGE:
                problems.append(f"{path.relative_to(root)}:{line} imports {imported}")
            if words[0] == "patches" and name not in PATCHES_ALLOWED:
                problems.append(f"{path.relative_to(root)}:{line} imports {imported}")
    return problems


def our_files(root: Path = ROOT) -> list[Path]:
    """Return the files that are, or are about to be, in version control; all of ours where there is no git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode == 0 and done.stdout:
        return [path for name in done.stdout.split("\0") if name and (path := root / name).is_file()]
    return [
        path for path in root.rglob("*") if path.is_file() and not NOT_OURS & set(path.relative_to(root).parts)
    ]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the tree to plant violations in."""
    shutil.copytree(SWAP, tmp_path / "megatron" / "swap", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("session.py", "types.py", "policy.py"):
        (tmp_path / "megatron" / "swap" / name).touch()
    return tmp_path


def append(path: Path, line: str) -> None:
    path.write_text(path.read_text() + f"\n{line}\n")


def test_imports_point_downwards() -> None:
    assert layer_violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("types.py", "from megatron.swap.session import SwapSession", "megatron.swap.types:"),
        ("types.py", "def late():\n    import megatron.swap.session", "megatron.swap.types:"),
        ("policy.py", "from .session import SwapSession", "megatron.swap.policy:"),
        ("policy.py", "from megatron.swap import session", "megatron.swap.policy:"),
        ("stray.py", "x = 1", "stray has no row in LAYERS"),
    ],
)
def test_a_planted_upward_import_is_caught(copy: Path, file: str, line: str, said: str) -> None:
    before = layer_violations(copy)
    path = copy / "megatron" / "swap" / file
    path.touch()
    append(path, line)
    new = [problem for problem in layer_violations(copy) if problem not in before]
    assert any(said in problem for problem in new), new


def test_only_the_edge_knows_megatron() -> None:
    assert edge_violations(ROOT) == []


@pytest.mark.parametrize(
    "line",
    [
        "import megatron.core",
        "from megatron.core.utils import divide",
        "from megatron import training",
        "def late():\n    from megatron.training import get_args",
        "import importlib\nimportlib.import_module('megatron.core.parallel_state')",
        "from patches import registry",
    ],
)
def test_a_planted_megatron_import_is_caught(copy: Path, line: str) -> None:
    before = edge_violations(copy)
    append(copy / "megatron" / "swap" / "policy.py", line)
    assert len(edge_violations(copy)) == len(before) + 1


def test_megatron_stays_a_namespace() -> None:
    """A megatron/__init__.py would hide megatron.core from everyone who installs this."""
    assert not (ROOT / "megatron" / "__init__.py").exists()


def test_files_stay_short() -> None:
    """A file over the ceiling is probably two things."""
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_bytes().splitlines())
        for path in our_files()
        if path.suffix in SOURCE_SUFFIXES
    }
    assert lengths, "no source file found"
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


MACHINE_PATH = re.compile(r"(?:^|[^\w.$}~-])/(?:" + "|".join(["work", "farm", "root", "home", "Users"]) + r")/\w")


def machine_paths(path: Path) -> list[str]:
    """Return the lines that name a folder of somebody's machine."""
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError:
        return []
    return [f"{path}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if MACHINE_PATH.search(line)]


def test_no_path_of_a_machine_in_our_files() -> None:
    assert [line for path in our_files() for line in machine_paths(path)] == []


def test_a_planted_machine_path_is_caught(tmp_path: Path) -> None:
    planted = tmp_path / "x.sh"
    folder = "/".join(["", "home", "someone", "data"])
    planted.write_text(f'cd "{folder}"\n')
    assert machine_paths(planted)
