"""Tell us when training has ended, however it ended.

``train`` may leave by ``sys.exit`` (time limits, signals, ``--exit-interval``), and ``pretrain`` goes on
afterwards with a last evaluation and checkpoint, so code behind ``pretrain`` is too late or never runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from patches.registry import Patch


def train_patch(on_finish: Callable[[BaseException | None], None]) -> Patch:
    """``on_finish`` runs once training has ended; it gets the exception (or ``SystemExit``) that ended it, if any."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train(*arguments: Any, **options: Any) -> Any:
            try:
                result = original(*arguments, **options)
            except BaseException as failure:
                on_finish(failure)
                raise
            on_finish(None)
            return result

        return train

    return Patch(
        module="megatron.training.training",
        attribute="train",
        build=build,
        reason="no hook runs when training ends by sys.exit",
        written_for="megatron-core 0.19.2",
        source_sha256="3c2299658ae7928bf0e4a3585531f2350de38c161984f12b9e17410102965e35",
    )
