"""Limits on bytes in flight: copied out and waiting for their release, or prefetched ahead of their use.

Memory for the tensors that layers keep is free until forward saves them and again after backward. Its size is the same
in every micro-batch. So it is learned when a chunk runs, and copies use this slack when the chunk runs again
(docs/dev/architecture.md, "The release budget"). The limit is the slack plus the window.
"""

from __future__ import annotations

import weakref

import torch

from megatron.swap.common.types import LayerPosition
from megatron.swap.engine.handle import Group


class ReleaseBudget:
    """Learns the sizes of groups, and derives the limits. The window is the largest group unless one is chosen."""

    def __init__(self, chosen_bytes: int | None) -> None:
        self._chosen_bytes = chosen_bytes
        self.largest_group_bytes = 0
        # Bytes that each layer kept in its last run; and that all later layers kept, once a chunk has run.
        self._kept_bytes: dict[int, int] = {}
        self._kept_after_bytes: dict[int, int] = {}
        self._unaccounted_bytes = 0  # still to be kept by the running layer

    @property
    def window_bytes(self) -> int:
        """Most bytes in flight, not counting slack."""
        return self._chosen_bytes if self._chosen_bytes is not None else self.largest_group_bytes

    @property
    def window_groups(self) -> int:
        """Number of groups of the largest size that fit into the window."""
        return self.window_bytes // self.largest_group_bytes if self.largest_group_bytes else 0

    def apply_policy(self, chosen_bytes: int | None) -> None:
        """Set the window of another policy, and forget the learned sizes."""
        self._chosen_bytes = chosen_bytes
        self.largest_group_bytes = 0
        self._kept_bytes.clear()
        self._kept_after_bytes.clear()

    def begin_forward(self, layer: int, position: LayerPosition) -> None:
        """Begin ``layer``: the bytes it is about to keep are slack, if ``LayerPosition.early_release`` allows."""
        self._unaccounted_bytes = self._kept_bytes.get(layer, 0) if position.early_release else 0

    def account_kept(self, storage: torch.UntypedStorage, group: Group) -> bool:
        """Note that the running layer keeps ``storage``. Return whether this reduces the slack."""
        counted = group.forward_pass.counted
        before = counted.get(storage._cdata)
        if before is not None and before() is not None:
            return False
        counted[storage._cdata] = weakref.ref(storage)
        group.kept_bytes += storage.nbytes()
        had_slack = self._unaccounted_bytes > 0
        self._unaccounted_bytes = max(0, self._unaccounted_bytes - storage.nbytes())
        return had_slack

    def end_accounting(self) -> None:
        """Drop the layer's remaining slack: it keeps nothing more."""
        self._unaccounted_bytes = 0

    def end_forward(self, group: Group) -> None:
        """Learn the layer's swapped and kept bytes; at the end of a chunk, the slack of each of its layers."""
        self.note_size(group)
        self._kept_bytes[group.key.layer] = group.kept_bytes
        group.forward_pass.kept.append((group.key.layer, group.kept_bytes))
        if group.position.num_after == 0:
            kept_after_bytes = 0
            for layer, kept_bytes in reversed(group.forward_pass.kept):
                self._kept_after_bytes[layer] = kept_after_bytes
                kept_after_bytes += kept_bytes

    def note_size(self, group: Group) -> None:
        """Learn the bytes that ``group`` swaps, as far as they are known."""
        self.largest_group_bytes = max(self.largest_group_bytes, group.num_bytes)

    def max_offloading_bytes(self, layer: int, position: LayerPosition) -> int:
        """Return the bytes that may wait for their release while ``layer`` runs."""
        # The limit is higher early in forward. Later layers have not kept their tensors yet: copies use this memory, so
        # that the compute stream need not wait. A chunk that ends in the loss has no slack at its end, where the peak
        # is.
        window_bytes = 0 if position.ends_in_loss else self.window_bytes
        return self._kept_after_bytes.get(layer, 0) + self._unaccounted_bytes + window_bytes

    def max_prefetched_bytes(
        self, group: Group, current: Group | None, num_kept_between: int, kept_between_bytes: int
    ) -> int:
        """Return the bytes that may be prefetched, ``group`` included, while backward is in ``current``.

        ``num_kept_between`` layers between offload nothing; ``kept_between_bytes`` is kept by all layers between.
        """
        allowed_bytes = self.window_bytes
        # The window shrinks by the bytes that layers between keep, so that memory stays below its peak at the end of
        # forward. It does not shrink for the trailing layers alone: they are few, and the link would be idle until they
        # have ended.
        if num_kept_between >= group.position.num_trailing_kept(self.window_groups):
            allowed_bytes = max(0, allowed_bytes - kept_between_bytes)
        # A layer whose backward has ended has freed the tensors it kept. Nothing needs this memory before the chunk's
        # backward ends: it is slack for prefetches.
        if current is not None and current.forward_pass is group.forward_pass:
            allowed_bytes += max(0, group.forward_pass.over_bytes - current.num_bytes)
        # A window chosen by the user limits memory, so prefetches do not use all slack; this leaves room for fragments.
        return allowed_bytes if self._chosen_bytes is None else min(allowed_bytes, 2 * self._chosen_bytes)
