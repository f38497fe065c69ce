"""The wheel, built and installed into a separate environment, next to a user's own package ``patches``."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.commands import guides_script
from tests.integration.harness import ROOT, SWAP_SMALL, arguments, environment
from tests.unit.test_house import our_files

SHIPPED = ("megatron", "patches", "pyproject.toml", "README.md", "LICENSE")


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and a user's folder with a package ``patches``."""

    wheel: Path
    environment: Path
    folder: Path

    def run(self, program: str, *words: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return subprocess.run(
            [str(self.environment / "bin" / program), *map(str, words)],
            cwd=self.folder, env={**clean, **(env or {})}, capture_output=True, text=True,
        )  # fmt: skip


def folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    return Path(str(spec.origin)).parents[package.count(".") + 1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    base = tmp_path_factory.mktemp("wheel")
    source, made, folder = base / "source", base / "made", base / "user"
    for path in our_files():  # a copy: what a build leaves behind stays out of the tree, and out of the wheel
        name = path.relative_to(ROOT)
        if name.parts[0] in SHIPPED:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, source / name)
    link = source / "megatron" / "swap" / "patches"
    if not link.exists():  # git lists the link itself, which is no file
        link.symlink_to((ROOT / "megatron" / "swap" / "patches").readlink())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", made, source], check=True)
    [wheel] = made.iterdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", base / "env"], check=True)
    python = base / "env" / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True)
    # Large packages come from this environment, behind the packages of the new one. Path files in these folders are
    # not read, so that an editable install of ours stays out of sight.
    [site] = (base / "env" / "lib").glob("python*/site-packages")
    heavy = dict.fromkeys([folder_of("torch"), folder_of("megatron.core")])
    (site / "heavy.pth").write_text("".join(f"{path}\n" for path in heavy))
    (folder / "patches").mkdir(parents=True)
    (folder / "patches" / "__init__.py").write_text("mine = True\n")
    (folder / "own_pretrain.py").write_text(guides_script())
    return Installed(wheel, base / "env", folder)


def test_what_is_in_the_wheel(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        names = set(archive.namelist())
    packages = ROOT / "megatron" / "swap"
    sources = {
        str(path.relative_to(ROOT))
        for folder in (packages, packages / "patches")  # rglob does not follow the link
        for path in folder.rglob("*")
        if path.suffix in (".py", ".cpp", ".h")
    } | {"megatron/swap/forecast/training_flags.txt", "megatron/swap/py.typed"}
    assert any(name.endswith("bindings.cpp") for name in sources)
    assert any(name.endswith("operator.h") for name in sources)
    assert {name for name in names if ".dist-info/" not in name} == sources


@pytest.mark.nightly
def test_the_public_names_beside_a_package_of_the_users(installed: Installed) -> None:
    program = (
        "import patches; assert patches.mine\n"
        "import megatron.swap.patches.registry\n"
        "from megatron import swap\n"
        "for name in swap.__all__: getattr(swap, name)\n"
        "from megatron.swap import arguments, attention, prepare, session, tensors, types\n"
        "print(swap.__file__)"
    )
    done = installed.run("python", "-c", program)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(installed.environment)


def test_the_command_plans_and_checks_the_environment(installed: Installed) -> None:
    flags = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --bf16"
    words = ["--gpu", "h200", "--save", "plan.json", "--", *flags.split(), "--vocab-size", "256"]
    commands = (["plan", *words], ["plan", "--show", "plan.json"], ["doctor"])
    done = [installed.run("megatron-swap", *command) for command in commands]
    assert [one.returncode for one in done] == [0, 0, 0], [one.stderr for one in done]
    assert "budget" in done[1].stdout
    assert f"can train with {installed.environment}" in done[2].stdout


@pytest.mark.nightly
def test_a_script_of_the_users_trains(installed: Installed) -> None:
    env = {name: value for name, value in environment(0, 1, 0).items() if name != "PYTHONPATH"}
    losses = []
    for swapped in ("--swap-layers none", f"--swap-layers all {SWAP_SMALL}"):
        words = arguments(f"{swapped} --swap-summary summary.json")
        done = installed.run("python", "own_pretrain.py", *words, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((installed.folder / "summary.json").read_text())
        losses.append(summary["losses"])
    assert summary["swapped_out_bytes"] > 0
    assert losses[0] == losses[1]
