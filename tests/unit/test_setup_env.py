"""tools/setup_env.sh in an environment that exists."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.unit.test_house import ROOT

PYTHON = """#!/bin/sh
cat "$(dirname "$0")/notes" >&2
exit "$(cat "$(dirname "$0")/status")"
"""


def test_what_an_environment_goes_without_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "setup_env.sh", tmp_path / "tools")
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def told(notes: str, status: int = 0) -> str:
        (tmp_path / "notes").write_text(notes)
        (tmp_path / "status").write_text(str(status))
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", ". tools/setup_env.sh; swap_setup_env run; echo $SWAP_CHECKED"],
            cwd=tmp_path, env={"MEGATRON_SWAP_PYTHON": str(python), "PATH": "/usr/bin:/bin"}, capture_output=True,
            text=True,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (status, "" if status else f"run {python}\n")
        return done.stderr

    assert [told("one\ntwo\n") for _ in range(2)] == ["one\ntwo\n", ""]
    assert [told("three\n"), told("one\ntwo\n"), told("")] == ["three\n", "", ""]
    assert [told("broken\n", 1) for _ in range(2)] == 2 * ["broken\n"]
