"""The commands in the pages: ``python -m tests.commands --list gpu`` prints those that need a GPU, ``--run`` runs them.

A fenced block ``bash`` runs on any machine, ``bash gpu`` on one with a GPU; ``bash cluster`` is one command for each of
several machines. What nobody should type stands in a block of another kind (``text``, ``python``, ``json``). A command
in a sentence is a block of one line, for any machine.
"""

import argparse
import json
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import machine
from tests.pages import DOCS, ROOT, pages, user_pages

KINDS = ("", "gpu", "cluster")
NOT_KINDS = ("", "sh", "shell", "console")
INLINE = re.compile(r"([A-Z_]+=\S+ )*(\S*/)?(bash|python3?|pip|torchrun|megatron-swap) \S")
"""The beginning of a command in a sentence."""
TO_FILL_IN = re.compile(r"…|(?<![\w-])[A-Z]{2,}(?![\w=])")
"""A word that the reader replaces, as in ``--output FILE``."""
RESULTS = ROOT / "docs" / "results" / "h200-commands.json"
"""``{"runs": [{"command": …, "exit_status": …}]}``: the blocks for a GPU as they ran, one script an entry."""


@dataclass(frozen=True)
class Block:
    """A fenced block of commands, or a command in a sentence, of one of ``KINDS``."""

    page: str
    kind: str
    text: str

    @property
    def script(self) -> str:
        """The commands without comments and empty lines, lines that end in a backslash joined."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        lines = [re.sub(r"(^|\s+)#.*$", "", line).rstrip() for line in joined.splitlines()]
        return "\n".join(line for line in lines if line)


def code(page: Path) -> Iterator[tuple[str | None, str]]:
    """The words behind each opening fence of a page, and the block's text; ``None``, and the code in a sentence."""
    for match in re.finditer(r"(?ms)^```([^\n]*)\n(.*?)^```[ \t]*$|`([^`\n]+)`", page.read_text()):
        yield (None, match[3]) if match[3] else (match[1].strip(), match[2])


def fences(page: Path) -> Iterator[tuple[str, str]]:
    """The words behind each opening fence of a page, and the block's text."""
    yield from ((words, text) for words, text in code(page) if words is not None)


def blocks(page: Path) -> list[Block]:
    name = str(page.relative_to(ROOT))
    found = []
    for words, text in code(page):
        if words is not None and words.split()[:1] == ["bash"]:
            found.append(Block(name, " ".join(words.split()[1:]), text))
        elif words is None and INLINE.match(text) and not TO_FILL_IN.search(text):
            found.append(Block(name, "", text))
    return found


def guides_script() -> str:
    scripts = [text for words, text in fences(DOCS / "guide" / "start.md") if words == "python"]
    return next(text for text in scripts if "pretrain(" in text)


def of_kind(kind: str) -> list[Block]:
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


def results_of(wanted: list[Block]) -> dict[str, object]:
    runs = []
    for block in wanted:
        print(f"$ {block.script}", flush=True)
        began = time.monotonic()
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", block.script], cwd=ROOT)
        runs.append({"page": block.page, "command": block.script, "exit_status": done.returncode,
                     "seconds": round(time.monotonic() - began, 1)})  # fmt: skip
    return {"what": "commands of the pages, as printed", "runs": runs, "commit": machine.commit(),
            "versions": machine.versions(), "machine": machine.machine()}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="The commands of one kind in the pages.")
    parser.add_argument("--list", choices=["cpu", "gpu", "cluster"], help="print them as JSON")
    parser.add_argument("--run", type=Path, metavar="FILE", help="run those for a GPU, and write this result file")
    options = parser.parse_args()
    if options.list is not None:
        wanted = of_kind("" if options.list == "cpu" else options.list)
        print(json.dumps([{**asdict(block), "command": block.script} for block in wanted], indent=1))
    if options.run is not None:
        options.run.write_text(json.dumps(results_of(of_kind("gpu")), indent=1) + "\n")


if __name__ == "__main__":
    main()
