"""The numbers of the house: lines, comments, attributes, and who knows a command line.

    python -m tests.house_numbers
"""

import ast
import io
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES = {"megatron/swap": 35_500, "tests": 38_000, "benchmarks": 9_000}
LEAST_COMMENTS = 0.04
"""Comments as a part of the lines with code."""
MOST_ATTRIBUTES = 15
SMALL_ROOMS = ("run", "layers", "planning")
COMMAND_LINES = ("trainer", "cli", "forecast", "common/flags.py")
"""Rooms that may import argparse."""
ENGINE = "megatron.swap.engine.build"
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
SOURCES = (".py", ".cpp", ".h", ".txt")


def files(folder: str, *endings: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", folder], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    paths = (ROOT / name for name in listed if name.endswith(endings or SOURCES))
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def num_lines(folder: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in files(folder))


def comments(folder: str) -> float:
    """Return lines with a comment over lines with code, docstrings and blank lines in neither."""
    code: set[tuple[Path, int]] = set()
    noted: set[tuple[Path, int]] = set()
    for path in files(folder, ".py"):
        text = path.read_text()
        in_docstrings = set(docstring_lines(ast.parse(text)))
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            lines = range(token.start[0], token.end[0] + 1)
            if token.type == tokenize.COMMENT:
                noted |= {(path, line) for line in lines if "fmt:" not in token.string and "noqa" not in token.string}
            elif token.type not in LAYOUT:
                code |= {(path, line) for line in lines if line not in in_docstrings}
    return len(noted) / len(code)


def docstring_lines(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of texts that are statements: docstrings, and those behind a field."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def attributes(kind: ast.ClassDef) -> int:
    fields = (node.target for node in kind.body if isinstance(node, ast.AnnAssign))
    found = {field.id for field in fields if isinstance(field, ast.Name)}
    for node in ast.walk(kind):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) else ():
            for one in ast.walk(target) if isinstance(target, ast.AST) else ():
                if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self":
                    found.add(one.attr)
    return len(found)


def is_frozen(kind: ast.ClassDef) -> bool:
    return any("frozen=True" in ast.unparse(one) for one in kind.decorator_list)


def large_classes() -> dict[str, int]:
    """Return classes of the small rooms with too many attributes, frozen records apart."""
    found = {}
    for room in SMALL_ROOMS:
        for path in files(f"megatron/swap/{room}", ".py"):
            for kind in ast.walk(ast.parse(path.read_text())):
                if isinstance(kind, ast.ClassDef) and not is_frozen(kind) and attributes(kind) > MOST_ATTRIBUTES:
                    found[f"{path.relative_to(ROOT)}: {kind.name}"] = attributes(kind)
    return found


def importers(module: str, name: str | None = None) -> list[str]:
    found = []
    for path in files("megatron/swap", ".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_from = isinstance(node, ast.ImportFrom) and node.module == module
            is_plain = isinstance(node, ast.Import) and any(one.name == module for one in node.names)
            if is_plain or (is_from and (name is None or any(one.name == name for one in node.names))):
                found.append(str(path.relative_to(ROOT / "megatron/swap")))
                break
    return found


def main() -> None:
    for folder, most in MOST_LINES.items():
        print(f"{folder}: {num_lines(folder):,} lines, at most {most:,}")
    print(f"comments: {comments('megatron/swap'):.1%} of code lines, at least {LEAST_COMMENTS:.0%}")
    rooms = ", ".join(SMALL_ROOMS)
    print(f"classes of more than {MOST_ATTRIBUTES} attributes in {rooms}: {large_classes() or 'none'}")
    elsewhere = [name for name in importers("argparse") if not name.startswith(COMMAND_LINES)]
    print(f"imports of argparse outside {', '.join(COMMAND_LINES)}: {elsewhere or 'none'}")
    print(f"places that build an engine: {importers(ENGINE, 'build_engine')}")


if __name__ == "__main__":
    main()
