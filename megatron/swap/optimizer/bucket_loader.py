"""Loading of a step's buckets, in the order of the step; some are loaded before it begins."""

from __future__ import annotations

from collections import deque

from megatron.swap.optimizer.param_state import ParamShard
from megatron.swap.optimizer.transfers import Bucket, PendingBucket, StateTransfers


class BucketLoader:
    """Loads the buckets of one optimizer.

    A bucket is *remaining*, then *pending* (its tensors on disk are being read), then *loaded*, then taken by the step.
    Before a step, the order of the previous step is assumed.

    Args:
        transfers: copies the buckets.
    """

    def __init__(self, transfers: StateTransfers) -> None:
        self._transfers = transfers
        self._order: list[list[ParamShard]] = []
        self._remaining: deque[list[ParamShard]] | None = None  # None: no bucket of the next step was begun
        self._pending: deque[PendingBucket] = deque()
        self._loaded: deque[Bucket] = deque()

    @property
    def is_complete(self) -> bool:
        """Whether every bucket of the next step is loaded, or its copy is enqueued."""
        return self._remaining is not None and not self._remaining and not self._pending

    def set_order(self, order: list[list[ParamShard]]) -> None:
        """Set the buckets of the step that begins. If they differ from those assumed, drop all loaded buckets."""
        if order != self._order:
            self.clear()
            self._order = order

    def clear(self) -> None:
        """Drop all loaded and pending buckets."""
        while self._loaded:
            self._transfers.discard(self._loaded.popleft())
        self._pending.clear()
        self._remaining = None

    def take(self) -> Bucket | None:
        """Return the next loaded bucket; ``None``: none is loaded."""
        return self._loaded.popleft() if self._loaded else None

    def load(self, room_bytes: int) -> None:
        """Load the next buckets that fit into ``room_bytes`` of device memory; at least one if none is loaded.

        Leave room for one more bucket: the one that is being stepped and then offloaded.
        """
        while (pending := self._next_pending()) is not None:
            wanted_bytes = pending.num_bytes + self._transfers.loaded_bytes
            if wanted_bytes > room_bytes - self._transfers.bucket_bytes and self._loaded:
                return
            self._transfers.release_offloaded(max(0, room_bytes - wanted_bytes))
            self._loaded.append(self._transfers.load(pending))
            self._pending.popleft()

    def load_ahead(self, room_bytes: int) -> None:
        """Load the first buckets of the next step that fit into ``room_bytes``, possibly none.

        Unlike ``load``, do not wait for the disk and take no memory from others.
        """
        while (pending := self._next_pending()) is not None:
            wanted_bytes = pending.num_bytes + self._transfers.loaded_bytes
            if wanted_bytes > room_bytes - self._transfers.bucket_bytes or not pending.is_read:
                return
            self._transfers.release_offloaded(max(0, room_bytes - wanted_bytes))
            bucket = self._transfers.load_if_free(pending)
            if bucket is None:
                return
            self._loaded.append(bucket)
            self._pending.popleft()

    def _next_pending(self) -> PendingBucket | None:
        """Return the bucket to load next, and begin reading later ones; ``None``: all are loaded."""
        if self._remaining is None:
            self._remaining = deque(self._order)
        while self._remaining and len(self._pending) < self._transfers.num_ahead:
            self._pending.append(self._transfers.begin_load(self._remaining.popleft()))
        return self._pending[0] if self._pending else None
