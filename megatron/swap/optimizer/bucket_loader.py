"""Loading of a step's buckets, in the order of the step; some are loaded before it begins."""

from __future__ import annotations

from collections import deque

from megatron.swap.optimizer.param_state import ParamShard
from megatron.swap.optimizer.transfers import Bucket, PendingBucket, StateTransfers


class BucketLoader:
    """Loads the buckets of one optimizer.

    A bucket is remaining, pending (read from disk), loaded, then taken by the step.
    """

    def __init__(self, transfers: StateTransfers) -> None:
        self._transfers = transfers
        # Before a step begins, the order of the previous step is assumed.
        self._order: list[list[ParamShard]] = []
        self._remaining: deque[list[ParamShard]] | None = None  # None: no bucket of the next step was begun
        self._pending: deque[PendingBucket] = deque()
        self._loaded: deque[Bucket] = deque()

    @property
    def is_complete(self) -> bool:
        """Whether every bucket of the next step is loaded, or its copy is enqueued."""
        return self._remaining is not None and not self._remaining and not self._pending

    def set_order(self, order: list[list[ParamShard]]) -> None:
        """Set the buckets of the step that begins. Drop all loaded buckets if others were assumed."""
        if order != self._order:
            self.clear()
            self._order = order

    def clear(self) -> None:
        while self._loaded:
            self._transfers.discard(self._loaded.popleft())
        self._pending.clear()
        self._remaining = None

    def take(self) -> Bucket | None:
        return self._loaded.popleft() if self._loaded else None

    def load(self, room_bytes: int) -> None:
        """Load the next buckets that fit into ``room_bytes`` of device memory; at least one if none is loaded."""
        while (pending := self._next_pending()) is not None:
            wanted_bytes = pending.num_bytes + self._transfers.loaded_bytes
            # One bucket's room stays free: for the bucket that is stepped and then offloaded.
            if wanted_bytes > room_bytes - self._transfers.bucket_bytes and self._loaded:
                return
            self._transfers.release_offloaded(max(0, room_bytes - wanted_bytes))
            self._loaded.append(self._transfers.load(pending))
            self._pending.popleft()

    def load_ahead(self, room_bytes: int) -> None:
        """Load the first buckets of the next step that fit into ``room_bytes``, possibly none."""
        while (pending := self._next_pending()) is not None:
            wanted_bytes = pending.num_bytes + self._transfers.loaded_bytes
            # Layers run now, so a load must not wait for the disk, nor take memory from others.
            if wanted_bytes > room_bytes - self._transfers.bucket_bytes or not pending.is_read:
                return
            self._transfers.release_offloaded(max(0, room_bytes - wanted_bytes))
            bucket = self._transfers.load_if_free(pending)
            if bucket is None:
                return
            self._loaded.append(bucket)
            self._pending.popleft()

    def _next_pending(self) -> PendingBucket | None:
        """Return the bucket to load next, or None, and begin to read later ones."""
        if self._remaining is None:
            self._remaining = deque(self._order)
        while self._remaining and len(self._pending) < self._transfers.num_ahead:
            self._pending.append(self._transfers.begin_load(self._remaining.popleft()))
        return self._pending[0] if self._pending else None
