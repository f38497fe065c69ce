"""Speeds and sizes of GPUs, for plans without a measurement. ``source`` says which are measured."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.swap.common.types import UsageError


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        tflops: bf16 TFLOP/s of linear layers, as training reaches them.
        attention_tflops: TFLOP/s of causal fused attention's forward, half of the products counted.
        memory_gb_s: memory bandwidth of elementwise kernels.
        optimizer_gb_s: memory bandwidth of the optimizer step, with its many small tensors and the gradient norm.
        link_gb_s: copies from or to pinned memory in one direction, by this GPU alone.
        link_both_gb_s: copies in each direction while both are busy.
        peak_tflops: dense bf16 TFLOP/s of the data sheet.
        cuda_name: the device name that CUDA reports.
    """

    name: str
    tflops: float
    attention_tflops: float
    memory_gb_s: float
    optimizer_gb_s: float
    memory_gib: float
    link_gb_s: float
    link_both_gb_s: float
    source: str
    peak_tflops: float
    cuda_name: str


SHEET = "data sheet: 0.6 of its dense bf16 TFLOP/s, 0.7 of its memory's speed, 0.85 of PCIe's; not measured"

GPUS = {
    "h200": Gpu("NVIDIA H200", 681, 588, 3400, 2300, 139.8, 55.3, 49, "measured on one H200 (docs/results)", 989,
                "NVIDIA H200"),
    "h100": Gpu("NVIDIA H100 SXM", 593, 510, 2345, 1600, 79.1, 53.5, 47, SHEET, 989, "NVIDIA H100 80GB HBM3"),
    "a100-80": Gpu("NVIDIA A100 80 GB SXM", 187, 160, 1427, 980, 79.1, 26.8, 23, SHEET, 312,
                   "NVIDIA A100-SXM4-80GB"),
    "b200": Gpu("NVIDIA B200", 1350, 1160, 5600, 3800, 178.0, 53.5, 47, SHEET, 2250, "NVIDIA B200"),
    "l40s": Gpu("NVIDIA L40S", 217, 190, 605, 410, 44.4, 26.8, 23, SHEET, 362, "NVIDIA L40S"),
}
"""GPUs by their name on the command line. Link speeds are those of one GPU alone. Eight GPUs of one host that copied
at once got 10 to 14 GB/s each: give such a speed with --link-gb-s."""


def gpu_of(cuda_name: str) -> Gpu | None:
    """Return the GPU with CUDA's name ``cuda_name``; ``None``: it is not in the table."""
    return next((gpu for gpu in GPUS.values() if gpu.cuda_name == cuda_name), None)


def find_gpu(name: str) -> Gpu:
    """Return the GPU with that name on the command line, in any case.

    Raises:
        UsageError: the name is unknown.
    """
    if name.lower() not in GPUS:
        raise UsageError(f"--gpu {name}: is not in the table; there are {', '.join(GPUS)}. Measure a profile instead.")
    return GPUS[name.lower()]
