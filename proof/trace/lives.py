"""The life of every storage in a traced step: copied out, released, copied in, waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from proof.trace.engine import Engine, Step, StorageCopy, Wait


@dataclass
class Return:
    """One copy in, and the wait that handed it to autograd, if that asked."""

    copy: StorageCopy
    wait: Wait | None = None


@dataclass
class Life:
    """What was saved once at a site."""

    step: Step
    out: StorageCopy
    release: Wait | None = None
    overtaken: Wait | None = None
    """Autograd asked for it before it was released: compute waited for the copy out."""
    returns: list[Return] = field(default_factory=list)

    @property
    def is_overtaken(self) -> bool:
        """Copied out, but autograd asked for it before it was released, so it stayed where it was."""
        return self.release is None and self.overtaken is not None

    @property
    def stayed(self) -> bool:
        """Copied out, and neither released nor asked for: somebody else holds the memory."""
        return self.release is None and self.overtaken is None and not self.returns

    def problems(self) -> Iterator[str]:
        """What an order of the engine's own cannot be without."""
        if self.returns and self.release is None:
            yield f"step {self.step.number}: {self.name} was copied in, but never released after its copy out"
        for back in self.returns:
            if back.wait is None:
                yield (
                    f"step {self.step.number}: {self.name} was copied in, but nothing waited for that copy: whatever "
                    "reads it may come too early"
                )

    @property
    def name(self) -> str:
        return f"{self.out.site} mb{self.out.micro_batch}"


def find_lives(engine: Engine) -> tuple[list[Life], list[str]]:
    """Every life that began in a traced step, and what does not fit: events that belong to none, events missing.

    A site that is saved more than once in a step has its events paired in order.
    """
    lives: dict[tuple[Step, str, int], list[Life]] = defaultdict(list)
    problems: list[str] = []
    events: list[StorageCopy | Wait] = sorted([*engine.copies, *engine.waits], key=lambda event: event.at.start_ns)
    for event in events:
        step = engine.step_at(event.at.start_ns)
        if step is None:
            continue
        of_site = lives[step, event.site, event.micro_batch]
        if isinstance(event, StorageCopy) and event.direction == "out":
            of_site.append(Life(step, event))
        elif not _append(of_site, event):
            what = event.what if isinstance(event, Wait) else "copy_in"
            problems.append(f"step {step.number}: {what} {event.site} mb{event.micro_batch} without a copy out before")
    found = [life for of_site in lives.values() for life in of_site]
    return found, [*problems, *(problem for life in found for problem in life.problems())]


def _append(lives: list[Life], event: StorageCopy | Wait) -> bool:
    """Add ``event`` to the oldest life that lacks it."""
    if isinstance(event, StorageCopy):
        # A graph that is kept for a second backward brings the same storage in twice.
        life = next((life for life in lives if life.release and not life.returns), lives[-1] if lives else None)
        if life is None:
            return False
        life.returns.append(Return(event))
    elif event.what == "release":
        life = next((life for life in lives if not life.release and not life.returns), None)
        if life is None:
            return False
        life.release = event
    else:
        waiting = next((back for life in lives for back in life.returns if back.wait is None), None)
        if waiting is not None:
            waiting.wait = event
            return True
        life = next((life for life in lives if life.stayed), None)
        if life is not None:
            life.overtaken = event
        return bool(lives)
    return True
