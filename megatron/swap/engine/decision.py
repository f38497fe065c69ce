"""The decision about a saved storage: an action and a reason. ``decider.py`` makes it, other modules act on it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from megatron.swap.common.types import Action


class Reason(Enum):
    """Reasons why a storage is kept, offloaded or recomputed. Values are texts for users."""

    POLICY = "the policy chose so"
    BELOW_MIN_SIZE = "it is smaller than the policy's minimum"
    EMPTY = "its storage was emptied before it was saved"
    TRAILING_LAYER = "its layer is one of the last before the loss: backward needs it at once"
    CACHE = "it is a cache that its owner may drop or rebuild"
    REFUSED_BEFORE = "it could not be released the last times: it had external references, or was changed"

    # Why a storage that the policy wants to recompute is kept or offloaded instead.
    SAVED_BEFORE = "another site saved it before and does not recompute it"
    NO_PRODUCER = "its producer is unknown"
    OUTPUT_CHANGED = "it was changed in place after it was computed"
    INPUT_CHANGED = "one of its inputs was changed in place"
    INPUT_NOT_SAVED = "one of its inputs is not saved, and keeping that input instead would save no memory"
    INPUT_NOT_CHOSEN = "one of its inputs is not saved, and {producer} is not to be recomputed"
    NOT_REPRODUCED = "its recomputation gave different bits"
    NOT_RECOMPUTED = "it cannot be recomputed here"

    # Why an offload is cancelled, found out when the storage is copied or released.
    HAS_EXTERNAL_REFS = "it has external references: dropping the saved one would free nothing"
    CHANGED = "it was changed in place after it was saved"
    TIER_FULL = "the tier has no room for it"


class Refusal(NamedTuple):
    """The reason why a storage that the policy wants to recompute is not recomputed, and the producer that it names."""

    reason: Reason
    producer: str = ""

    def __str__(self) -> str:
        return self.reason.value.format(producer=self.producer)


class Decision(NamedTuple):
    """The action for a storage, and the reason."""

    action: Action
    reason: Reason


RECOMPUTE = Decision(Action.RECOMPUTE, Reason.POLICY)
KEEP = Decision(Action.KEEP, Reason.POLICY)
KEEP_SMALL = Decision(Action.KEEP, Reason.BELOW_MIN_SIZE)
CACHE = Decision(Action.KEEP, Reason.CACHE)
