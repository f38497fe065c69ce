"""What the pages say is what the code does. ``python -m tests.unit.test_docs`` renews the table of patches."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import itertools
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.swap import patches
from megatron.swap.common.counters import Totals
from megatron.swap.common.types import MemoryRow
from megatron.swap.megatron_lm.arguments import add_swap_args
from megatron.swap.patches.registry import Patch
from megatron.swap.reporting.summary import RankReport, StepRecord, build_summary
from tests.unit.test_house import ROOMS, ROOT, our_files

README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
GUIDE = ROOT / "docs" / "user_guide.md"
PATCHES = ROOT / "docs" / "patches.md"
PAGES = (README, ARCHITECTURE, PATCHES, GUIDE, ROOT / "docs" / "planner.md", ROOT / "docs" / "log.md")
OF_TODAY = PAGES[:-1]  # the log tells of names as they were

# A new flag is a conscious act: whoever adds one here has written its row in the user guide and its check.
FLAGS = {
    "--swap-cpu-delay-ms",
    "--swap-cpu-memory-gib",
    "--swap-deterministic",
    "--swap-disk-dir",
    "--swap-disk-gib",
    "--swap-host-gib",
    "--swap-host-unchecked",
    "--swap-layers",
    "--swap-log-level",
    "--swap-max-candidates",
    "--swap-memory-fraction",
    "--swap-memory-gib",
    "--swap-min-mib",
    "--swap-modules",
    "--swap-oom-guard",
    "--swap-optimizer",
    "--swap-plan",
    "--swap-policy",
    "--swap-prefetch-gib",
    "--swap-profile",
    "--swap-profile-steps",
    "--swap-recompute",
    "--swap-save-plan",
    "--swap-save-profile",
    "--swap-summary",
    "--swap-verify",
}

PATCHES_BEGIN = "<!-- patches: written by `python -m tests.unit.test_docs` -->\n"
PATCHES_END = "<!-- end of patches -->"


def parser_defaults() -> dict[str, object]:
    """Each flag of ours and its default."""
    parser = add_swap_args(argparse.ArgumentParser(add_help=False))
    return {action.option_strings[0]: action.default for action in parser._actions}


def written(default: object) -> str:
    """A default as the user guide writes it."""
    if default is None or default == []:
        return "not set"
    if default is False:
        return "off"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of the first table under ``heading``, without its head."""
    text = page.read_text().split(f"{heading}\n", 1)[1]
    table = re.search(r"^\|.*?\n(?!\|)", text, flags=re.MULTILINE | re.DOTALL)
    assert table is not None, f"no table under {heading}"
    lines = table.group().strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def code(cell: str) -> list[str]:
    """The words in code font."""
    return re.findall(r"`([^`]+)`", cell)


# ------------------------------------------------------------------------------------------------------ flags


def test_the_flags_are_these() -> None:
    assert set(parser_defaults()) == FLAGS


def test_the_user_guide_has_every_flag_with_its_default() -> None:
    told = {code(row[0])[0]: row[1] for row in rows(GUIDE, "## Flags")}
    assert told == {flag: written(default) for flag, default in parser_defaults().items()}


def test_no_page_names_a_flag_of_ours_that_does_not_exist() -> None:
    for page in PAGES:
        named = set(re.findall(r"--swap-[a-z-]*[a-z]", page.read_text()))
        assert named <= FLAGS, page


# ----------------------------------------------------------------------------------------------- architecture


def test_the_picture_is_the_rooms() -> None:
    picture = re.search(r"```rooms\n(.*?)```", ARCHITECTURE.read_text(), flags=re.DOTALL)
    assert picture is not None
    assert tuple(line.split("|")[0].strip() for line in picture[1].splitlines()) == ROOMS


def names_in(paths: Iterator[Path]) -> dict[str, set[str]]:
    """Classes with the names they define or assign, and module-level names under ''."""
    found: dict[str, set[str]] = {"": set()}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                inside = found.setdefault(node.name, set())
                for item in ast.walk(node):
                    if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                        inside.add(item.name)
                    elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        inside.add(item.target.id)
                    elif isinstance(item, ast.Attribute):
                        inside.add(item.attr)
    return found


def test_every_name_of_a_class_exists() -> None:
    known = names_in((ROOT / "megatron" / "swap").rglob("*.py"))
    for page in OF_TODAY:
        text = re.sub(f"{PATCHES_BEGIN}.*{PATCHES_END}", "", page.read_text(), flags=re.DOTALL)
        for name, attribute in re.findall(r"`(_?[A-Z][A-Za-z]+)\.(\w+)", text):
            assert name in known, f"{page}: {name}"
            assert attribute in known[name], f"{page}: {name}.{attribute}"


# ---------------------------------------------------------------------------------------------------- patches


def all_patches() -> list[Patch]:
    """Every patch of every file, the ones that are made by a function included."""
    found: dict[int, Patch] = {}
    for module in pkgutil.walk_packages(patches.__path__, "megatron.swap.patches."):
        if module.name == "megatron.swap.patches.registry":
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            made: Any = ()
            if isinstance(value, Patch):
                made = (value,)
            elif isinstance(value, tuple) and all(isinstance(item, Patch) for item in value):
                made = value
            elif name.endswith("_patch") and not name.startswith("_"):
                made = (value(*[None] * len(inspect.signature(value).parameters)),)
            elif name.endswith("_patches") and not name.startswith("_"):
                made = value(None)
            found.update({id(patch): patch for patch in made})
    return sorted(found.values(), key=lambda patch: (patch.file.count("/"), patch.file))


def patches_table() -> str:
    """What is patched, by file and reason."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for patch in all_patches():
        symbols = by_reason.setdefault((patch.file, patch.reason), [])
        if patch.symbol not in symbols:
            symbols.append(patch.symbol)
    lines = ["| symbol | why | file |", "|---|---|---|"]
    for (file, reason), symbols in by_reason.items():
        lines.append(f"| {', '.join(f'`{symbol}`' for symbol in symbols)} | {reason} | `{file}` |")
    return "\n".join(lines) + "\n"


def with_patches_table(page: str) -> str:
    before, rest = page.split(PATCHES_BEGIN)
    return before + PATCHES_BEGIN + patches_table() + PATCHES_END + rest.split(PATCHES_END)[1]


def test_the_table_of_patches_is_the_registry() -> None:
    page = PATCHES.read_text()
    assert page == with_patches_table(page), "run: python -m tests.unit.test_docs"


# ---------------------------------------------------------------------------------------------------- summary


def fields(value: Any, path: str = "") -> set[str]:
    """The paths of everything in a summary; what an object maps from data (ranks, layers) by ``[]``."""
    if isinstance(value, dict):
        return {name for key, item in value.items() for name in fields(item, f"{path}.{key}" if path else key)}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {name for item in value for name in fields(item, f"{path}[]")}
    return {path}


def test_the_user_guide_has_every_field_of_the_summary() -> None:
    step = StepRecord(iteration=1, moved=Totals({0: (2, 2)}, num_groups=1), loss=1.0, grad_norm=1.0)
    report = RankReport(
        steps=[step], device="cpu", device_peak_bytes=None, saved_peak_bytes=1, host_booked_bytes=1,
        host_leased_peak_bytes=1, stayed_bytes=0, swapped_layers=[0], memory=[MemoryRow("weights")],
    )
    summary = json.loads(json.dumps(build_summary(1, [report])))
    told = [name for row in rows(GUIDE, "### The summary") for name in code(row[0])]
    assert len(told) == len(set(told))
    assert set(told) == fields(summary)


# -------------------------------------------------------------------------------------------- files and words


def tree() -> Iterator[Path]:
    """The paths in README's tree."""
    block = README.read_text().split("## What is where", 1)[1].split("```")[1]
    folder = Path()
    for line in filter(str.strip, block.splitlines()):
        for name in itertools.takewhile(lambda word: "." in word or word.endswith("/"), line.split()):
            if line.startswith(" "):
                yield ROOT / folder / name
            else:
                folder = Path(name) if name.endswith("/") else Path()
                yield ROOT / name


def test_everything_in_the_tree_exists() -> None:
    paths = list(tree())
    assert len(paths) > 30
    assert [path for path in paths if not path.exists()] == []
    tools = {path for path in our_files() if path.parent in (ROOT / "tools", ROOT / "examples", ROOT / "docs")}
    made = {"__init__.py", "report.html"}  # by tools/report.py, not kept
    missing = {path for path in tools if path.name not in made} - set(paths)
    assert missing == set(), "not in README's tree"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_and_link_exists(page: Path) -> None:
    text = page.read_text()
    told = text if page in OF_TODAY else ""
    words = re.findall(r"(?<![\w./])((?:megatron/swap|patches|tools|examples|tests|docs)/[\w./-]*[\w/])", told)
    words += [name for name in re.findall(r"`(\w+\.(?:py|sh|txt|toml))`", text) if (ROOT / name).exists()]
    to_come = {"megatron/swap/memory/tiers/disk.py"}
    assert [word for word in words if word not in to_come and not (ROOT / word).exists()] == []
    for target in re.findall(r"\]\(([^)#]+)?(?:#[\w-]+)?\)", text):
        if target and not target.startswith("http"):
            assert (page.parent / target).exists(), target
    for target, anchor in re.findall(r"\]\(([^)#]*)#([\w-]+)\)", text):
        if not target.startswith("http"):
            headings = re.findall(r"^#+ (.*)$", (page.parent / target if target else page).read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in headings}, anchor


def test_every_command_names_a_program_that_exists() -> None:
    for page in OF_TODAY:
        for program in re.findall(r"\b(?:bash|python3?|torchrun.*?) ((?:[\w]+/)*[\w]+\.(?:py|sh))", page.read_text()):
            assert (ROOT / program).exists() or program == "own_pretrain.py", f"{page}: {program}"


def test_the_user_guide_has_every_variable() -> None:
    told = {name for row in rows(GUIDE, "## Environment variables") for name in code(row[0])}
    used: set[str] = set()
    for path in our_files():
        if path.suffix in (".py", ".sh") and "tests/unit" not in str(path):
            used |= set(re.findall(r"MEGATRON_SWAP_[A-Z_]*[A-Z]", path.read_text()))
    assert told == used


def messages() -> Iterator[str]:
    """Every string of ours, what is filled in replaced by …"""
    for path in our_files():
        if path.suffix == ".py" and "tests" not in path.relative_to(ROOT).parts:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                    yield "".join(map(str, parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_every_message_in_troubleshooting_is_one_of_ours() -> None:
    ours = list(messages())
    for row in rows(GUIDE, "## Troubleshooting"):
        message = row[0].strip("`")
        if message.startswith("unrecognized arguments"):
            continue  # argparse's
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("…")), re.DOTALL)
        assert any(pattern.search(text) for text in ours), message


@pytest.mark.skipif(torch.cuda.is_available(), reason="its flags are for the CPU")
def test_the_script_in_the_user_guide_trains(tmp_path: Path) -> None:
    script = GUIDE.read_text().split("```python\n", 1)[1].split("```", 1)[0]
    (tmp_path / "own_pretrain.py").write_text(script)
    flags = (
        "--transformer-impl local --distributed-backend gloo --num-workers 0 --no-gradient-accumulation-fusion "
        "--no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion --num-layers 4 --hidden-size 32 "
        "--num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 --position-embedding-type rope "
        "--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-3 --eval-iters 0 --eval-interval 1000 "
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --swap-layers all --swap-min-mib 0.001 "
        "--swap-summary summary.json"
    )
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    run = subprocess.run(
        [sys.executable, "own_pretrain.py", *flags.split()], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, **rank, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert json.loads((tmp_path / "summary.json").read_text())["swapped_out_bytes"] > 0


if __name__ == "__main__":
    PATCHES.write_text(with_patches_table(PATCHES.read_text()))
