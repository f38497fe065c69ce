"""The history of every storage in a traced step: copied out, released, copied in, waited for."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.traces.engine import Engine, Step, StorageCopy, Wait


@dataclass
class Reload:
    copy: StorageCopy
    wait: Wait | None = None


@dataclass
class TracedStorage:
    step: Step
    out: StorageCopy
    release: Wait | None = None
    overtaken: Wait | None = None  # The wait for the copy out if autograd asked for the storage before its release
    reloads: list[Reload] = field(default_factory=list)

    @property
    def is_overtaken(self) -> bool:
        """Return whether autograd asked for the storage before its release, so that it was kept on the device."""
        return self.release is None and self.overtaken is not None

    @property
    def stayed(self) -> bool:
        """Return whether the storage was neither released nor asked for: its memory is still referenced elsewhere."""
        return self.release is None and self.overtaken is None and not self.reloads

    def problems(self) -> Iterator[str]:
        name = f"step {self.step.number}: {self.out.site} mb{self.out.micro_batch} was copied in, but"
        if self.reloads and self.release is None:
            yield f"{name} never released after its copy out"
        for reload in self.reloads:
            if reload.wait is None:
                yield f"{name} nothing waited for that copy: a kernel may read it too early"


def find_storages(engine: Engine) -> tuple[list[TracedStorage], list[str]]:
    """Return the storages that were copied out in a traced step, and a sentence for each unmatched event."""
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
    """Add `event` to the oldest storage that lacks such an event; return whether there is one."""
    if isinstance(event, StorageCopy):
        # With retain_graph, a second backward copies the same storage in again.
        last = storages[-1] if storages else None
        storage = next((one for one in storages if one.release and not one.reloads), last)
        if storage is not None:
            storage.reloads.append(Reload(event))
        return storage is not None
    if event.what == "release":
        storage = next((one for one in storages if not one.release and not one.reloads), None)
        if storage is not None:
            storage.release = event
        return storage is not None
    waiting = next((reload for one in storages for reload in one.reloads if reload.wait is None), None)
    kept = next((one for one in storages if one.stayed), None)
    if waiting is not None:
        waiting.wait = event
    elif kept is not None:
        kept.overtaken = event
    return bool(storages)
