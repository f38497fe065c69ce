"""The choice of traced steps, and the output when training ends early."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from megatron.swap.common.instrumentation import Ranges
from megatron.swap.profiling.profiler import Profiler


def traced_steps(path: Path) -> list[str]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation" and event["name"][:5] == "step "]


@pytest.mark.skipif(torch.cuda.is_available(), reason="starts CUDA's profiler in the tests' process")
@pytest.mark.parametrize(("num_steps", "expected"), [(6, ["step 3", "step 4"]), (3, ["step 3"])])
def test_the_chosen_steps_are_traced_as_far_as_training_gets(tmp_path: Path, num_steps: int, expected: list[str]):
    ranges = Ranges()
    profiler = Profiler(str(tmp_path / "new"), 3, 4, rank=1, ranges=ranges, allocated_bytes=lambda: 5)
    for iteration in range(1, num_steps + 1):
        with ranges.forward(0):
            torch.ones(2) + 1
        profiler.step_ended(iteration)
    profiler.close()
    assert not ranges.is_on
    assert profiler.path == tmp_path / "new" / "rank-1.json.gz"
    # The step that was about to begin when training ended early has nothing in it.
    assert [name for name in traced_steps(profiler.path) if name in expected] == expected
