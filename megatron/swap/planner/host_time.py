"""The host's time in a layer's forward, where the GPU may wait for it.

The engine watches a layer's operators while some of them are recorded, and packs what autograd saves. Short layers take
the GPU less time than that takes the host. Costs are in multiples of the layer's own time on the host, so that they
follow its speed. They are of a Qwen3 layer of transformers: on a CPU a plan with 12 recomputed and 5 offloaded sites a
layer takes 3.9 times the layer's own time (host-time.json, followed in C++), and 3.9 by these.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.swap.common.types import Action

HOOKS = 0.7
"""Hooks that keep all that the layer saves."""
WATCH = 0.6
"""Following the layer's operators: where any is recomputed."""
RECOMPUTED_SITE = 0.065
"""Recording the operators behind a site, and deciding about it."""
SWAPPED_SITE = 0.14
"""Enqueueing the copy of a site's storage, and releasing the storage."""
WHOLE = 1.0
"""A checkpoint around the layer, in place of hooks."""
WHOLE_LAYER = 1 + WHOLE + SWAPPED_SITE
"""All of a layer that is recomputed whole and offloads its input."""


def forward_host_ms(own_ms: float, actions: Mapping[str, Action], is_whole: bool) -> float:
    """Return the host's time in a layer's forward, of which the layer's own work is ``own_ms``.

    Args:
        actions: of the sites, by their names.
        is_whole: the layer is recomputed whole.
    """
    num_swapped = sum(action is Action.SWAP for action in actions.values())
    if is_whole:
        return own_ms * (1 + WHOLE + SWAPPED_SITE * num_swapped)
    num_recomputed = sum(action is Action.RECOMPUTE for action in actions.values())
    watch = WATCH if num_recomputed else 0.0
    return own_ms * (1 + HOOKS + watch + RECOMPUTED_SITE * num_recomputed + SWAPPED_SITE * num_swapped)
