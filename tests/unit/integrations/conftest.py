"""The adapters without their frameworks: fakes in ``sys.modules``, and an ``install`` that records its calls."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@dataclass
class Swapped:
    """Stands for what ``install`` returns; counts what the adapter calls."""

    model: Any
    optimizer: Any
    settings: dict[str, Any]
    num_steps: int = 0
    is_closed: bool = False

    def step(self) -> None:
        assert not self.is_closed
        self.num_steps += 1

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Adapter:
    """An adapter's module and what it has installed."""

    module: Any
    installed: list[Swapped] = field(default_factory=list)


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Adapter]:
    """Import an adapter beside fakes: ``adapter("slime")``, ``adapter("verl", {"verl.workers.engine": {…}})``."""

    def load(name: str, fakes: dict[str, dict[str, Any]] | None = None) -> Adapter:
        for path, names in (fakes or {}).items():
            words = path.split(".")
            for end in range(1, len(words) + 1):
                parent = ".".join(words[:end])
                # `megatron` is real, and a namespace: a fake portion of it stands beside the real ones.
                if parent != "megatron" and not isinstance(sys.modules.get(parent), FakeModule):
                    monkeypatch.setitem(sys.modules, parent, FakeModule(parent))
            vars(sys.modules[path]).update(names)
        path = f"megatron.swap.integrations.{name}"
        monkeypatch.delitem(sys.modules, path, raising=False)
        module = importlib.import_module(path)
        del sys.modules[path]  # the fakes are in it
        made = Adapter(module)

        def install(model: Any, optimizer: Any = None, **settings: Any) -> Swapped:
            made.installed.append(Swapped(model, optimizer, settings))
            return made.installed[-1]

        monkeypatch.setattr(module, "install", install)
        return made

    return load


class FakeModule(ModuleType):
    """A package of a framework that is not installed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []


@pytest.fixture
def chunks() -> list[Any]:
    """Two model chunks of a rank; the adapters only pass them on."""
    return [SimpleNamespace(name="first"), SimpleNamespace(name="second")]
