"""The process of a soak of Megatron's trainer: ``python -m benchmarks.soak.trainer SAMPLES RESULT JOB FLAG …``.

Lengths change within each cycle of steps, which ends with an evaluation, and with a checkpoint if there is ``--save``.
Two checkpoints are kept.
"""

import contextlib
import functools
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.runner.schedule import Schedule, cut, length_at
from benchmarks.runner.stopwatch import EnoughSteps
from benchmarks.soak.meters import Meter

LENGTHS = ((12, 64), (8, 48))  # Steps and their sequence length, in turn: one cycle on a CPU
NUM_KEPT_CHECKPOINTS = 2
SHAPE = (
    "--transformer-impl local --distributed-backend gloo --num-workers 0 --no-gradient-accumulation-fusion "
    "--no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion "
    "--no-rope-fusion --no-bias-swiglu-fusion --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 2 --lr 1e-4 --min-lr 1e-5 --clip-grad 1.0 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --position-embedding-type rope --bf16 "
    "--attention-dropout 0.1 --hidden-dropout 0.1 --no-create-attention-mask-in-dataloader --log-interval 100 "
    "--swap-min-mib 0.001 --swap-host-unchecked"
)


@dataclass(frozen=True)
class Job:
    lengths: Schedule
    seconds: float | None = None
    device_gib: float | None = None

    @property
    def cycle(self) -> int:
        return sum(num_steps for num_steps, _ in self.lengths)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def flags(num_steps: int, folder: Path) -> list[str]:
    cycle = Job(LENGTHS).cycle
    return [
        *SHAPE.split(), "--train-iters", f"{num_steps}", "--lr-decay-iters", f"{num_steps}", "--eval-iters", "1",
        "--eval-interval", f"{cycle}", "--save", f"{folder}", "--save-interval", f"{cycle}", "--ckpt-format", "torch",
    ]  # fmt: skip


def device_meters() -> dict[str, Callable[[], int]]:
    if torch.cuda.is_available():
        return {"device_bytes": torch.cuda.memory_allocated, "reserved_bytes": torch.cuda.memory_reserved}
    from megatron.swap.native.guarding import native

    return {"device_bytes": lambda: int(native().ram_in_use())}


def main(argv: Sequence[str]) -> None:
    samples_path, result_path, job_text, *rest = argv
    job = Job(**json.loads(job_text))
    sys.argv = ["pretrain_gpt_swap.py", *rest]
    from megatron.swap.trainer.prepare import prepare

    prepare(sys.argv)
    from megatron.training import get_args, training

    import pretrain_gpt_swap
    from megatron.swap.trainer.session import SwapSession

    sessions: list[SwapSession] = []
    losses: list[str] = []
    step = 0
    end = float("inf") if job.seconds is None else time.monotonic() + job.seconds

    def pinned_bytes() -> int:
        parts = sessions[0].parts
        return 0 if parts is None else parts.machine.tier.stats().reserved_bytes + parts.machine.guard.host_bytes

    meter = Meter(Path(samples_path), job.cycle, {**device_meters(), "pinned_bytes": pinned_bytes})
    install, train_step = SwapSession.install, training.train_step

    def install_and_keep(args: Any, model_config: Any = None) -> SwapSession:
        sessions.append(install(args, model_config))
        return sessions[-1]

    @functools.wraps(train_step)
    def measured_step(*arguments: Any, **options: Any) -> Any:
        nonlocal step
        if step:  # here the evaluation and the checkpoint of the step before are over, too
            if "--save" in rest:
                for old in sorted(Path(rest[rest.index("--save") + 1]).glob("iter_*"))[:-NUM_KEPT_CHECKPOINTS]:
                    shutil.rmtree(old)
            meter.sample(step)
            if time.monotonic() >= end:
                raise EnoughSteps
        step += 1
        result = train_step(*arguments, **options)
        losses.append(float(next(iter(result[0].values()))).hex())
        return result

    SwapSession.install = install_and_keep  # type: ignore[method-assign, assignment]
    training.train_step = measured_step
    # The length by the iteration: a run that is resumed goes on where it ended.
    cut(pretrain_gpt_swap, lambda: length_at(job.lengths, get_args().curr_iteration + 1))
    if job.device_gib is not None:
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(job.device_gib * 2**30 / total_bytes)
    with contextlib.suppress(EnoughSteps):
        pretrain_gpt_swap.main()
    records = sessions[0].step_log.records
    planning = sessions[0].auto.summary() if sessions[0].auto is not None else None
    facts = {
        "losses": losses,
        "offloaded_bytes": sum(record.moved.out_bytes for record in records),
        "recomputed_bytes": sum(record.moved.recomputed_bytes for record in records),
        "num_rescues": sum(record.num_rescues for record in records),
        "num_plan_changes": 0 if planning is None else len(planning["stages"]),
    }
    Path(result_path).write_text(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1:])
