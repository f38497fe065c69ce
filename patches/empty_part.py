"""Call back where a part of the data has no tokens. Megatron would look for enough tokens for ever."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from megatron.swap.patches.registry import Patch


def empty_part_patch(refuse: Callable[[Any], NoReturn]) -> Patch:
    """Make the patch. ``refuse`` gets the dataset, whose ``index_split`` is the part, and raises an error."""

    def build(original: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(original)
        def get_num_epochs(self: Any, num_tokens_per_epoch: int) -> int:
            if num_tokens_per_epoch == 0:
                refuse(self)
            return original(self, num_tokens_per_epoch)

        return get_num_epochs

    return Patch(
        module="megatron.core.datasets.gpt_dataset",
        attribute="GPTDataset._get_num_epochs",
        build=build,
        reason="counts epochs until there are enough tokens, and never ends where an epoch has none",
        sources={"megatron-core 0.18.2": "2a8e50253a5e1dd6859c6f410d6ddc687c47834363210a72609bb435610cf996"},
        feature="an error where a part of the data has no tokens",
    )
