"""Traces a few training steps: with torch.profiler into a file, or inside the capture range of Nsight Systems."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.log import logger

NSYS = "nsys"  # target in place of a folder, for runs under ``nsys profile --capture-range=cudaProfilerApi``


class Profiler:
    """Traces steps ``first`` (at least 3) to ``last`` of this process, counted from 1, including the engine's ranges.

    ``target`` is ``NSYS``, or a folder into which torch.profiler writes ``rank-N.json.gz``. ``allocated_bytes`` returns
    the device memory in use, for the timeline.
    """

    def __init__(
        self, target: str, first: int, last: int, rank: int, ranges: Ranges, allocated_bytes: Callable[[], int | None]
    ) -> None:
        self._folder = None if target == NSYS else Path(target)
        self._first, self._last, self._rank = first, last, rank
        self._ranges = ranges
        self._allocated_bytes = allocated_bytes
        self._profile: torch.profiler.profile | None = None
        self._timeline: Callable[..., Any] | None = None
        self._num_steps = 0

    @property
    def path(self) -> Path | None:
        """File of the trace; None if nsys writes its own."""
        return None if self._folder is None else self._folder / f"rank-{self._rank}.json.gz"

    def step_ended(self, iteration: int) -> None:
        self._num_steps += 1
        # The optimizer creates its state in the first step, and torch.profiler warms up in another.
        if self._num_steps == self._first - 2 and self._folder is not None:
            self._profile = _torch_profile(self._last - self._first + 1)
            self._profile.start()
        elif self._num_steps == self._first - 1:
            self._begin()
        elif self._num_steps == self._last:
            self._end()
        elif self._first <= self._num_steps < self._last:
            if self._profile is not None:
                self._profile.step()
        else:
            return
        if self._first - 1 <= self._num_steps < self._last:
            self._ranges.step(iteration + 1)

    def close(self) -> None:
        """Training has ended: write a trace that is under way, or report that no step was traced."""
        if self._timeline is not None:
            self._end()
        elif self._num_steps < self._first:
            if self._profile is not None:
                self._profile.stop()  # only the warm-up was traced
                self._profile = None
            logger.warning(
                "nothing was traced: training ended after %d steps, before the first one to trace, step %d",
                self._num_steps, self._first,
            )  # fmt: skip

    def abandon(self) -> None:
        """Training has failed: write a trace that is under way, if possible. Does not wait for the device."""
        is_tracing, profile, self._profile = self._timeline is not None, self._profile, None
        self._leave_ranges()
        if profile is not None:
            with contextlib.suppress(Exception):  # the user must see why training failed
                profile.stop()
                if is_tracing:
                    self._export(profile)

    def _begin(self) -> None:
        timeline: Callable[..., Any] = torch.profiler.record_function
        if self._profile is not None:
            self._profile.step()
        else:
            _synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            timeline = torch.cuda.nvtx.range
        self._timeline = timeline
        self._ranges.start(timeline, self._allocated_bytes)

    def _end(self) -> None:
        self._leave_ranges()
        _synchronize()  # copies under way belong to the traced steps
        if self._profile is None:
            torch.cuda.cudart().cudaProfilerStop()
            return
        self._profile.stop()
        self._export(self._profile)
        self._profile = None

    def _leave_ranges(self) -> None:
        if self._timeline is not None:
            self._ranges.stop(self._timeline)
            self._timeline = None

    def _export(self, profile: torch.profiler.profile) -> None:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self.path))


def _torch_profile(num_steps: int) -> torch.profiler.profile:
    on_gpu = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # Without a GPU copies run on threads of the emulated device, which are recorded only if all threads are.
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=not on_gpu)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=num_steps + 1, repeat=1)
    return torch.profiler.profile(activities=activities, schedule=schedule, experimental_config=config, acc_events=True)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
