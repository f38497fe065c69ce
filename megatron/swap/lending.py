"""How much memory is lent to copies: to those out that wait for their release, to those in ahead of their use.

What layers keep on the device is free before their forward has claimed it and after their backward, the same bytes in
every micro-batch: they are learned when a chunk runs, and lent when it runs again (docs/architecture.md, "What lends
memory"). On top of that comes the window.
"""

from __future__ import annotations

import torch

from megatron.swap.group import Group
from megatron.swap.types import Place


class Lending:
    """What was learned of sizes, and what follows from it.

    Args:
        chosen_bytes: the window; ``None``: as large as the largest group.
    """

    def __init__(self, chosen_bytes: int | None) -> None:
        self._chosen_bytes = chosen_bytes
        self.largest_group_bytes = 0
        # What each layer kept when it last ran; and, of a whole chunk, what all layers behind it kept.
        self._kept_bytes: dict[int, int] = {}
        self._kept_after_bytes: dict[int, int] = {}
        self._claimed: set[int] = set()
        self._unclaimed_bytes = 0

    @property
    def window_bytes(self) -> int:
        """Most bytes in flight ahead of their use."""
        return self._chosen_bytes if self._chosen_bytes is not None else self.largest_group_bytes

    @property
    def window_groups(self) -> int:
        """That many of the largest groups."""
        return self.window_bytes // self.largest_group_bytes if self.largest_group_bytes else 0

    def follow(self, chosen_bytes: int | None) -> None:
        """Another policy holds, with its window: what was learned of sizes is no longer true."""
        self._chosen_bytes = chosen_bytes
        self.largest_group_bytes = 0
        self._kept_bytes.clear()
        self._kept_after_bytes.clear()

    def begin_forward(self, layer: int, place: Place) -> None:
        """What the layer is about to keep is lent, if it may be."""
        self._claimed.clear()
        self._unclaimed_bytes = self._kept_bytes.get(layer, 0) if place.lends_own else 0

    def claim(self, storage: torch.UntypedStorage, group: Group) -> bool:
        """The layer that runs keeps ``storage``; whether less is lent because of it."""
        if storage._cdata in self._claimed:
            return False
        self._claimed.add(storage._cdata)
        group.kept_bytes += storage.nbytes()
        had_lent = self._unclaimed_bytes > 0
        self._unclaimed_bytes = max(0, self._unclaimed_bytes - storage.nbytes())
        return had_lent

    def end_claims(self) -> None:
        """The layer has claimed all that it keeps."""
        self._unclaimed_bytes = 0

    def end_forward(self, group: Group) -> None:
        """Learn what its layer moved and kept; at the end of a chunk, what each of its layers will lend next time."""
        self.see(group)
        self._kept_bytes[group.key.layer] = group.kept_bytes
        group.run.kept.append((group.key.layer, group.kept_bytes))
        if group.place.num_after == 0:
            kept_after_bytes = 0
            for layer, kept_bytes in reversed(group.run.kept):
                self._kept_after_bytes[layer] = kept_after_bytes
                kept_after_bytes += kept_bytes

    def see(self, group: Group) -> None:
        """A group moves as much as it says now."""
        self.largest_group_bytes = max(self.largest_group_bytes, group.num_bytes)

    def leaving_bytes(self, layer: int, place: Place) -> int:
        """Most that may wait for its release while ``layer`` runs.

        Early in forward more may wait than later: what layers keep on the device they have yet to claim, so that is
        lent to the copies until then (``Place.lends_own``), and the compute stream does not stand still for it. A chunk
        that ends in the loss has nothing to lend at its end: there the peak is.
        """
        window_bytes = 0 if place.ends_in_loss else self.window_bytes
        return self._kept_after_bytes.get(layer, 0) + self._unclaimed_bytes + window_bytes

    def ahead_bytes(self, group: Group, current: Group | None, num_kept_between: int, kept_between_bytes: int) -> int:
        """Bytes that may be ahead of backward, which is in ``current``, once ``group`` is among them.

        Layers give back what they kept as backward gets through with them, and nobody claims it before this backward is
        over: it is lent to what comes next, as in forward. While layers that kept something still stand between
        backward and ``group`` their memory is waited for instead of using the window, so that the peak is that of
        forward's end; the tail is too short for that, the link would stand still.
        """
        allowed_bytes = self.window_bytes
        if num_kept_between >= group.place.num_tail(self.window_groups):
            allowed_bytes = max(0, allowed_bytes - kept_between_bytes)
        if current is not None and current.run is group.run:
            allowed_bytes += max(0, group.run.over_bytes - current.num_bytes)
        # A window that is chosen is to save memory: it falls through backward, and leaves room for fragments.
        return allowed_bytes if self._chosen_bytes is None else min(allowed_bytes, 2 * self._chosen_bytes)
