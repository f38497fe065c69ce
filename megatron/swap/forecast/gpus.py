"""Speeds and sizes of GPUs, for plans without a measurement. ``source`` says which are measured."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from megatron.swap.common.types import MOST, UsageError


@dataclass(frozen=True)
class Gpu:
    name: str
    tflops: float  # bf16 TFLOP/s of linear layers, as training reaches them
    attention_tflops: float  # TFLOP/s of causal fused attention's forward, half of the products counted
    memory_gb_s: float  # memory bandwidth of elementwise kernels
    optimizer_gb_s: float  # memory bandwidth of the optimizer step, with its many small tensors and the gradient norm
    memory_gib: float
    link_gb_s: float  # copies from or to pinned memory in one direction, by this GPU alone
    link_both_gb_s: float  # copies in each direction while both are busy
    source: str
    peak_tflops: float  # dense bf16 TFLOP/s of the data sheet
    cuda_name: str  # the device name that CUDA reports
    is_link_shared: bool = True  # the GPUs of a host share its copy speed
    fp8_tflops: float = 0.0  # TFLOP/s of linear layers in FP8; 0: it has no FP8
    fp8_recipes: tuple[str, ...] = ()  # that TransformerEngine supports on it and ``forecast/fp8.py`` covers
    num_fp8_layouts: int = 2  # copies of an FP8 weight: 2 where a product needs its transpose, too
    flash_speeds: tuple[float, float] = (1.0, 1.0)  # flash-attn over cuDNN's attention, in forward and in backward
    own_flash_speeds: tuple[float, float] = (1.0, 1.0)  # of PyTorch's own flash attention, flash-attn 2

    def for_width(self, hidden_size: int) -> Gpu:
        """Return this GPU with the speed of linear layers that it has at this hidden size."""
        # Products over fewer than ``WIDE`` values do not fill the units. The form is that of a fixed cost beside each
        # product, fitted to one unswapped run of 2,048 (docs/results/h200-plan-points.json).
        width = min(hidden_size, WIDE)

        def slower(cost: int) -> float:
            return width / (width + cost) * (WIDE + cost) / WIDE

        return replace(
            # Beside a product in FP8, which takes half the time, the same cost counts twice.
            self, tflops=self.tflops * slower(NARROW), fp8_tflops=self.fp8_tflops * slower(int(FP8_SPEED * NARROW))
        )

    def beside(self, per_host: int) -> Gpu:
        """Return this GPU with the link speeds that it has while ``per_host`` GPUs of a host copy, itself included."""
        if per_host == 1 or not self.is_link_shared:
            return self
        # Numbers between those measured count as the next larger; beyond 8, speed falls in proportion.
        nearest = next((num for num in SHARED_GB_S if num >= per_host), MAX_PER_HOST)
        shared = (gb_s * nearest / max(per_host, nearest) for gb_s in SHARED_GB_S[nearest])
        one_way, both_ways = shared
        return replace(
            self, link_gb_s=min(self.link_gb_s, one_way), link_both_gb_s=min(self.link_both_gb_s, both_ways),
            source=f"{self.source}; link as measured with {nearest} GPUs of an H200 host at once",
        )  # fmt: skip


WIDE, NARROW = 4096, 560
"""The hidden size from which on linear layers are fastest, and the cost of each product beside it, in the same unit."""
TFLOPS, ATTENTION, BANDWIDTH, OPTIMIZER, LINK, BOTH_WAYS = 0.6, 0.52, 0.7, 0.48, 0.85, 0.88
"""Fractions of a data sheet's figures that training is assumed to reach. Of its dense bf16 TFLOP/s in linear layers and
in attention, of its memory bandwidth in elementwise kernels and in the optimizer, of its link in one direction, and of
that in each of both. An H200 reached 0.69, 0.59, 0.71, 0.48, 0.88, 0.89."""


FP8_SPEED = 2
"""Dense FP8 TFLOP/s over dense bf16 TFLOP/s in all data sheets (H100 and H200: 1,979 and 989). Linear layers are
assumed to reach the same fraction of both; on an H200 they reached 0.63 and 0.69."""
ADA: tuple[str, ...] = ("tensorwise", "delayed")
HOPPER: tuple[str, ...] = (*ADA, "blockwise")
"""FP8 recipes by generation (TransformerEngine 2.20.2). Blackwell computes ``blockwise`` by another format, MXFP8."""
FLASH_4 = (1.09, 1.145)
"""``flash_speeds`` of flash-attn 4 on Hopper: one H200, TransformerEngine 2.20.2, 128k tokens, 32 heads of 128, 8
groups; 1.02 and 1.135 at 32k (docs/results/h200-attention.json)."""
FLASH_2 = (0.53, 0.57)
"""``own_flash_speeds`` on Hopper: one H200, 8k and 16k tokens, 306 to 321 TFLOP/s in forward and 285 to 292 in
backward, half of the products counted; 267 and 262 at 4k (docs/results/h200-trainer.json)."""


def _sheet(
    name: str, peak_tflops: float, memory_gb_s: float, memory_gib: float, link_gb_s: float, cuda_name: str,
    both_ways: float = BOTH_WAYS, is_link_shared: bool = True, fp8: tuple[str, ...] = (), num_fp8_layouts: int = 2,
) -> Gpu:  # fmt: skip
    """Return a GPU with the figures of its data sheet. ``link_gb_s``: its link in one direction."""
    return Gpu(
        name, TFLOPS * peak_tflops, ATTENTION * peak_tflops, BANDWIDTH * memory_gb_s, OPTIMIZER * memory_gb_s,
        memory_gib, LINK * link_gb_s, LINK * both_ways * link_gb_s,
        f"data sheet: {TFLOPS:g} of its dense bf16 TFLOP/s, {BANDWIDTH:g} of its memory's speed, {LINK:g} of its "
        "link's; not measured",
        peak_tflops, cuda_name, is_link_shared, FP8_SPEED * TFLOPS * peak_tflops if fp8 else 0.0, fp8, num_fp8_layouts,
        *((FLASH_4, FLASH_2) if fp8 == HOPPER else ()),
    )  # fmt: skip


PCIE4, PCIE5 = 31.5, 63.0  # GB/s of 16 lanes in one direction
C2C = 225.0
"""GB/s of a GB200's NVLink-C2C in one direction and for each of its two GPUs (NVIDIA GB200 NVL72 data sheet: 900 GB/s
for both directions and both GPUs). Both directions at once are limited by the processor's memory to 128 GB/s each way.
"""

GPUS = {
    "h200": Gpu("NVIDIA H200", 681, 588, 3400, 2300, 139.8, 55.3, 49, "measured on one H200 (docs/results)", 989,
                "NVIDIA H200", fp8_tflops=1250, fp8_recipes=HOPPER, flash_speeds=FLASH_4,
                own_flash_speeds=FLASH_2),
    "h100": _sheet("NVIDIA H100 SXM", 989, 3350, 79.1, PCIE5, "NVIDIA H100 80GB HBM3", fp8=HOPPER),
    "h100-pcie": _sheet("NVIDIA H100 PCIe", 756, 2000, 79.1, PCIE5, "NVIDIA H100 PCIe", fp8=HOPPER),
    "h100-nvl": _sheet("NVIDIA H100 NVL", 835, 3900, 93.1, PCIE5, "NVIDIA H100 NVL", fp8=HOPPER),
    "b200": _sheet("NVIDIA B200", 2250, 8000, 178.0, PCIE5, "NVIDIA B200", fp8=ADA, num_fp8_layouts=1),
    "gb200": _sheet("NVIDIA GB200", 2500, 8000, 184.0, C2C, "NVIDIA GB200", 128 / (LINK * C2C), is_link_shared=False,
                    fp8=ADA, num_fp8_layouts=1),
    "a100-80": _sheet("NVIDIA A100 80 GB SXM", 312, 2039, 79.1, PCIE4, "NVIDIA A100-SXM4-80GB"),
    "a100-40": _sheet("NVIDIA A100 40 GB SXM", 312, 1555, 39.4, PCIE4, "NVIDIA A100-SXM4-40GB"),
    "l40s": _sheet("NVIDIA L40S", 362, 864, 44.4, PCIE4, "NVIDIA L40S", fp8=ADA),
    "rtx4090": _sheet("NVIDIA GeForce RTX 4090", 165, 1008, 23.5, PCIE4, "NVIDIA GeForce RTX 4090", fp8=ADA),
    "rtx5090": _sheet("NVIDIA GeForce RTX 5090", 209.5, 1792, 31.3, PCIE5, "NVIDIA GeForce RTX 5090", fp8=ADA),
}
"""GPUs by their name on the command line. Link speeds are those of one GPU alone (``Gpu.beside``). Sources of TFLOP/s,
memory bandwidth and link: NVIDIA's data sheets "A100 Tensor Core GPU", "L40S", "H100 Tensor Core GPU" (SXM, PCIe and
NVL; half of the figures "with sparsity"), "DGX B200" and "GB200 NVL72" (one of 8 and of 72 GPUs), and its architecture
papers "Ada GPU Architecture" (RTX 4090) and "RTX Blackwell GPU Architecture" (RTX 5090; bf16 with fp32 accumulation).
Memory is what CUDA reports, less than the size in a GPU's name."""

SHARED_GB_S = {2: (32.0, 32.0), 4: (17.0, 17.0), 8: (17.0, 10.0)}
"""GB/s of each GPU in one direction, and in each of both, while 2, 4 and 8 GPUs of an H200 host copy at once. By the
slowest GPU: 32 and 17 both ways with 2 and 4; with 8, 10 to 14 both ways, and 17 to 30 in one direction. One direction
alone was not measured with 2 and 4: it is taken for as fast as both."""
MAX_PER_HOST = max(SHARED_GB_S)
GB_S_PER_TFLOPS = 3.4  # memory bandwidth over dense bf16 TFLOP/s of an H100, for a GPU described by three numbers
CUSTOM = "custom:"
CUSTOM_SYNTAX = f"{CUSTOM}MEMORY,TFLOPS,LINK"


def gpu_of(cuda_name: str) -> Gpu | None:
    """Return the GPU with CUDA's name ``cuda_name``, or None if it is not in the table."""
    return next((gpu for gpu in GPUS.values() if gpu.cuda_name == cuda_name), None)


def find_gpu(name: str) -> Gpu:
    """Return the GPU of that name in any case, or the GPU that ``custom:…`` describes, or raise ``UsageError``."""
    if name.lower().startswith(CUSTOM):
        return _custom(name)
    found = GPUS.get(name.lower()) or GPUS.get(f"rtx{name}")
    if found is None:
        near = difflib.get_close_matches(name.lower(), GPUS, 1, 0.4)
        raise UsageError(
            f"--gpu {name}: is not in the table{f', did you mean {near[0]}?' if near else ';'} There are "
            f"{', '.join(GPUS)}. Describe another one as {CUSTOM_SYNTAX} (GiB of memory, dense bf16 TFLOP/s of its "
            "data sheet, GB/s of its link in one direction), or measure a profile."
        )
    return found


def _custom(name: str) -> Gpu:
    words = name[len(CUSTOM) :].split(",")
    try:
        figures = [float(word) for word in words]
    except ValueError:
        figures = []
    if len(figures) != 3 or not all(0 < figure <= MOST for figure in figures):
        raise UsageError(
            f"--gpu {name}: must be {CUSTOM_SYNTAX}, three numbers above 0: GiB of memory, dense bf16 TFLOP/s of the "
            "data sheet, GB/s of the link in one direction; for example custom:79.1,989,63."
        )
    memory_gib, peak_tflops, link_gb_s = figures
    gpu = _sheet(f"a GPU of {memory_gib:g} GiB", peak_tflops, GB_S_PER_TFLOPS * peak_tflops, memory_gib, link_gb_s, "")
    return replace(gpu, source=f"{peak_tflops:g} TFLOP/s and {link_gb_s:g} GB/s as given, memory as fast as an "
                   "H100's relative to its TFLOP/s; not measured")  # fmt: skip
