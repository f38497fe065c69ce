"""A layer's run over one micro-batch, and what of it was taken out."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from megatron.swap.handle import Handle
from megatron.swap.types import GroupKey, Place


class Run:
    """One forward of one model chunk: the groups that it made, and that one stretch of backward takes up again.

    Attributes:
        kept: layer and bytes that it kept, in the order of forward.
        begun_bytes: what groups of it kept on the device whose backward has begun.
        over_bytes: that of those whose backward is over, so that their memory is free.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[int, int]] = []
        self.begun_bytes = 0
        self.over_bytes = 0

    def begin_backward(self, group: Group) -> None:
        """Backward enters ``group``: it is through with those before."""
        self.over_bytes = self.begun_bytes
        self.begun_bytes += group.kept_bytes


class Group:
    """The handles of one layer and micro-batch, in the order in which they were saved.

    The group refers to its handles weakly: they live as long as the graph holds a tensor packed on them, and that
    decides when their memory goes back.
    """

    def __init__(self, key: GroupKey, place: Place, sequence: int, run: Run) -> None:
        self.key = key
        self.micro_batch = key.micro_batch
        """For people: which micro-batch of the step it is, where a profiler numbers them."""
        self.place = place
        self.run = run
        self.sequence = sequence
        """Place in the order of forwards since the graph was last empty."""
        self.num_bytes = 0
        """Bytes of its handles."""
        self.kept_bytes = 0
        """Bytes that its layer saved and that were left on the device."""
        self.ahead_bytes = 0
        """Bytes brought back for this group before its backward began."""
        self.backward_begun = False
        self.came_in_vain = False
        """What was brought back for it was taken again, for want of memory."""
        self._handles: list[weakref.ref[Handle]] = []

    @property
    def label(self) -> str:
        return f"layers.{self.key.layer} mb{self.micro_batch}"

    def add(self, handle: Handle) -> None:
        """``handle`` joins; one that is kept counts once it has left the device."""
        self._handles.append(weakref.ref(handle))
        if not handle.is_kept:
            self.num_bytes += handle.num_bytes

    def has(self, handle: Handle) -> bool:
        """Whether ``handle`` joined before: several views of one storage count once."""
        return any(reference() is handle for reference in reversed(self._handles))

    def in_backward_order(self) -> Iterator[Handle]:
        """The handles that are still alive, last saved first: the order in which backward asks for them."""
        for reference in reversed(self._handles):
            handle = reference()
            if handle is not None:
                yield handle
