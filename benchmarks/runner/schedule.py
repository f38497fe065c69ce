"""Sequences whose length changes while training goes on, cut from what the data loader gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Schedule = Sequence[tuple[int, int]]
"""Numbers of steps and the length of their sequences, repeated."""


def length_at(schedule: Schedule, step: int) -> int:
    """Return the length of the sequences of a step, counted from 1. Raises: `ValueError`."""
    left = (step - 1) % sum(num_steps for num_steps, _ in schedule)
    for num_steps, length in schedule:
        if left < num_steps:
            return length
        left -= num_steps
    raise ValueError(f"{schedule}: every number of steps must be at least 1")


def cut(program: Any, length: Callable[[], int]) -> None:
    """Make `program.get_batch` give the first `length()` tokens of every sequence.

    Its tensors are (micro-batch, sequence), or `None`. An attention mask would be (…, sequence, sequence): `get_batch`
    refuses it with `ValueError`.
    """
    inner = program.get_batch

    def get_batch(*args: Any) -> list[Any]:
        wanted = length()
        batch = inner(*args)
        if any(tensor is not None and tensor.dim() != 2 for tensor in batch):
            raise ValueError("sequence_schedule: the batch holds an attention mask; train with plain causal attention")
        return [None if tensor is None else tensor[:, :wanted].contiguous() for tensor in batch]

    program.get_batch = get_batch
