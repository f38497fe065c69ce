"""The host's time in a layer's forward, where the GPU may wait for the host."""

from collections.abc import Mapping

from megatron.swap.common.types import Action

# In multiples of the layer's own time on the host, so that the costs follow the host's speed. They are of a Qwen3 layer
# of transformers. On a CPU a plan with 12 recomputed and 5 offloaded sites a layer takes 3.9 times the layer's own time
# (host-time.json, followed in C++), and 3.9 by these costs.
HOOKS = 0.7  # hooks that keep all saved tensors of the layer
WATCH = 0.6  # following the layer's operators, if any site is recomputed
RECOMPUTED_SITE = 0.065  # recording the operators behind a site, and the decision
SWAPPED_SITE = 0.14  # enqueueing the copy of a site's storage, and releasing the storage
WHOLE = 1.0  # a checkpoint around the layer, in place of hooks
WHOLE_LAYER = 1 + WHOLE + SWAPPED_SITE  # a layer that is recomputed whole and offloads its input


def forward_host_ms(own_ms: float, actions: Mapping[str, Action], is_whole: bool) -> float:
    """Return the host's time in a layer's forward; ``own_ms`` are the layer's own, ``actions`` those of its sites."""
    num_swapped = sum(action is Action.SWAP for action in actions.values())
    if is_whole:
        return own_ms * (1 + WHOLE + SWAPPED_SITE * num_swapped)
    num_recomputed = sum(action is Action.RECOMPUTE for action in actions.values())
    watch = WATCH if num_recomputed else 0.0
    return own_ms * (1 + HOOKS + watch + RECOMPUTED_SITE * num_recomputed + SWAPPED_SITE * num_swapped)
