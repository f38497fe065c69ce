"""The order of all copies, waits, allocations and releases, for schedules on a lazy device: as the goldens say.

A change of the engine that moves no copy changes no digest. To see what another one has moved, print the log of a case
in both trees and compare::

    PYTHONPATH=. python -m tests.unit.test_orders            # the cases
    PYTHONPATH=. python -m tests.unit.test_orders CASE       # its log
    PYTHONPATH=. python -m tests.unit.test_orders --write    # the goldens anew: a conscious act
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron import swap
from torch import nn

from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.types import ACTIVATION, KIB, LINEAR, NORM
from megatron.swap.memory.disk_file import DiskFile
from tests.engine import Engine, Step, interleaved, one_after_the_other, one_forward_one_backward, stack, train_step
from tests.frozen_models import MODELS as FROZEN
from tests.frozen_models import one_batch
from tests.lazy_device import LazyStream
from tests.logged_device import digest, goldens, logged, write
from tests.plain_loop import Cnn, OfKeyed, Twice, images, mlps, rows, train
from tests.weight_models import MODELS as WEIGHTS

Log = list[str]


def engine(
    schedule: Sequence[Step], chunks: Sequence[int] | None = None, *, dtype: torch.dtype | None = None, **options: Any
) -> Log:
    layers, ranges = stack(6, dtype=dtype), Ranges()
    device = logged(ranges)
    if options.pop("on_side_stream", False):
        device.compute = LazyStream("side", eager=True)
    with Engine(layers, device=device, ranges=ranges, chunks=chunks, **options):
        for step in range(3):
            ranges.step(step + 1)
            train_step(layers, schedule, chunks, dtype)
    assert device.violations == []
    return device.whole_log()


def on_disk(schedule: Sequence[Step]) -> Log:
    with tempfile.TemporaryDirectory() as folder:
        disk = DiskFile(Path(folder), 64 * 2**20)
        try:
            return engine(schedule, host_bytes=256 * KIB, disk=disk)
        finally:
            disk.close()


def evaluated() -> Log:
    layers, ranges = stack(6), Ranges()
    device = logged(ranges)
    with Engine(layers, device=device, ranges=ranges):
        for step in range(3):
            ranges.step(step + 1)
            train_step(layers, one_after_the_other(1))
            train_step(layers, [("F", 0, 0)])
            with torch.no_grad():
                train_step(layers, [("F", 0, 0)])
    assert device.violations == []
    return device.whole_log()


def module(make: Callable[[], nn.Module], data: Callable[[int], Any] = rows, **settings: Any) -> Log:
    device = logged()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.swap.run.run_device.EmulatedDevice", lambda *_: device)
        torch.manual_seed(7)
        model = make()
        with swap.activations(model, **{"layers": "all", "min_mib": 0, "host_gib": 0.05, **settings}):
            train(model, data, 3)
    assert device.violations == []
    return device.whole_log()


def inference(name: str) -> Log:
    torch.manual_seed(7)
    model, x = WEIGHTS[name]()
    device = logged()
    with torch.no_grad(), swap.weights(model.eval(), model.layers, device=device):
        for _ in range(3):
            model(x)
    assert device.violations == []
    return device.whole_log()


def frozen(name: str) -> Log:
    model, device = FROZEN[name](), logged()
    with swap.weights(model, training=True, device=device):
        for step in range(3):
            for _ in one_batch(model, step):
                pass
    assert device.violations == []
    return device.whole_log()


CASES: dict[str, Callable[[], Log]] = {
    "accumulation": partial(engine, one_after_the_other(2)),
    "one forward, one backward": partial(engine, one_forward_one_backward(4)),
    "four in flight": partial(engine, one_forward_one_backward(6, 4)),
    "two chunks": partial(engine, interleaved(4), [3, 3]),
    "three chunks": partial(engine, interleaved(4, 3), [2, 2, 2]),
    "no loss": partial(engine, one_forward_one_backward(4), ends_in_loss=False),
    "some layers": partial(engine, one_after_the_other(2), swapped=(0, 2, 3)),
    "the MLPs": partial(engine, one_after_the_other(2), modules=("mlp",)),
    "bf16": partial(engine, one_after_the_other(2), dtype=torch.bfloat16),
    "verified": partial(engine, one_after_the_other(2), verify=True),
    "norms and activations again": partial(engine, one_after_the_other(2), recompute=(NORM, ACTIVATION)),
    "matrix products again": partial(engine, one_forward_one_backward(4), recompute=(NORM, LINEAR)),
    "all again, none swapped": partial(engine, one_after_the_other(2), recompute=(NORM, ACTIVATION), swapped=()),
    "whole layers": partial(engine, one_forward_one_backward(3), whole=(1, 3), swapped=range(6)),
    "whole layers in chunks": partial(engine, interleaved(4), [3, 3], whole=(0, 4), swapped=range(6)),
    "a small window": partial(engine, one_after_the_other(2), window_bytes=20000, commit_bytes=4096),
    "a window of nothing": partial(engine, one_forward_one_backward(4), window_bytes=0, commit_bytes=4096),
    "on a side stream": partial(engine, one_after_the_other(2), on_side_stream=True),
    "on disk": partial(on_disk, one_after_the_other(2)),
    "on disk, in flight": partial(on_disk, one_forward_one_backward(4)),
    "guarded": partial(engine, one_forward_one_backward(4), swapped=(0, 2, 3), guarded=True),
    "evaluated": evaluated,
    "module: MLPs": partial(module, mlps),
    "module: a CNN": partial(module, Cnn, images),
    "module: keyed": partial(module, OfKeyed),
    "module: twice": partial(module, lambda: nn.Sequential(*(Twice() for _ in range(3)))),
    "module: some": partial(module, mlps, layers="every:2"),
    **{f"weights: {name}": partial(inference, name) for name in ("mlp", "transformer", "tied")},
    **{f"frozen: {name}": partial(frozen, name) for name in ("plain", "checkpoints", "reentrant checkpoints inside")},
}


@pytest.mark.parametrize("name", CASES)
def test_the_order_is_as_it_was(name: str) -> None:
    log = CASES[name]()
    assert any(" copies " in line for line in log) is (name != "all again, none swapped")
    assert digest(log) == goldens()[name], f"compare the logs: PYTHONPATH=. python -m {__name__} '{name}'"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write({name: digest(run()) for name, run in CASES.items()})
    else:
        print("\n".join(CASES[sys.argv[1]]() if sys.argv[1:] else CASES))
