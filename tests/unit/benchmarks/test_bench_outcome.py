"""The outcome of a run is derived from its exit code, stage and output."""

from __future__ import annotations

import pytest

from benchmarks.runner.outcome import TAIL_CHARACTERS, classify, tail

DISK = "megatron.swap.memory.disk_file"
TYPES = "megatron.swap.common.types"
PINNING = """  File "torch/autograd/graph.py", line 321, in pack_to_cpu
    packed = torch.empty(tensor.size(), pin_memory=pin_memory)
torch.AcceleratorError: CUDA error: out of memory
"""
COMPUTING = """  File "megatron/core/tensor_parallel/layers.py", line 9, in forward
    output = torch.matmul(total_input, weight.t())
torch.AcceleratorError: CUDA error: out of memory
"""


@pytest.mark.parametrize(
    ("code", "output", "stage", "outcome"),
    [
        (0, "", "done", "ok"),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "built", "oom_device"),
        (1, "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", "built", "oom_device"),
        (1, COMPUTING, "built", "oom_device"),
        (1, PINNING, "built", "oom_host"),
        (1, "megatron.swap.memory.host_memory.HostMemoryError: --swap-layers all takes at least", "ready", "oom_host"),
        (1, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "built", "oom_host"),
        (1, "MemoryError", "stepped", "oom_host"),
        (1, f"{DISK}.DiskError: optimizer state takes 9 GiB more on disk: 0 B are taken in /d, the limit is 8 GiB.",
         "built", "oom_disk"),
        (1, f"{DISK}.DiskError: --swap-disk-dir /d: taking 9 GiB failed (No space left on device, 1 GiB are free).",
         "built", "oom_disk"),
        (1, f"{DISK}.DiskError: --swap-disk-dir /d: writing failed (Disk quota exceeded).", "stepped", "oom_disk"),
        (1, f"{DISK}.DiskError: --swap-disk-dir /d: reading failed (Input/output error).", "stepped", "failed (1)"),
        (1, f"{TYPES}.UsageError: --swap-disk-gib: 9 GiB are asked for, 8 GiB are free in /d. Lower it",
         "ready", "oom_disk"),
        (1, f"{DISK}.DiskError: 9 GiB more: the limit is 8 GiB.\nHostMemoryError while ending", "built", "oom_disk"),
        (-9, "", "stepped", "oom_host"),
        (137, "", "built", "oom_host"),
        (124, "torch.OutOfMemoryError is what it would have said", "built", "timeout"),
        (1, "AssertionError: fine_grained_activation_offloading cannot be enabled", "ready", "refused"),
        (1, "ValueError: CPU offloading can be done only for layers less than 4", "ready", "refused"),
        (1, f"{TYPES}.UsageError: --swap-layers '0-99': layer 6 is out of range", "ready", "refused"),
        (2, "pretrain_gpt_swap.py: error: unrecognized arguments: --offload", "ready", "refused"),
        (2, "\nerror: --offload is not a flag: `pretrain_gpt_swap.py --help` lists all of them.", "ready", "refused"),
        (1, "AssertionError: a fault while training", "built", "failed (1)"),
        (1, "RuntimeError: the address is in use", "ready", "failed (1)"),
        (-11, "Segmentation fault", "stepped", "failed (-11)"),
        (0, "ended, but nothing was measured", "stepped", "failed (0)"),
    ],
)
def test_outcomes(code: int, output: str, stage: str, outcome: str) -> None:
    assert classify(code, output, stage) == outcome


def test_packages_that_are_missing() -> None:
    error = "ModuleNotFoundError: No module named 'torchao.dtypes'"
    assert classify(1, error, "starting", ("torchtune.training",)) == "missing: torchao.dtypes"
    assert classify(1, "ImportError: torchao not installed.", "starting", ("torchtune",)) == "missing: torchtune"
    assert classify(1, error, "starting") == "failed (1)", "of a method that needs nothing"
    assert classify(1, error, "built", ("torchtune",)) == "failed (1)"


def test_the_tail_is_the_runs_own() -> None:
    assert tail("x" * 9000) == "x" * TAIL_CHARACTERS
    assert tail("the words\ntorch/distributed/elastic traceback") == "the words\n"
