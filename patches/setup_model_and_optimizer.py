"""Ask before the model is built whether it may be.

``pretrain`` builds the model first and reads no setting of ours. A script with our flags and without
``SwapSession.install`` would train unswapped, silently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.swap.patches.registry import Patch

MODULE, ATTRIBUTE = "megatron.training.training", "setup_model_and_optimizer"
SYMBOL = f"{MODULE}.{ATTRIBUTE}"


def setup_model_and_optimizer_patch(check: Callable[[], None]) -> Patch:
    """Make the patch. ``check`` is called before the model is built; an exception that it raises ends ``pretrain``."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def setup_model_and_optimizer(*arguments: Any, **options: Any) -> Any:
            check()
            return original(*arguments, **options)

        return setup_model_and_optimizer

    return Patch(
        module=MODULE,
        attribute=ATTRIBUTE,
        build=build,
        reason="no hook runs before the model is built where a script has forgotten SwapSession.install",
        sources={
            "megatron-core 0.18.2": "a021cf35218caf04ce844f7ccc00da3d8d1b3529b69ed60436cfcd3ef419a104",
            "megatron-core 0.19.0": "3d67da87effab5cb44eda5b118f3dc0cbf46bae4cee5da8a10b85aec550870c4",
        },
        feature="an error for a script that forgets SwapSession.install",
    )
