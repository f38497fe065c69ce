"""Replace streams by an object that is always done: the CPU runs all work in order, so nothing has to wait."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from megatron.swap.patches.registry import Patch


class PassedEvent:
    """An event that has always passed already."""

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class InOrderStream:
    """The methods that upstream calls on a stream, for a device whose work is always done."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> PassedEvent:
        return PassedEvent()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


_STREAM = InOrderStream()


def _no_operation(original: Callable[..., Any]) -> Callable[..., None]:
    def nothing(*arguments: Any, **options: Any) -> None:
        return None

    return nothing


def _current_stream(original: Callable[..., Any]) -> Callable[..., InOrderStream]:
    def current_stream(device: Any = None) -> InOrderStream:
        return _STREAM

    return current_stream


def _stream_context(original: Callable[..., Any]) -> Callable[..., Any]:
    def stream(stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    return stream


def _stream_class(original: type) -> type:
    return InOrderStream


def _patch(attribute: str, build: Callable[[Any], Any], reason: str) -> Patch:
    return Patch("torch.cuda", attribute, build, reason, sources={"torch 2.11.0": None})


PATCHES = (
    _patch("synchronize", _no_operation, "timers and pipeline communication call it; it raises without CUDA"),
    _patch("Stream", _stream_class, "data-parallel set-up creates one; it raises without CUDA"),
    _patch("current_stream", _current_stream, "data-parallel set-up calls it; it raises without CUDA"),
    _patch("stream", _stream_context, "data-parallel set-up enters the context of its stream"),
)
