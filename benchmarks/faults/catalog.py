"""The list of faults: one TOML file a room in ``definitions/``.

::

    tests = ["tests/unit/memory/test_host_pool.py"]  # of the room, the likeliest first
    equality = ["tests/integration/test_matrix.py::test_equal_to_the_bit[bf16-verify]"]

    [[fault]]
    id = "lease-fence-dropped"
    file = "megatron/swap/memory/host_pool.py"
    old = "max(fence, self.fence)"   # occurs exactly once in the file
    new = "fence"
    why = "A copy overwrites memory that an earlier copy still reads."
    tests = []                       # optional: tests that run before those of the room
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.suites.toml_file import SuiteError, Table, check_names, read_table

DEFINITIONS = Path(__file__).with_name("definitions")


class FaultError(SuiteError):
    """A fault cannot be planted; the message names it."""


@dataclass(frozen=True)
class Fault:
    id: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """A hash of the change: a result belongs to a fault only if both have the same."""
        return hashlib.sha256("\0".join((self.file, self.old, self.new)).encode()).hexdigest()[:16]

    def planted(self, root: Path) -> str:
        try:
            text = (root / self.file).read_text()
        except OSError as error:
            raise FaultError(f"fault {self.id}: {self.file} cannot be read ({error.strerror})") from error
        count = text.count(self.old)
        if count != 1:
            raise FaultError(f"fault {self.id}: its text occurs {count} times in {self.file}; it must occur once")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Room:
    """The faults of one room, its unit tests, and tests that compare whole training runs, which run last."""

    name: str
    tests: tuple[str, ...]
    equality: tuple[str, ...]
    faults: tuple[Fault, ...]

    def tests_for(self, fault: Fault) -> list[str]:
        return list(dict.fromkeys([*fault.tests, *self.tests, *self.equality]))

    def all_tests(self) -> list[str]:
        return list(dict.fromkeys(test for fault in self.faults for test in self.tests_for(fault)))


def load_rooms(folder: Path = DEFINITIONS) -> list[Room]:
    rooms = [_room(path) for path in sorted(folder.glob("*.toml"))]
    seen: set[str] = set()
    for fault in (fault for room in rooms for fault in room.faults):
        if fault.id in seen:
            raise FaultError(f"fault {fault.id}: the id is used twice")
        seen.add(fault.id)
    return rooms


def _room(path: Path) -> Room:
    name, table = read_table("room", str(path), path.parent)
    faults = [_fault(Table(f"{table.path}: fault {n}", one)) for n, one in enumerate(table.take("fault", list), 1)]
    room = Room(name, _strings(table, "tests"), _strings(table, "equality"), tuple(faults))
    table.refuse_rest()
    return room


def _fault(table: Table) -> Fault:
    texts = {key: table.take(key, str) for key in ("id", "file", "old", "new", "why")}
    fault = Fault(**texts, tests=_strings(table, "tests", ()))
    table.refuse_rest()
    if fault.old == fault.new or not all((fault.id, fault.old, fault.why)):
        raise FaultError(f"{table.path}: id, old and why must have a text, and new must differ from old")
    return fault


def _strings(table: Table, key: str, default: Sequence[str] | None = None) -> tuple[str, ...]:
    values = table.take(key, list) if default is None else table.take(key, list, default)
    if not all(isinstance(value, str) for value in values):
        raise FaultError(f"{table.path}: {key} = {values!r}; expected: a list of strings")
    return tuple(values)


def select(rooms: Sequence[Room], ids: Sequence[str]) -> list[tuple[Room, Fault]]:
    pairs = [(room, fault) for room in rooms for fault in room.faults]
    check_names("--only", ids, [fault.id for _, fault in pairs])
    return [(room, fault) for room, fault in pairs if not ids or fault.id in ids]
