"""Can this Python train with Megatron Swap? Says what is missing, in words that tell what to do.

Used for environments that exist already (`MEGATRON_SWAP_PYTHON=python3`), where nothing is installed. It imports
nothing heavy at the top, and parses under older Pythons too, so that it can speak wherever something is wrong.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RUN = ["torch", "numpy", "megatron.core", "megatron.training", "megatron.swap"]
OPTIONAL = {
    "pybind11": "the native part is replaced by its Python twin",
    "psutil": "megatron-core cannot write torch_dist checkpoints",
    "tensorboard": "no TensorBoard scalars",
    "rich": "no tools/preprocess_data.py, no tools/bench.py, no analysis of traces",
    "matplotlib": "no pictures of traces and benchmarks, which tools/profile.sh and tools/bench.py draw",
    "jinja2": "no tools/report.py",
    "markdown": "no tools/report.py",
}
DEV = ["pytest", "pytest_timeout", "xdist", "hypothesis", "grimp", "ruff", "mypy"]
TESTED_MEGATRON_CORE = "0.19.2"


def find_problem(name: str) -> str | None:
    """Return why `name` cannot be imported, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    except Exception as error:  # a broken CUDA installation raises anything
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def hidden_namespace() -> str | None:
    """Return the `megatron/__init__.py` that hides other portions of the namespace, if there is one."""
    spec = importlib.util.find_spec("megatron")
    return spec.origin if spec is not None and spec.origin else None


def main(argv: list[str]) -> int:
    """Check and report; 0 if training can start."""
    kind = argv[0] if argv else "run"
    # On a machine with a CUDA toolkit and no GPU torch remarks on that, at the first import of many.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    if sys.version_info < (3, 12):  # noqa: UP036
        print(f"error: {sys.executable} is Python {sys.version.split()[0]}; 3.12 or newer is needed", file=sys.stderr)
        return 1
    problems = {name: why for name in RUN + (DEV if kind == "dev" else []) if (why := find_problem(name))}
    for name, effect in OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            print(f"[megatron-swap] note: {name} is not in this environment: {effect}", file=sys.stderr)
    if problems:
        print(f"error: {sys.executable} cannot run Megatron Swap; it lacks", file=sys.stderr)
        for name, why in problems.items():
            print(f"  {name}: {why}", file=sys.stderr)
        if origin := hidden_namespace():
            print(
                f"  {origin} makes `megatron` a regular package, which hides every other part of it. Delete that "
                "empty file, or put this repository's megatron/swap beside that checkout's megatron/core.",
                file=sys.stderr,
            )
        files = ["requirements.txt"] + (["requirements-dev.txt"] if kind == "dev" else [])
        hint = " ".join(f"-r {Path(__file__).parents[1] / name}" for name in files)
        print(
            f"Install them there ({sys.executable} -m pip install {hint}), or leave MEGATRON_SWAP_PYTHON unset: "
            "then a .venv is made for you.",
            file=sys.stderr,
        )
        return 1
    try:
        found = version("megatron-core")
    except PackageNotFoundError:
        found = "a source checkout"
    if found != TESTED_MEGATRON_CORE:
        print(f"[megatron-swap] note: megatron-core is {found}; tested: {TESTED_MEGATRON_CORE}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
