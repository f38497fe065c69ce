"""How many bytes may be in flight: copied out and waiting for their release, or prefetched ahead of their use.

What layers keep on the device is free before their forward has saved it and after their backward, and it is the same
number of bytes in every micro-batch. So it is learned when a chunk runs, and that slack is used by copies when the
chunk runs again (docs/architecture.md, "The release budget"). On top of the slack comes the window.
"""

from __future__ import annotations

import torch

from megatron.swap.common.types import LayerPosition
from megatron.swap.engine.handle import Group


class ReleaseBudget:
    """Learns sizes, and derives limits from them.

    Args:
        chosen_bytes: the window; ``None``: as large as the largest group.
    """

    def __init__(self, chosen_bytes: int | None) -> None:
        self._chosen_bytes = chosen_bytes
        self.largest_group_bytes = 0
        # What each layer kept when it last ran; and, once a chunk has run, what all layers behind each one kept.
        self._kept_bytes: dict[int, int] = {}
        self._kept_after_bytes: dict[int, int] = {}
        # Of the layer that runs: storages that it has kept so far, and bytes that it has yet to keep.
        self._accounted: set[int] = set()
        self._unaccounted_bytes = 0

    @property
    def window_bytes(self) -> int:
        """Most bytes in flight, without slack."""
        return self._chosen_bytes if self._chosen_bytes is not None else self.largest_group_bytes

    @property
    def window_groups(self) -> int:
        """How many of the largest groups fit into the window."""
        return self.window_bytes // self.largest_group_bytes if self.largest_group_bytes else 0

    def apply_policy(self, chosen_bytes: int | None) -> None:
        """Another policy holds, with its window: forget the sizes."""
        self._chosen_bytes = chosen_bytes
        self.largest_group_bytes = 0
        self._kept_bytes.clear()
        self._kept_after_bytes.clear()

    def begin_forward(self, layer: int, position: LayerPosition) -> None:
        """``layer`` begins: what it is about to keep is slack, where ``LayerPosition.early_release`` allows that."""
        self._accounted.clear()
        self._unaccounted_bytes = self._kept_bytes.get(layer, 0) if position.early_release else 0

    def account_kept(self, storage: torch.UntypedStorage, group: Group) -> bool:
        """Note that the layer that runs keeps ``storage``. Return whether the slack has shrunk by it."""
        if storage._cdata in self._accounted:
            return False
        self._accounted.add(storage._cdata)
        group.kept_bytes += storage.nbytes()
        had_slack = self._unaccounted_bytes > 0
        self._unaccounted_bytes = max(0, self._unaccounted_bytes - storage.nbytes())
        return had_slack

    def end_accounting(self) -> None:
        """The layer keeps no more than it has."""
        self._unaccounted_bytes = 0

    def end_forward(self, group: Group) -> None:
        """Learn what the layer moved and kept; at the end of a chunk, how much slack each of its layers has."""
        self.note_size(group)
        self._kept_bytes[group.key.layer] = group.kept_bytes
        group.forward_pass.kept.append((group.key.layer, group.kept_bytes))
        if group.position.num_after == 0:
            kept_after_bytes = 0
            for layer, kept_bytes in reversed(group.forward_pass.kept):
                self._kept_after_bytes[layer] = kept_after_bytes
                kept_after_bytes += kept_bytes

    def note_size(self, group: Group) -> None:
        """Learn how many bytes ``group`` moves, as far as is known now."""
        self.largest_group_bytes = max(self.largest_group_bytes, group.num_bytes)

    def max_offloading_bytes(self, layer: int, position: LayerPosition) -> int:
        """Return how many bytes may wait for their release while ``layer`` runs.

        Early in forward more may wait than later: layers have yet to keep what they will keep, and until then copies
        use that memory, so that the compute stream does not wait for them. A chunk that ends in the loss has no slack
        at its end: there the peak is.
        """
        window_bytes = 0 if position.ends_in_loss else self.window_bytes
        return self._kept_after_bytes.get(layer, 0) + self._unaccounted_bytes + window_bytes

    def max_prefetched_bytes(
        self, group: Group, current: Group | None, num_kept_between: int, kept_between_bytes: int
    ) -> int:
        """Return how many bytes may be prefetched once ``group`` is among them, while backward is in ``current``.

        A layer whose backward has ended has freed what it kept, and nothing needs that memory before this backward is
        over: it is slack for prefetches. The window shrinks by what the layers between ``current`` and ``group`` keep,
        so that the peak stays at that of the end of forward. It does not shrink for the trailing layers alone: they are
        too few, and the link would be idle until they have ended.

        Args:
            num_kept_between, kept_between_bytes: layers between that offload nothing, and the bytes that all layers
                between have kept.
        """
        allowed_bytes = self.window_bytes
        if num_kept_between >= group.position.num_trailing_kept(self.window_groups):
            allowed_bytes = max(0, allowed_bytes - kept_between_bytes)
        if current is not None and current.forward_pass is group.forward_pass:
            allowed_bytes += max(0, group.forward_pass.over_bytes - current.num_bytes)
        # A window that is chosen is to save memory: it shrinks through backward, and leaves room for fragments.
        return allowed_bytes if self._chosen_bytes is None else min(allowed_bytes, 2 * self._chosen_bytes)
