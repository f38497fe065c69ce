"""Report when training begins and when it ends, however it ends.

``train`` may end by ``sys.exit`` (time limits, signals, ``--exit-interval``). Otherwise ``pretrain`` goes on with a
last evaluation and checkpoint. So code after ``pretrain`` runs too late or never.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from megatron.swap.patches.registry import Patch

MODULE, ATTRIBUTE = "megatron.training.training", "train"
SYMBOL = f"{MODULE}.{ATTRIBUTE}"


def train_patch(
    on_begin: Callable[[], None], on_finish: Callable[[BaseException | None, Sequence[Any], Any], None]
) -> Patch:
    """Make the patch.

    ``on_begin`` is called before the first step; its exception ends training. ``on_finish`` is called once when
    training has ended, with the exception that ended it or ``None``, the model's chunks, and the optimizer.
    """

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train(forward_step_func: Any, model: Any, optimizer: Any, *arguments: Any, **options: Any) -> Any:
            try:
                on_begin()
                result = original(forward_step_func, model, optimizer, *arguments, **options)
            except BaseException as failure:
                on_finish(failure, model, optimizer)
                raise
            on_finish(None, model, optimizer)
            return result

        return train

    return Patch(
        module=MODULE,
        attribute=ATTRIBUTE,
        build=build,
        reason="no hook runs when training begins, nor when it ends by sys.exit",
        sources={
            "megatron-core 0.18.2": "3ac908aaa9798235cf00d97be2c5d288cb350abc749e33f0eb1b25dea7618f01",
            "megatron-core 0.19.0": "3c2299658ae7928bf0e4a3585531f2350de38c161984f12b9e17410102965e35",
        },
    )
