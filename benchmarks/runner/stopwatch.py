"""Times, memory and losses of a run, taken between its steps."""

import hashlib
import json
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import peak_rss_bytes, rss_bytes
from benchmarks.rows import GIB
from benchmarks.runner.fp8_scales import fp8_scales
from benchmarks.runner.planning import planning, unstable_steps
from benchmarks.runner.request import Request
from benchmarks.runner.schedule import length_at
from megatron.swap.profiling.observer import PLAIN
from megatron.swap.profiling.saved_tensor_hooks import HooksContext

LEAST_TIMED = 2


class EnoughSteps(BaseException):
    """Ends training before its last step: enough steps were timed."""


class Stopwatch:
    """Measure between the steps, without changing the steps themselves.

    A step is timed on the host, from the end of the previous step to its own end. Megatron logs every step and reads
    the loss for that, which waits for the device.
    """

    def __init__(self, request: Request, listener: Any, wrap: Callable[[list[Any]], None] | None) -> None:
        self._request = request
        self._listener = listener
        self._wrap = wrap
        self._phases = Phases()
        self.began_cuda = False
        """Whether CUDA was initialized before `go`, when its context takes device memory from another measured run."""
        self._start = self._built = 0.0
        self._rss_before = 0
        self._args = Namespace()
        self._session: Any = None
        self._chunks: list[Any] = []
        self._ends: list[float] = []
        self._allocated: list[int] = []
        self._num_retries: list[int] = []  # cumulative, after each step
        self._losses: list[torch.Tensor] = []
        self._engine: dict[str, Any] = {}

    def start(self) -> None:
        self._start = time.perf_counter()

    @property
    def step(self) -> int:
        return len(self._ends) + 1

    def before_model(self, args: Namespace, session: Any) -> None:
        self._args, self._session = args, session
        self._rss_before = rss_bytes()

    def attach(self, chunks: Any) -> Any:
        from megatron.training import training

        from megatron.swap.patches.training_log import training_log_patch

        self._chunks = list(chunks)
        if self._wrap is not None:
            self._wrap(self._chunks)
        self._count_recomputed()
        if self._request.has_phases and torch.cuda.is_available() and len(self._chunks) == 1:
            self._phases.attach(self._chunks[0])
        # Wrap the current function: a session that swaps has patched it already.
        training.training_log = training_log_patch(self._on_iteration).build(training.training_log)
        self._built = time.perf_counter()
        self._listener.report("built")
        return chunks

    def _count_recomputed(self) -> None:
        """Let the observer also count what layers save when they run again in backward."""
        observer, parts = self._session.run_device.observer, self._session.parts
        if not self._request.observes or observer is None or self._session.auto is not None:
            return
        # For all that follows: backward on a CPU runs on this thread.
        HooksContext(observer.around(PLAIN)).__enter__()
        if parts is not None:
            saved_tensors = parts.engine.saved_tensors
            untouched = saved_tensors.untouched
            saved_tensors.untouched = lambda *, observed=True: untouched()

    def _on_iteration(
        self, iteration: int, losses: dict[str, torch.Tensor], grad_norm: Any, is_logged: bool, writer: Any,
        averages_next: bool = False,
    ) -> None:
        self._ends.append(time.perf_counter())
        # The losses are read only at the end of the run: reading waits for the device.
        self._losses += [loss.detach().clone() for loss in list(losses.values())[:1]]
        if torch.cuda.is_available():
            found = torch.cuda.memory_stats_as_nested_dict()
            self._allocated.append(found["allocated_bytes"]["all"]["current"])
            self._num_retries.append(found["num_alloc_retries"])
        if len(self._ends) == 1:
            self._listener.report("stepped")
            self._listener.await_word("time")
        is_enough = self._is_enough()
        if is_enough or len(self._ends) == self._args.train_iters:
            self._engine = _engine_figures(self._session, len(self._ends))
        if is_enough:
            raise EnoughSteps

    def _is_enough(self) -> bool:
        warm_up, limit_s = self._request.num_warm_up, self._request.timed_limit_s
        num_timed = len(self._ends) - warm_up
        if num_timed == self._request.num_timed:
            return True
        if limit_s is None or num_timed < LEAST_TIMED:
            return False
        return self._ends[-1] - self._ends[warm_up - 1] > limit_s

    def result(self, summary: Path) -> dict[str, Any]:
        from megatron.training.training import num_floating_point_operations

        plan, first = self._plan(), self._request.num_warm_up + 1
        timed = [step for step in range(first, len(self._ends) + 1) if step not in plan["unstable_steps"]]  # from 1
        timed_ms = [1e3 * (self._ends[step - 1] - self._ends[step - 2]) for step in timed]
        batch, args = self._args.global_batch_size, self._args
        if self._request.sequence_schedule:  # all timed steps have one length
            args = Namespace(**vars(args))
            args.seq_length = length_at(self._request.sequence_schedule, len(self._ends))
        found = {
            "step_ms_median": statistics.median(timed_ms) if timed_ms else None,
            "step_ms_all": timed_ms,
            "first_step_ms": 1e3 * (self._ends[0] - self._start),
            "began_cuda_early": self.began_cuda,
            "build_ms": 1e3 * (self._built - self._start),
            "alloc_retries_by_step": [after - before for before, after in pairwise([0, *self._num_retries])],
            "tokens_per_step": batch * args.seq_length,
            "step_flops": num_floating_point_operations(args, batch),
            "num_params": sum(p.numel() for chunk in self._chunks for p in chunk.parameters()),
            "losses": [float(loss).hex() for loss in self._losses],
            **self._memory(),
            **self._engine,
            **self._phases.medians(),
            **plan,
        }
        if self._request.has_summary:
            found["weights_sha256"] = weights_sha256(self._chunks)
            found["summary"] = json.loads(summary.read_text()) if summary.exists() else None  # the first rank's
        return found

    def _plan(self) -> dict[str, Any]:
        flags, first = self._request.flags, self._request.num_warm_up + 1
        auto, observer = self._session.auto, self._session.run_device.observer
        found = planning(flags, None if auto is None else auto.summary())
        return {
            "planning": found,
            "unstable_steps": unstable_steps(flags, found, first, len(self._ends)),
            # The hooks of a wrapped model hide its tensors from the observer.
            "saved_peak_gib": None if observer is None or self._wrap is not None else observer.peak_bytes / GIB,
        }

    def _memory(self) -> dict[str, float | None]:
        on_gpu, run_device = torch.cuda.is_available(), self._session.run_device
        ours = run_device.device if run_device.is_made else None
        # Without a GPU: that of the emulated device, if its memory is limited.
        peak_bytes = None if ours is None else ours.peak_bytes()
        reserved_bytes = 0
        if on_gpu:
            # A run that searches for its plan resets torch's own peaks.
            peak_bytes = ours.peak_bytes() if ours else torch.cuda.max_memory_allocated()
            reserved_bytes = ours.peak_reserved_bytes() if ours else torch.cuda.max_memory_reserved()
        rss_growth = max(0, peak_rss_bytes() - self._rss_before)
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0) if on_gpu else 0
        reserved_host_bytes = self._engine.get("host_booked_gib", 0.0) * GIB
        return {
            "device_peak_gib": None if peak_bytes is None else peak_bytes / GIB,
            "device_reserved_gib": reserved_bytes / GIB if on_gpu else None,
            # The optimizer's state exists from the end of the first step on.
            "device_static_gib": min(self._allocated) / GIB if on_gpu else None,
            "host_peak_gib": max(rss_growth, pinned, reserved_host_bytes) / GIB,
            "host_rss_growth_gib": rss_growth / GIB,
            "host_pinned_gib": pinned / GIB,
        }


class Phases:
    """Device times between marks of a micro-batch; valid only if every layer runs forward exactly once."""

    def __init__(self) -> None:
        self._marks: dict[str, list[Any]] = {"start": [], "first": [], "forward": [], "backward": []}

    def attach(self, chunk: Any) -> None:
        layer = chunk.decoder.layers[0]
        layer.register_forward_pre_hook(self._before, with_kwargs=True)
        layer.register_forward_hook(lambda *_: self._mark("first"))
        chunk.register_forward_hook(lambda *_: self._mark("forward"))

    def _before(self, module: Any, args: Any, kwargs: Any) -> None:
        self._mark("start")
        hidden = kwargs["hidden_states"]
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: self._mark("backward"))

    def _mark(self, name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks[name].append(event)

    def medians(self) -> dict[str, float]:
        pairs = {"first_layer_forward": ("start", "first"), "forward": ("start", "forward"),
                 "backward": ("forward", "backward")}  # fmt: skip
        result = {}
        for name, (begin, end) in pairs.items():
            times = [a.elapsed_time(b) for a, b in zip(self._marks[begin], self._marks[end], strict=False)]
            if times:
                result[f"{name}_ms"] = statistics.median(times[len(times) // 4 :])
        return result


def _engine_figures(session: Any, num_steps: int) -> dict[str, Any]:
    """Return the engine's copies per step and its reserved memory; of a run that searches, those of the last step."""
    disk, parts = session.planned.disk, session.parts
    found = {} if disk is None else {"disk_peak_gib": disk.reserved_bytes / GIB}
    if session.optimizer_swap is not None and session.auto is None:
        out_bytes, in_bytes = session.optimizer_swap.moved_bytes
        found |= {"optimizer_out_bytes": out_bytes // num_steps, "optimizer_in_bytes": in_bytes // num_steps}
    if parts is None:
        return found
    totals, tier = parts.manager.counters.totals(), parts.machine.tier.stats()
    if session.auto is not None and session.step_log.records:  # earlier steps ran under other plans
        totals, num_steps = session.step_log.records[-1].moved, 1
    return {
        **found, "host_booked_gib": tier.reserved_bytes / GIB, "host_leased_gib": tier.leased_peak_bytes / GIB,
        "swapped_out_bytes": totals.out_bytes // num_steps, "swapped_in_bytes": totals.in_bytes // num_steps,
        "num_late": totals.num_late, "wait_ms": totals.wait_ms / num_steps,
    }  # fmt: skip


def weights_sha256(chunks: list[Any]) -> str:
    """Hash all parameters of all ranks, and the scales of 8-bit layers. Collective: every rank must call it."""
    digest = hashlib.sha256()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            digest.update(name.encode())
            digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
        for scale in fp8_scales(chunk):
            digest.update(scale.detach().float().cpu().numpy().tobytes())
    digests: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(digests, digest.hexdigest())
    return hashlib.sha256("".join(digests).encode()).hexdigest()
