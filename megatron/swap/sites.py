"""Which submodule is running: gives every saved tensor of a layer its readable name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron.swap.types import Site

OWN_PATH = "layer"
"""Path of what a layer saves outside its submodules (the residual connections)."""
CHECKPOINT_PATH = "checkpoint"
"""Path of the input of layers that are recomputed whole."""
MODEL_PATH, LOSS_PATH = "model", "loss"
"""Paths of what a model chunk saves outside its submodules: before its layers, and behind them."""
OUTSIDE = -1
"""Instead of a layer's number: of what is in no layer."""


class SiteNames:
    """Follows the submodules of one layer, or of what stands around layers, through its forward.

    Args:
        without: submodules that are left out, with all that is in them.

    Attributes:
        modules: those that are followed, and ``module`` itself.
    """

    def __init__(self, layer: int, module: nn.Module, without: Collection[nn.Module] = ()) -> None:
        self._layer = layer
        left_out = {inner for one in without for inner in one.modules()}
        self.modules = [one for one in module.modules() if one not in left_out]
        self._stack: list[str] = []
        self._ordinals: Counter[str] = Counter()
        self._hooks: list[RemovableHandle] = []
        for path, submodule in module.named_modules():
            if path and submodule not in left_out:
                self._follow(path, submodule)

    def begin(self) -> None:
        """The layer starts. An exception in an earlier run may have left its submodules on the stack."""
        self._stack.clear()
        self._ordinals.clear()

    def next_site(self, own_path: str = OWN_PATH) -> Site:
        """The name of the tensor that is being saved; ``own_path``: what is in no submodule is named so."""
        path = self._stack[-1] if self._stack else own_path
        ordinal = self._ordinals[path]
        self._ordinals[path] += 1
        return Site(self._layer, path, ordinal)

    def remove(self) -> None:
        """Take the hooks off again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _follow(self, path: str, submodule: nn.Module) -> None:
        def enter(*_: object) -> None:
            self._stack.append(path)

        def leave(*_: object) -> None:
            if self._stack:
                self._stack.pop()

        self._hooks.append(submodule.register_forward_pre_hook(enter))
        self._hooks.append(submodule.register_forward_hook(leave, always_call=True))


def is_followed(module: nn.Module) -> bool:
    """Whether a ``SiteNames`` follows ``module``: a layer around it is swapped."""
    return any(getattr(hook, "__module__", None) == __name__ for hook in module._forward_pre_hooks.values())
