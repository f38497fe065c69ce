"""What the pages say is what the code does. ``python -m tests.pages`` renews the generated ones."""

import argparse
import ast
import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron import swap

from megatron.swap.common.counters import Totals
from megatron.swap.common.flags import add_swap_flags
from megatron.swap.common.plan import Plan
from megatron.swap.common.types import MemoryRow
from megatron.swap.planner.profile import Profile
from megatron.swap.reporting.summary import RankReport, StepRecord, build_summary
from tests import commands, pages
from tests.pages import DOCS, GENERATED, HISTORY, REFERENCE, ROOT
from tests.unit.test_house import ROOMS, SOURCE_SUFFIXES, our_files

ARCHITECTURE = DOCS / "dev" / "architecture.md"
START = DOCS / "guide" / "start.md"
TROUBLESHOOTING = DOCS / "guide" / "troubleshooting.md"
ALL = pages.pages()
OF_TODAY = [page for page in ALL if page.name not in HISTORY]
MAX_WORDS = 20_000
NOT_KEPT = {"own_pretrain.py", "your_pretrain.py"}  # saved by the reader


def found_in(paths: Iterable[Path], look: Callable[[Path], Iterable[str]]) -> dict[str, list[str]]:
    """What is wrong, by the file that has it."""
    wrong = {name_of(path): sorted(look(path)) for path in paths}
    return {name: found for name, found in wrong.items() if found}


def name_of(value: object) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


def rows(page: Path, heading: str = "") -> list[list[str]]:
    """The cells of the first table under ``heading``, without its head."""
    text = page.read_text().split(f"{heading}\n", 1)[1]
    table = re.search(r"^\|.*?\n(?!\|)", f"{text}\n", flags=re.MULTILINE | re.DOTALL)
    assert table is not None, f"no table under {heading}"
    lines = table.group().strip().splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert pages.num_words(text) <= 800


def test_what_a_user_reads_is_short() -> None:
    lengths = {name_of(page): pages.num_words(page.read_text()) for page in pages.user_pages()}
    assert sum(lengths.values()) <= MAX_WORDS, lengths
    assert lengths["docs/reference/support.md"] <= 700


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", re.sub(r"(?ms)^```.*?^```", "", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def dead_links(page: Path, text: str) -> list[str]:
    prose = re.sub(r"(?ms)^```.*?^```|`[^`\n]*`", "", text)
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        to = (page.parent / path).resolve() if path else page
        if not to.exists() or (anchor and to.suffix == ".md" and anchor not in anchors(to)):
            dead.append(target)
    return dead


def test_no_link_is_dead() -> None:
    assert found_in(ALL, lambda page: dead_links(page, page.read_text())) == {}


def test_every_path_and_program_exists() -> None:
    roots = "megatron/swap|patches|tools|examples|tests|docs|benchmarks"

    def missing(page: Path) -> list[str]:
        text = re.sub(r"\]\([^)\s]*\)", "", page.read_text())  # links are looked at above
        named = re.findall(rf"(?<![\w./-])((?:{roots})/[\w./-]*[\w/])", text)
        named += re.findall(r"\b(?:bash|python3?|torchrun[^\n`]*?) ((?:[\w-]+/)*[\w-]+\.(?:py|sh))\b", text)
        modules = re.findall(r"python3? -m ((?:megatron|benchmarks|tests)[\w.]+)", text)
        paths = [name.replace(".", "/") for name in modules]
        programs = [f"{path}.py" for path in paths if not (ROOT / path / "__main__.py").exists()]
        return [word for word in (*named, *programs) if not (ROOT / word).exists() and word not in NOT_KEPT]

    assert found_in(OF_TODAY, missing) == {}


def test_every_page_that_the_code_names_exists() -> None:
    sources = [path for path in our_files() if path.suffix in SOURCE_SUFFIXES]
    assert found_in(sources, lambda path: [
        page for page in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text()) if not (ROOT / page).exists()
    ]) == {}  # fmt: skip


def our_flags() -> set[str]:
    return {action.option_strings[0] for action in add_swap_flags(argparse.ArgumentParser(add_help=False))._actions}


def test_no_flag_is_named_that_does_not_exist() -> None:
    flags = our_flags()
    assert found_in(OF_TODAY, lambda page: set(re.findall(r"--swap-[a-z0-9-]*[a-z]", page.read_text())) - flags) == {}


def names_in(paths: Iterable[Path]) -> dict[str, set[str]]:
    """Classes with the names they define or assign."""
    found: dict[str, set[str]] = {}
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


def test_the_picture_is_the_rooms() -> None:
    picture = re.search(r"```rooms\n(.*?)```", ARCHITECTURE.read_text(), flags=re.DOTALL)
    assert picture is not None
    assert tuple(line.split("|")[0].strip() for line in picture[1].splitlines()) == ROOMS


def test_no_generated_page_is_stale() -> None:
    stale = [name_of(page) for page, made in GENERATED.items() if page.read_text() != made()]
    assert stale == [], "run: python -m tests.pages"


def section(heading: str) -> str:
    page = (REFERENCE / "python.md").read_text()
    found = re.search(rf"(?ms)^## `{re.escape(heading)}`.*?(?=^## |\Z)", page)
    assert found is not None, f"docs/reference/python.md has no section `{heading}`"
    return found.group()


def documented() -> Iterator[tuple[str, Any]]:
    """Each name that the page of the interface has a section for, and what it is."""
    for name in re.findall(r"^## `([\w.]+)`", (REFERENCE / "python.md").read_text(), re.MULTILINE):
        module, _, last = name.rpartition(".")
        yield name, getattr(swap if module == "swap" else __import__(f"megatron.{module}", fromlist=[last]), last)


def parameters(signature: inspect.Signature) -> list[tuple[str, int, object]]:
    given = [one for one in signature.parameters.values() if one.name not in ("self", "cls")]
    return [(one.name, one.kind, one.default) for one in given]


def written_signature(call: str) -> inspect.Signature:
    """The signature of a call as the page writes it: ``name(a, *, b=1)``."""
    space: dict[str, Any] = {}
    exec(f"def written({call.split('(', 1)[1].rsplit(')', 1)[0]}): pass", space)
    return inspect.signature(space["written"])


def test_every_public_name_has_a_section() -> None:
    named = {name.removeprefix("swap.") for name, _ in documented()}
    text = (REFERENCE / "python.md").read_text()
    assert {name for name in swap.__all__ if name not in named and f"`{name}`" not in text} == set()


def test_every_documented_signature_exists() -> None:
    for name, what in documented():
        check_signatures(name, what)


def check_signatures(name: str, what: Any) -> None:
    text = section(name)
    spelled = f"{re.escape(name)}|{name.rpartition('.')[2]}"
    calls = re.findall(rf"^(?:{spelled})\(.*?\)$", text, re.MULTILINE | re.DOTALL)
    for call in calls:
        assert parameters(written_signature(call)) == parameters(inspect.signature(what)), name
    if not inspect.isclass(what):
        assert calls or not callable(what), f"{name}: no signature"
        return
    for call in re.findall(r"`(\w+)\(([^`]*)\)`", "\n".join(line.split("|")[1] for line in table_lines(text))):
        member = inspect.signature(inspect.getattr_static(what, call[0]).__get__(None, what))
        assert parameters(written_signature(f"{call[0]}({call[1]})")) == parameters(member), call
    told = {name for line in table_lines(text)[2:] for name in re.findall(r"`(\w+)", line.split("|")[1])}
    members = names_in([Path(inspect.getfile(what))])[what.__name__] | set(dir(what))
    assert told <= members | {error.__name__ for error in subclasses(what)}, name


def subclasses(what: type) -> Iterator[type]:
    for one in what.__subclasses__():
        yield from (one, *subclasses(one))


def table_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def keys(record: type) -> set[str]:
    found = {one.metadata.get("key", one.name) for one in dataclasses.fields(record) if one.init}
    return found - {None}


def test_every_key_of_a_file_is_described() -> None:
    for heading, record in (("## Plan file", Plan), ("## Profile file", Profile)):
        told = {re.split(r"[\[.]", name)[0] for row in rows(REFERENCE / "files.md", heading) for name in code(row[0])}
        assert told == keys(record), heading


def fields(value: Any, path: str = "") -> set[str]:
    """The paths of everything in a summary; what an object maps from data (ranks, layers) by ``[]``."""
    if isinstance(value, dict):
        return {name for key, item in value.items() for name in fields(item, f"{path}.{key}" if path else key)}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {name for item in value for name in fields(item, f"{path}[]")}
    return {path}


def test_every_field_of_the_summary_is_described() -> None:
    step = StepRecord(iteration=1, moved=Totals({0: (2, 2)}, num_groups=1), loss=1.0, grad_norm=1.0)
    report = RankReport(
        steps=[step], device="cpu", device_peak_bytes=None, saved_peak_bytes=1, host_booked_bytes=1,
        host_leased_peak_bytes=1, stayed_bytes=0, swapped_layers=[0], memory=[MemoryRow("weights")],
    )
    summary = json.loads(json.dumps(build_summary(1, [report])))
    told = [name for row in rows(REFERENCE / "files.md", "## Summary") for name in code(row[0])]
    assert len(told) == len(set(told))
    assert set(told) == fields(summary)


def test_every_variable_is_described() -> None:
    told = {name for row in rows(REFERENCE / "files.md", "## Environment variables") for name in code(row[0])}
    used: set[str] = set()
    for path in our_files():
        if path.suffix in (".py", ".sh") and "tests/unit" not in str(path):
            used |= set(re.findall(r"MEGATRON_SWAP_[A-Z_]*[A-Z]", path.read_text()))
    assert {name for name in told if name.startswith("MEGATRON_SWAP_")} == used


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
    told = re.findall(r"^\| (`+)(.+?)\1 \|", TROUBLESHOOTING.read_text(), re.MULTILINE)
    assert told
    for _, message in told:
        if message.strip().startswith("unrecognized arguments"):
            continue  # argparse's
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("…")), re.DOTALL)
        assert any(pattern.search(text) for text in ours), message


def test_every_block_of_commands_has_a_kind() -> None:
    assert commands.unknown_kinds() == []


def test_every_command_for_a_gpu_has_run_there() -> None:
    assert commands.missing_results() == [], "not in docs/results/h200-commands.json"
