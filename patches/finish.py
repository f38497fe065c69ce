"""Call back when Megatron's trainer has nothing more to print, so that our report stands last on the screen.

``pretrain`` evaluates and saves after ``train``. The last thing that it does is to finish its logger.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.swap.patches.registry import Patch


def finish_patch(on_end: Callable[[], None]) -> Patch:
    """Make the patch. ``on_end`` is called once Megatron's last line is printed."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def finish(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            on_end()
            return result

        return finish

    return Patch(
        module="megatron.training.one_logger_utils",
        attribute="finish",
        build=build,
        reason="no hook runs behind the last evaluation, whose lines would follow our report",
        sources={"megatron-core 0.18.2": "8bc8381f3b20017811fde9d720d0022db3114e3ced38537b804a62f616a45e25"},
        feature="a report behind Megatron's last line",
    )
