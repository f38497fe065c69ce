"""Classify a run by its exit code, the stage that it reached, and its output."""

import re

TIMED_OUT = 124
TAIL_CHARACTERS = 3000
# The stages of a run in order; its process sends each word when it reaches the stage.
STAGES = ("starting", "ready", "built", "stepped", "done")

_DEVICE = re.compile(
    r"OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|Failed to CUDA calloc|"
    r"Cuda failure \d* ?'out of memory'"
)
_HOST = re.compile(
    r"HostMemoryError|cudaHostAlloc|cudaHostRegister|DefaultCPUAllocator: can't allocate memory|^MemoryError|"
    r"Cannot allocate memory",
    re.MULTILINE,
)
_DISK = re.compile(
    r"DiskError: .*(?:the limit is|No space left on device|Disk quota exceeded)|"
    r"UsageError: --swap-disk-gib: .* are free"
)
"""The disk is full, before or during training; other disk errors are failures."""
_EITHER = re.compile(r"CUDA error: out of memory")
_PINNING = re.compile(r"pin_memory|pinned")
_MISSING = re.compile(r"^ModuleNotFoundError: No module named '([\w.]+)'", re.MULTILINE)
_REFUSAL = re.compile(
    r"^(?:\w+\.)*(?:AssertionError|ValueError|NotImplementedError|UsageError)\b|^(?:\S+: )?error: ",
    re.MULTILINE,
)


def classify(code: int, output: str, stage: str, requires: tuple[str, ...] = ()) -> str:
    """Return the `outcome` of a row. ``code``: negative: the signal that ended the process."""
    if code == 0 and stage == "done":
        return "ok"
    if code == TIMED_OUT:
        return "timeout"
    if code in (-9, 137):
        return "oom_host"  # sent by the kernel, or by this program at the host's limit
    if _DISK.search(output):
        return "oom_disk"  # checked first: a run that ends for lack of disk may also report other memory errors
    if _DEVICE.search(output):
        return "oom_device"
    if _HOST.search(output):
        return "oom_host"
    if (either := _EITHER.search(output)) is not None:
        # cudaHostAlloc and cudaMalloc raise the same message; the traceback above it shows which one failed.
        before = output[max(0, either.start() - 600) : either.start()]
        return "oom_host" if _PINNING.search(before) else "oom_device"
    if stage == "starting" and requires:
        missing = _MISSING.search(output)
        return f"missing: {missing[1] if missing else requires[0]}"
    if stage == "ready" and _REFUSAL.search(output):
        return "refused"
    return f"failed ({code})"


def tail(output: str) -> str:
    """Return the end of a run's own output, without the launcher's traceback after it."""
    return output.split("torch/distributed/elastic", 1)[0][-TAIL_CHARACTERS:]
