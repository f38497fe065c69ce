"""Prices of PyTorch's operators on a GPU by the shapes of tensors: time by FLOPs and bytes, and workspace."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from megatron.swap.forecast.attention import BACKWARD_FLOPS
from megatron.swap.forecast.gpus import Gpu
from megatron.swap.operators.kinds import tensors_in

LEAST_MS = 0.005  # of an operator, for its launch: assumed
# The host's time for an operator of forward, a view too. Profiles on hosts of H200s have 1.0 to 1.3 ms for the 90
# operators of a Qwen3 layer (docs/results/any-model/profile-29.439.json: 1.11), and up to 2.1 on a busy host.
HOST_MS = 0.012
# Speeds of kernels over `Gpu.tflops`, `memory_gb_s` and `optimizer_gb_s`, which are those of Megatron's layers and
# optimizer, the time between kernels included. Four traced steps on one H200, of 4k, 8k and 16k tokens: products 1.11
# to 1.19 (757 to 810 TFLOP/s); others 0.84 to 0.90, since many are strided; fused AdamW with clipping 1.69
# (docs/results: h200-trainer.json, and `kernels` in h200-any-model-calls.json).
LINEAR_SPEED, MEMORY_SPEED, OPTIMIZER_SPEED = 1.11, 0.88, 1.69
SINGLE_PRECISION = 15  # times as long as products in 16 bits, by the data sheets of A100 and H100

aten = torch.ops.aten
ALLOCATING = {  # only allocate
    aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided,
}  # fmt: skip
# Of their first tensor these read as much as they write.
GATHERING = {aten.embedding, aten.index, aten.index_select, aten.gather}
# These do not read their first argument, which they change.
OVERWRITING = {aten.copy_, aten.fill_, aten.zero_, aten._foreach_copy_, aten._foreach_zero_}
# Most tokens whose embedding's backward adds gradients without a sort. With more tokens it first makes rows in single
# precision: one for each token, and one for each MOST_ADDED tokens, since it adds no more at once.
MOST_UNSORTED = 3072
MOST_ADDED = 10
# Fused attention, with the position of the argument `is_causal`.
FORWARD_ATTENTION = {aten._scaled_dot_product_flash_attention: 4, aten._scaled_dot_product_efficient_attention: 6}
BACKWARD_ATTENTION = {
    aten._scaled_dot_product_flash_attention_backward: 11, aten._scaled_dot_product_efficient_attention_backward: 11
}  # fmt: skip
# Threads of a warp, of a block of a sum, and of a multiprocessor at once; multiprocessors of Hopper.
WARP, MOST_THREADS, MOST_RESIDENT, NUM_PROCESSORS = 32, 512, 2048, 132
LEAST_VALUES, MOST_VALUES = 16, 256  # that a thread of a sum adds, if there are enough
GROUPED = {"aten::_grouped_mm", "transformers::grouped_mm_fallback", "transformers::grouped_mm_fallback_backward"}


@dataclass(frozen=True)
class Cost:
    ms: float
    workspace_bytes: tuple[int, ...] = ()  # blocks that it takes while it runs, beside its results


FREE = Cost(0.0)


def cost_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, gpu: Gpu) -> Cost:
    """Return the cost on ``gpu`` of the operator ``func(*args, **kwargs)``, which has returned ``result``."""
    packet = func.overloadpacket
    inputs, outputs = list(tensors_in([args, kwargs])), list(tensors_in(result))
    is_mutable = func._schema.is_mutable
    owned = {tensor.untyped_storage()._cdata for tensor in inputs}
    is_view = not is_mutable and all(tensor.untyped_storage()._cdata in owned for tensor in outputs)
    if packet in ALLOCATING or packet is aten.set_ or is_view:
        return FREE
    if packet in FORWARD_ATTENTION or packet in BACKWARD_ATTENTION:
        return _attention(packet, args, gpu)
    read = inputs
    if packet in OVERWRITING:
        first = {id(tensor) for tensor in tensors_in(args[0])}
        read = [tensor for tensor in inputs if id(tensor) not in first]
    elif packet in GATHERING:
        read = [*outputs, *inputs[1:]]
    written = outputs or list(tensors_in(_written(func, args)))  # operators on lists return nothing
    num_bytes = sum(map(touched_bytes, read)) + sum(map(touched_bytes, written))
    is_of_optimizer = func._schema.name.startswith(("aten::_foreach", "aten::_fused_adam"))
    speed = OPTIMIZER_SPEED * gpu.optimizer_gb_s if is_of_optimizer else MEMORY_SPEED * gpu.memory_gb_s
    slower = SINGLE_PRECISION if any(tensor.dtype is torch.float32 for tensor in inputs) else 1
    product_ms = _flops(func, args, kwargs, result) * slower / (LINEAR_SPEED * gpu.tflops * 1e9)
    workspace: tuple[int, ...] = ()
    if packet is aten.embedding_dense_backward and args[1].numel() > MOST_UNSORTED:
        workspace = (4 * (args[1].numel() + args[1].numel() // MOST_ADDED) * args[0].shape[-1],)
    elif packet is aten.sum:
        workspace = _sum_workspace(*args[:2])
    # An operator that multiplies matrices takes its FLOPs or its bytes, whichever is longer; all others their bytes.
    return Cost(max(product_ms, num_bytes / (speed * 1e6), LEAST_MS), workspace)


def _written(func: Any, args: tuple[Any, ...]) -> list[Any]:
    pairs = zip(args, func._schema.arguments, strict=False)
    return [given for given, one in pairs if one.alias_info is not None and one.alias_info.is_write]


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    if func._schema.name in GROUPED:  # rows [n, k] by the weights of their experts [e, k, m]
        products = 2 if func._schema.name.endswith("backward") else 1
        return products * 2 * args[0].numel() * args[1].shape[-1]
    count: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
    return 0 if count is None else count(*args, **kwargs, out_val=result)


def _attention(packet: Any, args: tuple[Any, ...], gpu: Gpu) -> Cost:
    """Return the cost of fused attention over [batch, heads, tokens, width]. A causal mask halves its products."""
    is_backward = packet in BACKWARD_ATTENTION
    query, key, value = args[1:4] if is_backward else args[:3]
    position = (BACKWARD_ATTENTION if is_backward else FORWARD_ATTENTION)[packet]
    is_causal = len(args) > position and bool(args[position])
    flops = 2 * prod(query.shape[:3]) * key.shape[2] * (query.shape[3] + value.shape[3]) / (2 if is_causal else 1)
    # cuDNN's attention is for 16 bits. The memory-efficient kernel counts as fast as PyTorch's flash attention.
    takes_cudnn = query.itemsize == 2 and prefers_cudnn()
    speeds = (1.0, 1.0) if takes_cudnn else gpu.own_flash_speeds
    if not is_backward:
        return Cost(max(flops / (speeds[0] * gpu.attention_tflops * 1e9), LEAST_MS))
    # Sums of the query's gradient in single precision; for fewer keys than queries their gradients, by query.
    workspace = [4 * prod(query.shape[:3]), 4 * query.numel()]
    if key.shape[1] < query.shape[1]:
        workspace += [query.nbytes, query.nbytes]
    return Cost(max(BACKWARD_FLOPS * flops / (speeds[1] * gpu.attention_tflops * 1e9), LEAST_MS), tuple(workspace))


def prefers_cudnn() -> bool:
    """Whether PyTorch 2.11 takes cuDNN's attention on Hopper, not its own (``transformers/cuda/sdp_utils.cpp``)."""
    # It does with cuDNN from 9.15.1 on, unless the environment says otherwise. A build without CUDA stands for a build
    # with such a cuDNN.
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    cudnn = getattr(torch._C, "_cudnn", None)  # torch.backends.cudnn.version() may raise
    return cudnn is None or cudnn.getVersionInt() > 91500


def _sum_workspace(tensor: torch.Tensor, dims: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the blocks for partial sums of a matrix's columns: gradients of biases and of norms' weights."""
    # PyTorch splits the rows among as many blocks of threads as fill the GPU, and each leaves sums in single precision.
    # A block has a warp's width, or that of narrow matrices, and each of its threads up to four columns
    # (aten/src/ATen/native/cuda/Reduce.cuh). Other sums need hardly any memory.
    if not tensor.dim() or not tensor.numel():
        return ()
    places = {dim % tensor.dim() for dim in dims or range(tensor.dim())}
    strides = tensor.stride()
    in_memory = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    columns = prod(size for dim, size in enumerate(tensor.shape) if dim not in places)
    if columns == 1 or set(in_memory[: len(places)]) != places or not tensor.permute(in_memory).is_contiguous():
        return ()
    rows, per_thread = tensor.numel() // columns, next(number for number in (4, 2, 1) if columns % number == 0)
    most_threads, wide = MOST_THREADS // per_thread, columns // per_thread
    width = min(_power(wide), WARP)
    height = min(_power(rows), most_threads // width)
    width = min(_power(wide), most_threads // height)
    num_wide, values = ceil(wide / width), ceil(rows / height)
    num_fitting = NUM_PROCESSORS * (MOST_RESIDENT // (width * height))
    if num_wide > num_fitting or values < MOST_VALUES:
        return ()
    blocks = max(min(ceil(num_fitting / num_wide), ceil(values / LEAST_VALUES)), ceil(values / MOST_VALUES))
    return (4 * columns * blocks * width * per_thread,)


def _power(number: int) -> int:
    """Return the largest power of two that is not above ``number``."""
    return 1 << (number.bit_length() - 1)


def touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of different elements: an expanded tensor is read once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in sizes if stride) * tensor.itemsize if tensor.numel() else 0
