"""The CPU runs everything in order: its one stream is always done, and to wait for it is nothing to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from patches.registry import Patch


class PassedEvent:
    """A mark in a stream that has always got there already."""

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class InOrderStream:
    """What upstream calls on a stream, for a device that has finished whatever it was told."""

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
    return Patch("torch.cuda", attribute, build, reason, written_for="torch 2.11.0")


PATCHES = (
    _patch("synchronize", _no_operation, "timers and pipeline communication call it; raises without CUDA"),
    _patch("Stream", _stream_class, "data-parallel set-up makes one; raises without CUDA"),
    _patch("current_stream", _current_stream, "asked for by data-parallel set-up; raises without CUDA"),
    _patch("stream", _stream_context, "data-parallel set-up enters the context of its stream"),
)
