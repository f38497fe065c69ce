"""Sites: names of the tensors that a layer saves, by the submodule that is running."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron.swap.common.site_paths import OWN_PATH
from megatron.swap.common.types import Site


class SiteNames:
    """Tracks which submodule of ``module`` runs (a layer, or a chunk without its layers), leaving out ``without``."""

    def __init__(self, layer: int, module: nn.Module, without: Collection[nn.Module] = ()) -> None:
        self.layer = layer  # first part of the sites' names; may change between forwards
        left_out = {inner for one in without for inner in one.modules()}
        self.modules = [one for one in module.modules() if one not in left_out]
        self._stack: list[str] = []
        self._ordinals: dict[str, int] = {}
        self._sites: dict[tuple[int, str, int], Site] = {}  # the same in every forward
        self._hooks: list[RemovableHandle] = []
        for path, submodule in module.named_modules():
            if path and submodule not in left_out:
                self._add_hooks(path, submodule)

    def begin(self) -> None:
        """Begin a forward. Clear submodules that an exception in an earlier forward left on the stack."""
        self._stack.clear()
        self._ordinals.clear()

    def next_site(self, own_path: str = OWN_PATH) -> Site:
        """Return the site of the tensor that is being saved; ``own_path`` is its path if no submodule runs."""
        path = self._stack[-1] if self._stack else own_path
        ordinal = self._ordinals.get(path, 0)
        self._ordinals[path] = ordinal + 1
        key = self.layer, path, ordinal
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = Site(*key)
        return site

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _add_hooks(self, path: str, submodule: nn.Module) -> None:
        def enter(*_: object) -> None:
            self._stack.append(path)

        def leave(*_: object) -> None:
            if self._stack:
                self._stack.pop()

        self._hooks.append(submodule.register_forward_pre_hook(enter))
        self._hooks.append(submodule.register_forward_hook(leave, always_call=True))


def is_hooked(module: nn.Module) -> bool:
    """Whether a ``SiteNames`` has hooks on ``module``: its layer is swapped."""
    return any(getattr(hook, "__module__", None) == __name__ for hook in module._forward_pre_hooks.values())
