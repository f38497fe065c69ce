"""The console script: its commands, and the doctor's report of missing packages."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megatron.swap.cli import doctor
from megatron.swap.cli.main import main

ROOT = Path(__file__).resolve().parents[3]


def test_a_command_gets_the_flags_after_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --bf16"
    assert main(["plan", "--gpu", "h200", "--", *flags.split(), "--vocab-size", "256"]) == 0
    assert "tokens/s" in capsys.readouterr().out


def test_plan_loads_neither_torch_nor_a_plotting_library() -> None:
    program = (
        "import sys; from megatron.swap.cli.main import main; main(['plan', '--show', 'nowhere']); "
        "sys.exit(' '.join({'torch', 'matplotlib', 'rich', 'benchmarks', 'megatron.core'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert re.fullmatch(r"error: nowhere: cannot be read .*\n\n?", done.stderr)


def test_the_doctor_knows_the_extras_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, requirements in extras.items():
        names = {re.split(r"[\[>=]", requirement)[0].replace("-", "_") for requirement in requirements}
        assert {name.replace(".", "_") for name in doctor.EXTRAS[extra]} == names
    assert doctor.EXTRAS.keys() == extras.keys()


def test_the_doctor_names_missing_requirements(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = "ModuleNotFoundError: No module named 'scipy'"
    monkeypatch.setattr(doctor, "find_problem", lambda name: problem if name == "scipy" else None)
    assert doctor.main(["dev"]) == 1
    said = capsys.readouterr().err
    assert f"  scipy: {problem}\n" in said
    assert f"-r {ROOT / 'requirements.txt'} -r {ROOT / 'requirements-dev.txt'}" in said


@pytest.mark.slow
def test_the_doctor_reports_a_hidden_namespace(tmp_path: Path) -> None:
    """A checkout with a megatron/__init__.py before ours on the path: `megatron.swap` cannot be imported."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "tools/check_environment.py", "run"], cwd=ROOT, env={"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"{tmp_path / 'megatron' / '__init__.py'} makes `megatron` a regular package" in done.stderr


def test_the_doctor_says_why_there_is_no_native_part(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    assert doctor.main([]) == 0
    why = "no compiler is on PATH (g++, c++, clang++), and CXX is not set"
    assert f"note: {why}: no --swap-oom-guard, copies of TensorSwap" in capsys.readouterr().err
