"""The pages of the documentation, and those that are made from the code: ``python -m tests.pages`` renews them."""

import argparse
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron.training.arguments import add_megatron_arguments

from megatron.swap import patches
from megatron.swap.common.flags import add_swap_flags
from megatron.swap.forecast.flags import FLAGS_FILE
from megatron.swap.patches.registry import Patch
from tests.known_failures.listing import known_failures_page
from tests.support import support_page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
HISTORY = {"CHANGELOG.md", "appendix.md", "log.md", "results.md"}
"""Pages that tell of names, flags and programs as they were."""


def pages() -> list[Path]:
    folders = (DOCS, DOCS / "guide", REFERENCE, DOCS / "benchmarks", DOCS / "dev")
    return [ROOT / "README.md", *filter(Path.exists, [ROOT / "CHANGELOG.md"]),
            *(page for folder in folders for page in sorted(folder.glob("*.md")))]  # fmt: skip


def user_pages() -> list[Path]:
    """README, concepts, guide, reference, benchmarks: what a user reads, and what has to stay short."""
    singles = [DOCS / "concepts.md", DOCS / "benchmarks.md"]
    folders = [page for folder in (DOCS / "guide", REFERENCE) for page in sorted(folder.glob("*.md"))]
    return [ROOT / "README.md", *(page for page in singles if page.exists()), *folders]


def num_words(text: str) -> int:
    """Tokens between white space that contain a letter or digit."""
    return sum(any(map(str.isalnum, token)) for token in text.split())


FLAGS_HEAD = """\
# Flags

<!-- made by `python -m tests.pages` from add_swap_flags (megatron/swap/common/settings.py) -->

Every flag begins with `--swap-`; `--help-swap` prints the same texts. Layers count from 0 over the whole model. GiB and
MiB are powers of two, and limits are per rank. Without these flags, Megatron Swap installs no hook and changes nothing.
"""


def flags_page() -> str:
    parser = add_swap_flags(argparse.ArgumentParser(add_help=False))
    formatter = argparse.HelpFormatter("")
    lines = [FLAGS_HEAD]
    for group in parser._action_groups:
        if not group._group_actions:
            continue
        title = (group.title or "").removeprefix("swap: ")
        lines += [f"## {title[0].upper()}{title[1:]}", "", f"{group.description}", ""] if group.description else []
        lines += ["| flag | default | what it does | set it when |", "|---|---|---|---|"]
        for action in group._group_actions:
            what, default, when = parts_of(formatter._expand_help(action))
            cells = f"`{action.option_strings[0]}{metavar_of(action)}`", default, what, when
            lines.append(f"| {' | '.join(in_cell(cell) for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


def parts_of(text: str) -> tuple[str, str, str]:
    """Split a help text: what the flag does, its default, and when to set it."""
    match = re.fullmatch(r"(.*?) Default: (.*?)\.(?: Set it when (.*)\.)?", text)
    assert match is not None, f"a help text must be 'What. Default: value.' or with 'Set it when …' behind: {text!r}"
    what, default, when = match[1], match[2], match[3] or ""
    return what, default, when[:1].upper() + when[1:] + "." if when else ""


def metavar_of(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    name = "|".join(action.choices) if action.choices else str(action.metavar)
    return f" {name}{' …' if action.nargs == '+' else ''}"


def in_cell(text: str) -> str:
    """A table's cell: flags and file names in code font, no stray column."""
    outside = re.split(r"(`[^`]+`)", text)
    for index in range(0, len(outside), 2):
        outside[index] = re.sub(r"(--[a-z][\w-]*\w|\b\w+/[\w/-]*\.(?:py|sh|md)\b)", r"`\1`", outside[index])
    return "".join(outside).replace("|", r"\|")


PATCHES = DOCS / "dev" / "patches.md"


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
    """What is patched, by file and reason, with the first version of each source that the patch was written for."""
    by_reason: dict[tuple[str, ...], list[str]] = {}
    for patch in all_patches():
        versions = ", ".join(source.split()[1] for source in patch.sources)
        cells = (patch.reason, patch.file, f"{patch.upstream} {versions}", patch.feature)
        symbols = by_reason.setdefault(cells, [])
        if patch.symbol not in symbols:
            symbols.append(patch.symbol)
    lines = ["| symbol | why | file | sources of | feature |", "|---|---|---|---|---|"]
    for (reason, file, sources, feature), symbols in by_reason.items():
        names = ", ".join(f"`{symbol}`" for symbol in symbols)
        lines.append(f"| {names} | {reason} | `{file}` | {sources} | {feature} |")
    return "\n".join(lines) + "\n"


def patches_page() -> str:
    before, rest = re.split(r"<!-- patches: .*?-->\n", PATCHES.read_text())
    after = rest.split("<!-- end of patches -->")[1]
    return f"{before}<!-- patches: made by `python -m tests.pages` -->\n{patches_table()}<!-- end of patches -->{after}"


def training_flags() -> str:
    """The names of all training flags, those of the installed Megatron and our own: first those that need a value."""
    parser = add_swap_flags(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, add_help=False)))
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for action in parser._actions:
        names[action.nargs not in (0, "?", "*")] |= {name for name in action.option_strings if name.startswith("--")}
    parts = (textwrap.fill(" ".join(sorted(names[valued])), 120, break_on_hyphens=False) for valued in (True, False))
    head = f"made by `python -m tests.pages` from megatron-core {version('megatron-core')}"
    return "\n\n".join([head, *parts]) + "\n"


GENERATED: dict[Path, Callable[[], str]] = {
    REFERENCE / "flags.md": flags_page,
    REFERENCE / "support.md": support_page,
    REFERENCE / "known-failures.md": known_failures_page,
    PATCHES: patches_page,
    FLAGS_FILE: training_flags,
}


def stale() -> Iterator[Path]:
    """The generated pages whose text is not what the code gives now."""
    for page, make in GENERATED.items():
        if not page.exists() or page.read_text() != make():
            yield page


if __name__ == "__main__":
    for page in list(stale()):
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(GENERATED[page]())
        print(f"renewed {page.relative_to(ROOT)}")
