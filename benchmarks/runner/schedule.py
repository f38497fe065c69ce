"""Sequences whose length changes during training: the data loader's batches are cut to each step's length."""

from collections.abc import Callable, Sequence
from typing import Any

Schedule = Sequence[tuple[int, int]]  # Numbers of steps and their sequence lengths, repeated


def length_at(schedule: Schedule, step: int) -> int:
    left = (step - 1) % sum(num_steps for num_steps, _ in schedule)
    for num_steps, length in schedule:
        if left < num_steps:
            return length
        left -= num_steps
    raise ValueError(f"{schedule}: every number of steps must be at least 1")


def cut(program: Any, length: Callable[[], int]) -> None:
    """Make `program.get_batch` return the first `length()` tokens of every sequence."""
    inner = program.get_batch

    def get_batch(*args: Any) -> list[Any]:
        wanted = length()
        batch = inner(*args)
        if any(tensor is not None and tensor.dim() != 2 for tensor in batch):
            raise ValueError("sequence_schedule: the batch holds an attention mask; train with plain causal attention")
        return [None if tensor is None else tensor[:, :wanted].contiguous() for tensor in batch]

    program.get_batch = get_batch
