"""The kernel of fused weight gradients: given to Megatron where apex has none, or fusion is refused or off."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from megatron.swap.common.types import UsageError
from megatron.swap.megatron_lm import weight_gradients
from megatron.swap.patches import linear_weight_gradients, registry, weight_gradient_kernel
from megatron.swap.patches.registry import AppliedPatches, Misfit

_supplied: list[AppliedPatches] = []


def supply_fusion_kernel(args: Namespace) -> Sequence[Misfit]:
    """Give Megatron TransformerEngine's kernel if apex has none for fused gradients. Return patches that misfit."""
    kernel = weight_gradients.te_kernel() if args.gradient_accumulation_fusion else None
    if kernel is None or weight_gradients.has_kernel():
        return []
    patches = weight_gradient_kernel.weight_gradient_kernel_patches(kernel)
    misfits = registry.find_misfits(patches)
    if not misfits:
        # For the whole process: the backward of every model that is built with it calls it.
        _supplied.append(registry.apply(patches))
    return misfits


def refuse_fusion_without_kernel(args: Namespace) -> None:
    """Raise a ``UsageError`` if linear layers fuse gradients without a kernel."""
    # Megatron itself fails only when it builds the model.
    if args.gradient_accumulation_fusion and not weight_gradients.has_kernel():
        raise UsageError(weight_gradients.lacks_kernel())


def switch_fusion_off(left_out: Sequence[Misfit], args: Namespace, model_config: Any) -> bool:
    """Switch Megatron's fused gradients off if their patch is among those ``left_out``. Return whether it is."""
    if all(misfit.patch is not linear_weight_gradients.PATCH for misfit in left_out):
        return False
    # Without the patch, Megatron's linear layers lose the gradients of their weights.
    args.gradient_accumulation_fusion = False
    if model_config is not None:
        model_config.gradient_accumulation_fusion = False
    return True
