"""Which submodule is running: gives every saved tensor of a layer its readable name."""

from __future__ import annotations

from collections import Counter

from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron.swap.types import Site

OWN_PATH = "layer"
"""Path of what a layer saves outside its submodules (the residual connections)."""
CHECKPOINT_PATH = "checkpoint"
"""Path of the input of layers that are recomputed whole."""


class SiteNames:
    """Follows the submodules of one layer through its forward."""

    def __init__(self, layer: int, module: nn.Module) -> None:
        self._layer = layer
        self._stack: list[str] = []
        self._ordinals: Counter[str] = Counter()
        self._hooks: list[RemovableHandle] = []
        for path, submodule in module.named_modules():
            if path:
                self._follow(path, submodule)

    def begin(self) -> None:
        """The layer starts. An exception in an earlier run may have left its submodules on the stack."""
        self._stack.clear()
        self._ordinals.clear()

    def next_site(self) -> Site:
        """The name of the tensor that is being saved."""
        path = self._stack[-1] if self._stack else OWN_PATH
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
