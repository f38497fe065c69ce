"""Other versions of Megatron than the installed one, each in a folder of its own."""

import fcntl
import os
import subprocess
import sys
from importlib.metadata import version as installed_version
from pathlib import Path

import pytest

from tests.integration.harness import ROOT

FOLDER = ROOT / ".data" / "megatron-core"
"""Ignored by git."""
TIMEOUT_S = 120


def folder_of(version: str) -> Path | None:
    """Return the folder with megatron-core ``version``; ``None``: it is installed. The first caller fetches the wheel.

    Its dependencies are those of the installed version. A missing network fails the test: without the wheel nothing is
    known of that version.
    """
    if version == installed_version("megatron-core"):
        return None
    folder = FOLDER / version
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            done = subprocess.run(
                [sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade", "--quiet", "--target", str(folder),
                 f"megatron-core=={version}"],
                env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}, capture_output=True, text=True,
                timeout=TIMEOUT_S,
            )  # fmt: skip
            if done.returncode != 0:
                pytest.fail(f"megatron-core {version} cannot be fetched (2 MB, from PyPI), so it is not tested:\n"
                            f"{done.stderr[-2000:]}", pytrace=False)  # fmt: skip
            (folder / "complete").touch()
    return folder
