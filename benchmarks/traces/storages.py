"""What happened to every storage in a traced step: offloaded, released, reloaded, waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.traces.engine import Engine, Step, StorageCopy, Wait


@dataclass
class Reload:
    """One copy in, and the wait that handed it to autograd, if that asked for it."""

    copy: StorageCopy
    wait: Wait | None = None


@dataclass
class TracedStorage:
    """A storage that was saved at a site, from its copy out on."""

    step: Step
    out: StorageCopy
    release: Wait | None = None
    overtaken: Wait | None = None
    """Autograd asked for it before it was released: compute waited for the copy out."""
    reloads: list[Reload] = field(default_factory=list)

    @property
    def is_overtaken(self) -> bool:
        """Copied out, but autograd asked for it before it was released, so it was kept on the device."""
        return self.release is None and self.overtaken is not None

    @property
    def stayed(self) -> bool:
        """Copied out, and neither released nor asked for: something else holds the memory."""
        return self.release is None and self.overtaken is None and not self.reloads

    def problems(self) -> Iterator[str]:
        """Yield what is missing of the events that the engine always records."""
        if self.reloads and self.release is None:
            yield f"step {self.step.number}: {self.name} was copied in, but never released after its copy out"
        for reload in self.reloads:
            if reload.wait is None:
                yield (
                    f"step {self.step.number}: {self.name} was copied in, but nothing waited for that copy: whatever "
                    "reads it may come too early"
                )

    @property
    def name(self) -> str:
        return f"{self.out.site} mb{self.out.micro_batch}"


def find_storages(engine: Engine) -> tuple[list[TracedStorage], list[str]]:
    """Return every storage that was copied out in a traced step, and what does not fit: events of none, events missing.

    A site that is saved more than once in a step has its events paired in order.
    """
    storages: dict[tuple[Step, str, int], list[TracedStorage]] = defaultdict(list)
    problems: list[str] = []
    events: list[StorageCopy | Wait] = sorted([*engine.copies, *engine.waits], key=lambda event: event.at.start_ns)
    for event in events:
        step = engine.step_at(event.at.start_ns)
        if step is None:
            continue
        of_site = storages[step, event.site, event.micro_batch]
        if isinstance(event, StorageCopy) and event.direction == "out":
            of_site.append(TracedStorage(step, event))
        elif not _append(of_site, event):
            what = event.what if isinstance(event, Wait) else "copy_in"
            problems.append(f"step {step.number}: {what} {event.site} mb{event.micro_batch} without a copy out before")
    found = [storage for of_site in storages.values() for storage in of_site]
    return found, [*problems, *(problem for storage in found for problem in storage.problems())]


def _append(storages: list[TracedStorage], event: StorageCopy | Wait) -> bool:
    """Add `event` to the oldest storage that lacks it; returns whether there is one."""
    if isinstance(event, StorageCopy):
        # A graph that is kept for a second backward brings the same storage in twice.
        last = storages[-1] if storages else None
        storage = next((storage for storage in storages if storage.release and not storage.reloads), last)
        if storage is None:
            return False
        storage.reloads.append(Reload(event))
    elif event.what == "release":
        storage = next((storage for storage in storages if not storage.release and not storage.reloads), None)
        if storage is None:
            return False
        storage.release = event
    else:
        waiting = next((reload for storage in storages for reload in storage.reloads if reload.wait is None), None)
        if waiting is not None:
            waiting.wait = event
            return True
        storage = next((storage for storage in storages if storage.stayed), None)
        if storage is not None:
            storage.overtaken = event
        return bool(storages)
    return True
