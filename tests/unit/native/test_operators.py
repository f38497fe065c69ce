"""C++ operators that declare their storages: these are reloaded, and not offloaded while in use."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.swap.common.types import SwapError
from megatron.swap.native.build import include_folder, load
from megatron.swap.tensor_swap.swap import TensorSwap

pytestmark = pytest.mark.nightly

HERE = Path(__file__).parent
HOST_GIB = 1 / 64
BUILD = """
import sys
from torch.utils.cpp_extension import load
load("operator_example", [sys.argv[1]], extra_include_paths=[sys.argv[2]], build_directory=sys.argv[3],
     extra_cflags=["-O0", "-std=c++20"])
"""


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The extension, compiled as its author would compile it."""
    if load() is None:
        pytest.skip("needs a compiler")
    folder = tmp_path_factory.mktemp("operator_example")
    source = HERE / "operator_example.cpp"
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(source), str(include_folder()), str(folder)],
        capture_output=True, text=True, env={**os.environ, "MAX_JOBS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sys.path.insert(0, str(folder))
    try:
        import operator_example
    finally:
        sys.path.remove(str(folder))
    return operator_example


def test_what_it_declares_comes_back(example: Any):
    x = torch.arange(1000.0)
    expected = x + 1
    with TensorSwap(HOST_GIB, "cpu") as other, TensorSwap(HOST_GIB, "cpu") as swap:
        swap.swap_out(x)
        swap.wait_swapped_out()
        with pytest.raises(RuntimeError, match="resident"):
            example.plus_one(x, False)
        assert swap.is_out(x)
        assert torch.equal(example.plus_one(x, True), expected)
        assert not swap.is_out(x)
        assert swap.stats.num_passive == 1
        assert other.stats.num_passive == 0


def test_what_it_uses_does_not_leave_before_its_end(example: Any):
    x = torch.arange(1000.0)
    with TensorSwap(HOST_GIB, "cpu") as swap:

        def leave() -> None:
            with pytest.raises(SwapError, match="in use"):
                swap.swap_out(x)

        example.use(x, leave)
        swap.swap_out(x)
        swap.wait_swapped_out()
        assert swap.is_out(x)
