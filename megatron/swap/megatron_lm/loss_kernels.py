"""CUDA kernels for cross entropy that read each logit once, compiled by torch at their first use.

Elsewhere ``cross_entropy.py`` uses several passes of torch's kernels. Both give the same bits: the same operations on
each element in the same order, with ``expf`` and division as torch compiles them. Compilation needs NVRTC, which comes
with torch, and the headers of a CUDA toolkit. A warning says so if they are missing.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megatron.swap.common.rounding import ceil_div

LOGITS_PER_THREAD = 8  # 16 bytes: read at once
THREADS_PER_BLOCK = 256
SOURCE = """
__device__ float single(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }

__device__ unsigned short rounded(float value) {
    unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

union Logits { uint4 all; unsigned short of[8]; };
union Floats { float4 half[2]; float of[8]; };

extern "C" __global__ void exponentials(
    const uint4* logits, const float* largest, float4* results, int width
) {
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= width) return;
    size_t row = blockIdx.x, at = row * width + i;
    float most = largest[row];
    Logits in; in.all = logits[at];
    Floats out;
    #pragma unroll
    for (int k = 0; k < 8; ++k) out.of[k] = expf(single(in.of[k]) - most);
    results[2 * at] = out.half[0];
    results[2 * at + 1] = out.half[1];
}

extern "C" __global__ void gradients(
    const uint4* logits, const float* largest, const float* total, const long long* word, const float* here,
    const float* factor, uint4* results, int width
) {
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= width) return;
    size_t row = blockIdx.x, at = row * width + i;
    float most = largest[row], sum = total[row], hit = here[row], times = factor[row];
    long long hit_at = word[row] - 8LL * i;
    Logits in; in.all = logits[at];
    Logits out;
    #pragma unroll
    for (int k = 0; k < 8; ++k) {
        float share = expf(single(in.of[k]) - most) / sum;
        if (k == hit_at) share -= hit;
        out.of[k] = rounded(share * times);
    }
    results[at] = out.all;
}
"""


class Kernels(NamedTuple):
    """The compiled kernels. Tensors are contiguous and on one device, in single precision unless said otherwise."""

    # (logits, largest, results): exponentials of logits less their row's maximum.
    exponentials: Callable[..., None]
    # (logits, largest, total, word, here, factor, results): gradients of logits. `word` is int64, `results` may be the
    # logits.
    gradients: Callable[..., None]


def kernels_for(logits: torch.Tensor) -> Kernels | None:
    """Return kernels for ``logits`` (tokens, vocabulary), or None if torch's must be used."""
    # Each thread reads `LOGITS_PER_THREAD` logits at an aligned address.
    fits = logits.is_cuda and logits.dtype is torch.bfloat16 and logits.size(-1) % LOGITS_PER_THREAD == 0
    return _compiled(logits.device) if fits and logits.data_ptr() % 16 == 0 else None


@functools.cache
def _compiled(device: torch.device) -> Kernels | None:
    try:
        with torch.cuda.device(device):
            compiled = [torch.cuda._compile_kernel(SOURCE, name) for name in Kernels._fields]
    except (AttributeError, ImportError, OSError, RuntimeError) as error:
        warnings.warn(f"the loss is computed by torch's own kernels, which are slower: {error}", stacklevel=2)
        return None
    return Kernels(*(functools.partial(_launch, kernel) for kernel in compiled))


def _launch(kernel: Any, logits: torch.Tensor, *others: torch.Tensor) -> None:
    width = logits.size(-1) // LOGITS_PER_THREAD
    grid = (len(logits), ceil_div(width, THREADS_PER_BLOCK), 1)
    kernel(grid=grid, block=(THREADS_PER_BLOCK, 1, 1), args=[logits, *others, width])
