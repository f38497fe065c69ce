"""The names of saved tensors."""

import torch
from torch import nn

from megatron.swap.common.site_paths import LOSS_PATH, NON_LAYER, OWN_PATH
from megatron.swap.common.types import Site
from megatron.swap.engine.sites import SiteNames
from tests.engine import Layer, batch


def saved_in(module: nn.Module, names: SiteNames, hidden: torch.Tensor) -> list[str]:
    """Return the sites of one run, as strings."""
    sites: list[str] = []
    names.begin()
    with torch.autograd.graph.saved_tensors_hooks(lambda _: sites.append(str(names.next_site())), lambda _: None):
        module(hidden)
    assert len(set(sites)) == len(sites)
    return sites


class Recursive(nn.Module):
    """Runs itself once more inside itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, hidden: torch.Tensor, depth: int = 2) -> torch.Tensor:
        hidden = self.linear(hidden).sigmoid()
        return self(hidden, depth - 1) if depth else hidden


def test_sites_have_the_path_of_the_innermost_running_module_in_every_run() -> None:
    layer = Layer()
    names = SiteNames(5, layer)
    found = saved_in(layer, names, batch(0))
    for site in ("norm1/0", "attention.linear_qkv/0", "attention/0", "mlp/0", "mlp.linear_fc2/0"):
        assert f"layers.5/{site}" in found
    assert saved_in(layer, names, batch(1)) == found
    names.begin()
    assert [names.next_site(), names.next_site()] == [Site(5, OWN_PATH, 0), Site(5, OWN_PATH, 1)]
    recursive = nn.Sequential(Recursive())
    found = saved_in(recursive, SiteNames(0, recursive), batch())
    assert {site.rsplit("/", 1)[0] for site in found} == {"layers.0/0", "layers.0/0.linear"}


def test_what_is_left_out_is_not_followed_and_remove_takes_all_hooks_off() -> None:
    layer = Layer()
    names = SiteNames(NON_LAYER, layer, without=[layer.mlp, layer.attention])
    assert names.modules == [layer, layer.norm1, layer.norm2]
    assert [module for module in layer.modules() if module._forward_hooks] == [layer.norm1, layer.norm2]
    assert str(names.next_site(LOSS_PATH)) == "layers.-1/loss/0"
    names.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())
