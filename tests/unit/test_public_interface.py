"""The public names of ``from megatron import swap``: listed, loaded lazily, documented."""

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron import swap

ROOT = Path(__file__).resolve().parents[2]
LAZILY = """
import sys
from megatron import swap
assert not {"torch", "megatron.core"} & set(sys.modules), "importing the package loads them"
assert set(swap.__all__) <= set(dir(swap))
from megatron.swap.planner import solve
assert "torch" not in sys.modules, "the planner loads torch"
try:
    swap.no_such_name
except AttributeError as error:
    assert "no_such_name" in str(error)
else:
    raise AssertionError("an unknown name was found")
"""


def test_the_names_are_there_and_loaded_lazily() -> None:
    done = subprocess.run([sys.executable, "-c", LAZILY], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def documented() -> Iterator[tuple[str, Any]]:
    """Yield every public name, and the public methods and properties of the public classes."""
    for name in swap.__all__:
        there = getattr(swap, name)
        yield name, there
        if inspect.isclass(there):
            for member, value in vars(there).items():
                if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                    yield f"{name}.{member}", value


@pytest.mark.parametrize(("name", "there"), list(documented()), ids=lambda item: item if isinstance(item, str) else "")
def test_every_public_name_is_documented(name: str, there: Any) -> None:
    said = inspect.getdoc(there)
    assert said, name
    first = said.splitlines()[0]
    assert first.endswith((".", ":")) or "``" in first, first
    assert not first.startswith("Of "), first
    if inspect.isfunction(there):
        parameters = [one for one in inspect.signature(there).parameters if one != "self"]
        missing = [one for one in parameters if f"``{one}``" not in said and f"{one}:" not in said]
        assert not missing, f"{name}: {missing} are not described"
