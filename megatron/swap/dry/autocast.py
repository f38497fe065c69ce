"""Autocast to bf16, as on a GPU, of tensors on the meta device, which PyTorch's own autocast leaves alone.

A layer of the dispatcher above autograd casts the same operators as PyTorch's. A checkpoint that recomputes in backward
does not know the layer, so it stays on through backward, and casts operators that run with gradients there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree

from megatron.swap.engine.overrides import in_backward

# Operators by the type that autocast gives them on CUDA (pytorch.org, "Automatic Mixed Precision package").
IN_16_BITS = [
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear", "matmul", "mm", "mv", "prelu",
    "scaled_dot_product_attention",
]  # fmt: skip
IN_SINGLE_PRECISION = [
    "acos", "asin", "binary_cross_entropy_with_logits", "cdist", "cosh", "cosine_embedding_loss", "cosine_similarity",
    "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1", "group_norm", "hinge_embedding_loss", "huber_loss", "kl_div",
    "l1_loss", "layer_norm", "log", "log10", "log1p", "log2", "log_softmax", "logsumexp", "margin_ranking_loss",
    "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "nll_loss", "norm", "poisson_nll_loss", "pow", "prod",
    "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax", "softplus", "sum", "tan",
    "triplet_margin_loss",
]  # fmt: skip
# A place in the dispatcher for the autocast of a device that PyTorch does not have. Nothing else uses the place here.
KEY_NAME = "AutocastPrivateUse1"
KEY = getattr(torch._C.DispatchKey, KEY_NAME)


class DryAutocast:
    """Autocast that is on inside ``forward``, and for recomputations in backward, as long as it is entered."""

    def __init__(self) -> None:
        self._is_on = False
        self._weights: dict[int, torch.Tensor] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Return a context around a whole step."""
        operators, others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
        others.fallback(torch.library.fallthrough_kernel, KEY_NAME)
        for names, dtype in ((IN_16_BITS, torch.bfloat16), (IN_SINGLE_PRECISION, torch.float32)):
            for operator in _overloads(names):
                operators.impl(operator, self._casting(operator, dtype), KEY_NAME)
        torch._C._dispatch_tls_set_dispatch_key_excluded(KEY, False)  # every autocast is excluded while it is off
        try:
            with torch._C._IncludeDispatchKeyGuard(KEY):
                yield
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(KEY, True)
            operators._destroy()
            others._destroy()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Return a context around forward and loss, whose end drops the casts of weights."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False
            self._weights.clear()

    def _casting(self, operator: Any, dtype: torch.dtype) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(KEY)):
                if torch.is_grad_enabled() and (self._is_on or in_backward()):
                    leaves, structure = _pytree.tree_flatten((args, kwargs))
                    cast = [self._cast(leaf, dtype) for leaf in reversed(leaves)]  # as compiled C++ casts arguments
                    args, kwargs = _pytree.tree_unflatten(cast[::-1], structure)
                return operator(*args, **kwargs)

        return run

    def _cast(self, leaf: Any, dtype: torch.dtype) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.dtype in (dtype, torch.float64):
            return leaf
        if not (self._is_on and leaf.is_leaf and leaf.requires_grad and torch.is_autocast_cache_enabled()):
            return leaf.to(dtype)
        if id(leaf) not in self._weights:
            self._weights[id(leaf)] = leaf.to(dtype)
        return self._weights[id(leaf)]


def _overloads(names: list[str]) -> Iterator[Any]:
    """Yield overloads of operators, without those that write into a given result, or take names of dimensions."""
    for packet in (getattr(torch.ops.aten, name) for name in names):
        for operator in (getattr(packet, name) for name in packet.overloads()):
            given = operator._schema.arguments
            if not any(one.is_out or "str" in str(one.type) for one in given if one.name != "reduction"):
                yield operator
