"""Checks whether this Python can train with Megatron Swap, Megatron's models or any, and says what to install.

It runs as `megatron-swap doctor` and, through tools/check_environment.py, without an installed package. So it imports
nothing of this package, nothing heavy at the top, and parses under older Pythons.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

REQUIRED = ("torch", "numpy", "scipy", "megatron.swap")
FOR_MEGATRON = ("megatron.core", "megatron.training")
FOR_TESTS = ("pytest", "pytest_timeout", "xdist", "hypothesis", "grimp", "ruff", "mypy")
EXTRAS = {
    "megatron": {
        "megatron.core": "no Megatron models", "tensorboard": "no TensorBoard scalars",
        "psutil": "megatron-core cannot write torch_dist checkpoints",
    },
    "measure": {
        "rich": "no tools/preprocess_data.py", "jinja2": "no tools/report.py",
        "matplotlib": "no pictures of plans and benchmarks, no tools/report.py",
    },
    "te": {"transformer_engine": "no TransformerEngine layers; the local implementation is slower"},
}  # fmt: skip
"""Packages of each extra in pyproject.toml, and the effect of their absence."""
# ``VERSIONS`` of ``patches/registry.py``: the patches fit their sources, and tests train with each.
TESTED_MEGATRON_CORE = ("0.18.2", "0.19.0", "0.19.2")
BUILT_ONLY_MEGATRON_CORE = ("0.16.1", "0.17.1")  # ``BUILT_ONLY`` of ``patches/registry.py``
DISTRIBUTIONS = "torch numpy scipy"  # of REQUIRED, as pip names them
# The checkout's root, or a folder without requirements files if the package is installed.
ROOT = Path(__file__).resolve().parents[3]


def main(arguments: list[str] | None = None) -> int:
    """Check this Python and report on stderr what is missing. Return 0 if training can start, else 1."""
    parser = argparse.ArgumentParser(
        prog="megatron-swap doctor", description="Check whether this Python can train with Megatron Swap."
    )
    parser.add_argument(
        "what", nargs="?", choices=["any", "run", "dev"], default="any",
        help="any: PyTorch models (default); run: Megatron models too; dev: test packages, too",
    )  # fmt: skip
    what = parser.parse_args(arguments).what
    # With a CUDA toolkit but no GPU, torch warns when it is first imported.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    oldest = 10 if what == "any" else 12
    if sys.version_info < (3, oldest):
        say(f"error: {sys.executable} is Python {sys.version.split()[0]}; 3.{oldest} or newer is needed")
        return 1
    needed = REQUIRED + (FOR_MEGATRON if what != "any" else ()) + (FOR_TESTS if what == "dev" else ())
    problems = {name: problem for name in needed if (problem := find_problem(name)) is not None}
    report_optional()
    if problems:
        report_problems(problems, what)
        return 1
    report_native()
    print(f"{sys.executable} can train with {Path(sys.modules['megatron.swap'].__file__ or '').parent}")
    if not is_missing("megatron.core"):
        report_megatron()
    return 0


def find_problem(name: str) -> str | None:
    """Return why module `name` cannot be imported, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    except Exception as error:  # a broken CUDA installation raises anything
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def is_missing(name: str) -> bool:
    """Whether no module `name` is found. Only packages above it are imported."""
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:  # a package above it
        return True


def report_optional() -> None:
    """Print a note for each incomplete extra."""
    for extra, packages in EXTRAS.items():
        missing = {name: effect for name, effect in packages.items() if is_missing(name)}
        if missing:
            note(f"extra {extra} lacks {', '.join(missing)}: {'; '.join(sorted(set(missing.values())))}")


def report_native() -> None:
    """Print a note if training will have no native part."""
    # `native.build` is asked, since a part that was built before needs no compiler.
    problem = importlib.import_module("megatron.swap.native.build").problem()
    if problem:
        note(
            f"{problem}: no --swap-oom-guard, copies of TensorSwap cannot be withdrawn, and swap.activations "
            "recomputes whole layers only"
        )


def report_megatron() -> None:
    """Print whether the version of Megatron is tested, and whose kernel will add weight gradients to ``main_grad``."""
    try:
        found = version("megatron-core")
    except PackageNotFoundError:
        found = "a source checkout"
    if found in BUILT_ONLY_MEGATRON_CORE:
        oldest = TESTED_MEGATRON_CORE[0]
        note(f"megatron-core is {found}: swap.train works; Megatron's trainer needs {oldest} or newer")
    elif found not in TESTED_MEGATRON_CORE:
        note(f"megatron-core is {found}; tested: {', '.join(TESTED_MEGATRON_CORE)}")
    weight_gradients = importlib.import_module("megatron.swap.megatron_lm.weight_gradients")
    kernel: str | None = weight_gradients.kernel_name()
    if kernel is None:
        note(weight_gradients.lacks_kernel())
    else:
        print(f"--gradient-accumulation-fusion (Megatron's default) uses the kernel of {kernel}")


def report_problems(problems: dict[str, str], what: str) -> None:
    say(f"error: {sys.executable} cannot run Megatron Swap; it lacks")
    for name, problem in problems.items():
        say(f"  {name}: {problem}")
    origin = hidden_namespace()
    if origin:
        say(
            f"  {origin} makes `megatron` a regular package, which hides every other part of it. Delete that "
            "empty file, or put this repository's megatron/swap beside that checkout's megatron/core."
        )
    files = [ROOT / name for name in ("requirements.txt", "requirements-dev.txt")[: 2 if what == "dev" else 1]]
    if all(path.is_file() for path in files):
        command = f"{sys.executable} -m pip install {' '.join(f'-r {path}' for path in files)}"
        say(f"Install them there ({command}), or leave MEGATRON_SWAP_PYTHON unset: then a .venv is made for you.")
    else:
        more = "" if what == "any" else f" megatron-core=={TESTED_MEGATRON_CORE[-1]}"
        say(f"Install them there: {sys.executable} -m pip install {DISTRIBUTIONS}{more}")


def hidden_namespace() -> str | None:
    """Return the `megatron/__init__.py` that hides other portions of the namespace, or None."""
    spec = importlib.util.find_spec("megatron")
    return spec.origin if spec is not None and spec.origin else None


def note(text: str) -> None:
    say(f"[megatron-swap] note: {text}")


def say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
