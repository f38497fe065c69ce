"""The commands in the pages: ``python -m tests.commands --list gpu`` prints those that need a GPU, as JSON.

A fenced block ``bash`` runs on any machine, ``bash gpu`` on one with a GPU; ``bash cluster`` is one command for each of
several machines. What nobody should type stands in a block of another kind (``text``, ``python``, ``json``).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.pages import ROOT, pages, user_pages

KINDS = ("", "gpu", "cluster")
NOT_KINDS = ("", "sh", "shell", "console")
RESULTS = ROOT / "docs" / "results" / "h200-commands.json"
"""``{"runs": [{"command": …, "exit_status": …}]}``: the blocks for a GPU as they ran, one script an entry."""


@dataclass(frozen=True)
class Block:
    """A fenced block of commands.

    Attributes:
        page: where it stands, from the repository's root.
        kind: one of ``KINDS``.
        text: what is between the fences.
    """

    page: str
    kind: str
    text: str

    @property
    def script(self) -> str:
        """The commands without comments and empty lines, lines that end in a backslash joined."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        lines = [re.sub(r"(^|\s+)#.*$", "", line).rstrip() for line in joined.splitlines()]
        return "\n".join(line for line in lines if line)


def fences(page: Path) -> Iterator[tuple[str, str]]:
    """The words behind each opening fence of a page, and the block's text."""
    for match in re.finditer(r"^```([^\n]*)\n(.*?)^```[ \t]*$", page.read_text(), re.MULTILINE | re.DOTALL):
        yield match[1].strip(), match[2]


def blocks(page: Path) -> list[Block]:
    """The blocks of commands of a page, in order."""
    name = str(page.relative_to(ROOT))
    found = [(words.split(), text) for words, text in fences(page)]
    return [Block(name, " ".join(words[1:]), text) for words, text in found if words[:1] == ["bash"]]


def of_kind(kind: str) -> list[Block]:
    """All blocks of this kind in the pages that users read."""
    return [block for page in user_pages() for block in blocks(page) if block.kind == kind]


def unknown_kinds() -> list[str]:
    """Where the words behind ``bash`` are none of the kinds, or a shell's block has another name."""
    found = [f"{block.page}: ```bash {block.kind}" for page in pages() for block in blocks(page)
             if block.kind not in KINDS]  # fmt: skip
    found += [f"{page.name}: ```{words}" for page in user_pages() for words, _ in fences(page) if words in NOT_KINDS]
    return found


def missing_results() -> list[str]:
    """The scripts for a GPU that the committed result file does not have, or has with another exit status than 0."""
    runs = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
    done = {run["command"] for run in runs if run["exit_status"] == 0}
    return [block.script for block in of_kind("gpu") if block.script not in done]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the commands of one kind in the pages, as JSON.")
    parser.add_argument("--list", choices=["cpu", "gpu", "cluster"], required=True)
    chosen = parser.parse_args().list
    wanted = of_kind("" if chosen == "cpu" else chosen)
    print(json.dumps([{**asdict(block), "command": block.script} for block in wanted], indent=1))
