"""Report the optimizer as soon as it is built, before a checkpoint is loaded into it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.swap.patches.registry import Patch


def get_megatron_optimizer_patch(on_built: Callable[[Any], None]) -> Patch:
    """Make the patch. ``on_built`` is called with the ``MegatronOptimizer``."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def get_megatron_optimizer(*arguments: Any, **options: Any) -> Any:
            optimizer = original(*arguments, **options)
            on_built(optimizer)
            return optimizer

        return get_megatron_optimizer

    return Patch(
        module="megatron.training.training",
        attribute="get_megatron_optimizer",
        build=build,
        reason="no hook runs between the optimizer's construction and the loading of its checkpoint",
        sources={
            "megatron-core 0.18.2": "0ce97eeda313412ab20e459dfe464c21645a3fea4a4c8e522c4adbcfb18164ce",
            "megatron-core 0.19.0": "b473223298c434306e3e9f6f047d7e63e3b0feb5dbb38796cc938fd2f68b4aaf",
        },
    )
