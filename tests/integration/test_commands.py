"""Every command in the pages that a user reads, run as printed on a machine without a GPU, if no other test runs it.

Each page runs in a working copy of its own, top to bottom, so that nothing lands in this one. The environment is the
one that runs the tests. Lines that would install, download or run these very tests are left out.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import Block, blocks, of_kind
from tests.integration.harness import CHECKED
from tests.pages import ROOT, user_pages
from tests.unit.test_house import NOT_OURS

FIRST = "bash examples/pretrain_gpt_swap.sh --swap-layers 0-23"
"""``test_examples.test_the_first_command`` runs it, and reads what it prints."""
EXAMPLES = tuple(f"PYTHONPATH=. .venv/bin/python examples/{name}.py" for name in ("swap_hugging_face", "swap_cnn"))
"""``test_examples`` runs them, and reads what they print."""
OTHERS = (FIRST, *EXAMPLES)
"""Lines that other tests run."""
LEFT_OUT = re.compile(
    r"(bash tests/run\.sh|git clone|cd megatron-swap|\S*pip install|\S*python\S* -m pip install|"
    r"python -m (tests\.fuzz|benchmarks\.faults|pytest)|python tools/check_slab\.py)\b"  # this one is for a GPU
)
NAMES = ("megatron-swap plan", "megatron-swap plan --table")
"""Programs that pages speak of by these words, and that need arguments."""
WAIT = 'for id in "${ids[@]}"; do wait "$id"; done'
TIMEOUT_S = 900.0
HF_CONFIG = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 8192,
}  # fmt: skip
"""The reader's own model."""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    subprocess.run([sys.executable, "tools/prepare_stdlib_corpus.py", "--folder", folder], cwd=ROOT, check=True)
    return folder


@pytest.fixture
def copy(tmp_path: Path, corpus: Path) -> Path:
    """A working copy without what it has produced, with this environment as its ``.venv``, a corpus and a model."""
    folder = tmp_path / "megatron-swap"
    shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(*NOT_OURS, "shared"))
    shutil.copytree(corpus, folder / ".data")
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    return folder


def run(script: str, folder: Path) -> None:
    given = {name: value for name, value in os.environ.items() if not name.startswith(("MEGATRON_SWAP_", "PYTEST_"))}
    paths = os.pathsep.join([str(folder / ".venv" / "bin"), os.environ["PATH"]])
    ours = {"PATH": paths, "PYTHONPATH": str(folder), **CHECKED, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1"}  # fmt: skip
    with (folder.parent / "log").open("w+", errors="replace") as log:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=folder, env=given | ours, stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT, timeout=TIMEOUT_S,
        )  # fmt: skip
        log.seek(0)
        assert done.returncode == 0, f"{script}\nexit status {done.returncode}, last lines:\n{log.read()[-4000:]}"


def runnable(block: Block) -> str:
    lines = block.script.splitlines()
    return "\n".join(line for line in lines if line not in (*OTHERS, *NAMES) and not LEFT_OUT.match(line))


def runnable_blocks(page: Path) -> list[str]:
    """What a page has to run: its blocks, except for those, and lines, that are a block of an earlier page."""
    earlier = user_pages()[: user_pages().index(page)]
    done = {runnable(block) for one in earlier for block in blocks(one) if block.kind == ""}
    scripts = [runnable(block) for block in blocks(page) if block.kind == ""]
    found = ["\n".join(line for line in script.splitlines() if line not in done) for script in scripts]
    return [script for script in found if script and script not in done]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", filter(runnable_blocks, user_pages()), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_on_a_cpu(page: Path, copy: Path) -> None:
    for script in runnable_blocks(page):
        run(script, copy)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_cluster_on_one_machine(copy: Path) -> None:
    """A block has one command for each machine: they run at the same time here, one process each."""
    for block in of_kind("cluster"):
        commands = block.script.splitlines()
        assert len(commands) > 1, block.text
        run("\n".join(["ids=()", *(f"{command} & ids+=($!)" for command in commands), WAIT]), copy)
