"""House rules that a machine can check."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
from megatron import swap

ROOT = Path(__file__).resolve().parents[2]
SWAP = ROOT / "megatron" / "swap"

# Top to bottom; a module imports its own room and the rooms below. Each room's `__init__` says what it is for.
ROOMS = (
    "cli", "integrations", "dry", "trainer", "run", "megatron_lm", "models", "planning", "reporting", "layers",
    "operators", "params", "tensor_swap", "optimizer", "engine", "profiling", "forecast", "planner", "memory",
    "devices", "native", "common",
    "patches",
)  # fmt: skip
# Public paths: one import each, for scripts of users. Nothing in a room imports them.
PUBLIC_PATHS = {"arguments", "attention", "prepare", "session", "tensors", "types"}
# Rooms that may import less than all that is below them: other rooms, or single modules of them.
ONLY: dict[str, set[str]] = {
    "cli": {"dry", "forecast", "planner", "common"},
    "dry": {
        "run", "models", "layers", "operators", "planning", "engine", "profiling", "forecast", "planner", "memory",
        "devices", "native", "common",
    },
    "integrations": {"run", "common"},
    "forecast": {"planner", "common"},
    "planner": {"common"},
    "models": {"layers", "params", "engine", "memory", "devices", "common"},
    "layers": {"operators", "params", "engine", "profiling", "devices", "native", "common"},
    "params": {"engine", "profiling", "memory", "devices", "native", "common"},
    "operators": {"engine", "devices", "native", "common"},
    "tensor_swap": {"memory", "devices", "native", "common"},
    "optimizer": {"memory", "devices", "common"},
    "engine": {"profiling", "memory", "devices", "native", "common"},
    "profiling": {"forecast.figures", "planner.profile", "memory", "devices", "common"},
    "patches": set(),
    "common": set(),
}
MEGATRON_EDGE = {"megatron_lm", "trainer"}
PATCHES_ALLOWED = {"trainer", "run", "megatron_lm"}

SOURCE_SUFFIXES = {".py", ".sh", ".cpp", ".h"}
NOT_OURS = {".git", ".venv", ".data", ".whl", "__pycache__", "build", "runs", "checkpoints", "profile"}

def room_of(module: str) -> str:
    """Return the room of a module: `megatron.swap.memory.tiers.host` -> `memory`; the package itself -> ''."""
    return (module.split(".") + [""] * 3)[2]


def import_violations() -> list[str]:
    """Return imports that point upwards or that a room may not use, modules outside all rooms, and cycles."""
    rank = {room: number for number, room in enumerate(ROOMS)}
    graph = grimp.build_graph("megatron.swap", cache_dir=None)
    rooms = {room_of(module) for module in graph.modules} - {""}
    problems = [f"{room} is neither a room nor a public path" for room in sorted(rooms - set(ROOMS) - PUBLIC_PATHS)]
    edges = [(one, other) for one in graph.modules for other in graph.find_modules_directly_imported_by(one)]
    for importer, imported in sorted(edges):
        above, below = room_of(importer), room_of(imported)
        if above in PUBLIC_PATHS | {""}:
            continue
        if below in PUBLIC_PATHS | {""}:
            problems.append(f"{importer} imports a public path: name the room's module instead of {imported}")
        elif above in rank and below in rank and rank[below] < rank[above]:
            problems.append(f"{importer} imports upwards: {imported}")
        elif above != below and above in ONLY and not ONLY[above] & {below, f"{below}.{imported.split('.')[-1]}"}:
            problems.append(f"{importer} imports {imported}: {above} may import {sorted(ONLY[above])} alone")
        elif below == "patches" and above not in PATCHES_ALLOWED | {"patches"}:
            problems.append(f"{importer} imports {imported}: patches are for {sorted(PATCHES_ALLOWED)}")
    return problems + a_cycle(edges)


def a_cycle(edges: list[tuple[str, str]]) -> list[str]:
    """Return a line about a cycle of imports, if there is any."""
    below: dict[str, set[str]] = {}
    for importer, imported in edges:
        below.setdefault(importer, set()).add(imported)
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        return [f"a cycle of imports: {', '.join(error.args[1])}"]
    return []


def imported_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield every absolute module name that a source imports, wherever in it, importlib and __import__ included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield from ((node.lineno, str(a.value)) for a in node.args if isinstance(a, ast.Constant))


def our_files(root: Path = ROOT) -> list[Path]:
    """Return the files that are, or are about to be, in version control; all of ours where there is no git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode == 0 and done.stdout:
        return [path for name in done.stdout.split("\0") if name and (path := root / name).is_file()]
    return [
        path for path in root.rglob("*") if path.is_file() and not NOT_OURS & set(path.relative_to(root).parts)
    ]


def test_imports_point_downwards() -> None:
    assert import_violations() == []
    assert a_cycle([("a", "b"), ("b", "c"), ("c", "b")]) != []


def test_every_room_says_what_it_is_for() -> None:
    for room in (room for room in ROOMS if room != "patches"):
        said = ast.get_docstring(ast.parse((SWAP / room / "__init__.py").read_text())) or ""
        assert 2 <= len(said.splitlines()) <= 12, room
        words = " ".join(said.split())
        assert "Owns " in words, room
        assert re.search(r"\b[Mm]ay import|Imports no other room", words), room


def test_a_public_path_only_imports() -> None:
    """The public paths are stable; the code behind them is in the rooms."""
    there = {path.stem for path in SWAP.glob("*.py")}
    assert there == PUBLIC_PATHS | {"__init__"}
    for name in PUBLIC_PATHS:
        body = ast.parse((SWAP / f"{name}.py").read_text()).body
        assert {type(node) for node in body} <= {ast.Expr, ast.ImportFrom, ast.Assign}, name


def test_no_room_or_public_path_hides_a_public_name() -> None:
    """Importing ``megatron.swap.activations``, a package, would hide the function of that name."""
    assert not (set(ROOMS) | PUBLIC_PATHS) & set(swap.__all__)


def test_planner_and_forecast_load_no_torch() -> None:
    rooms = ("planner", "forecast")
    names = [f"megatron.swap.{room}.{path.stem}" for room in rooms for path in (SWAP / room).glob("*.py")]
    assert len(names) > 20
    program = f"import sys, {', '.join(names)}; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_only_the_edge_knows_megatron() -> None:
    problems = []
    for path in sorted(SWAP.rglob("*.py")):
        room = path.relative_to(SWAP).with_suffix("").parts[0]
        for line, imported in imported_names(path.read_text()):
            is_upstream = imported.split(".")[:2] in (["megatron", "core"], ["megatron", "training"])
            if is_upstream and room not in MEGATRON_EDGE | {"patches"}:
                problems.append(f"{path.relative_to(ROOT)}:{line} imports {imported}")
    assert problems == []


def test_megatron_stays_a_namespace() -> None:
    """A megatron/__init__.py would hide megatron.core from everyone who installs this."""
    assert not (ROOT / "megatron" / "__init__.py").exists()


MACHINE_PATH = re.compile(r"(?:^|[^\w.$}~-])/(?:" + "|".join(["work", "farm", "root", "home", "Users"]) + r")/\w")


def machine_paths(path: Path) -> list[str]:
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError:
        return []
    return [f"{path}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if MACHINE_PATH.search(line)]


def test_no_path_of_a_machine_in_our_files() -> None:
    assert [line for path in our_files() for line in machine_paths(path)] == []


DOCUMENTED = (
    "megatron", "patches", "tools", "examples", "benchmarks/runner", "benchmarks/suites", "benchmarks/sweeps",
    "benchmarks/traces",
)  # fmt: skip
# First words of docstrings that lean on the name before them, or on the docstring before.
LEANING = {
    "Also", "And", "As", "Because", "But", "By", "Else", "From", "In", "Of", "Or", "Otherwise", "Since", "So", "Stands",
    "Such", "Those", "Told", "What", "Where", "Which", "While", "Who", "Whoever", "Why", "With", "Without",
}  # fmt: skip


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the first paragraph of each docstring, those of attributes and constants included, with its line."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        assert isinstance(body, list)
        for before, item in zip([None, *body], body, strict=False):
            documents = before is None or isinstance(before, ast.Assign | ast.AnnAssign)
            is_text = isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)
            if documents and is_text and isinstance(item.value.value, str):
                yield item.lineno, " ".join(item.value.value.strip().split("\n\n")[0].split())


def docstring_violations(path: Path) -> list[str]:
    """Return docstrings that are no sentence, or whose first word needs the name before it to make sense."""
    return [
        f"{path}:{line}: {text}"
        for line, text in docstrings(path.read_text())
        if not text.endswith((".", ":")) or text.split()[0] in LEANING
    ]


def test_docstrings_stand_alone() -> None:
    folders = [ROOT / name for name in DOCUMENTED]
    sources = [path for path in our_files() if path.suffix == ".py" and set(folders) & set(path.parents)]
    assert len(sources) > 150
    assert [line for path in sources for line in docstring_violations(path)] == []
