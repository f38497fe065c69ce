"""The order in which a pipeline rank runs forwards and backwards, as Megatron's schedules do."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """A forward or a backward of one chunk (virtual stage) over one micro-batch."""

    is_forward: bool
    chunk: int
    micro_batch: int


def schedule(num_micro_batches: int, size: int, rank: int, num_chunks: int = 1) -> list[Unit]:
    """Return the order of forwards and backwards: 1F1B, interleaved for several chunks, alternating without a pipeline.

    With several chunks ``num_micro_batches`` must be a multiple of ``size``.
    """
    total = num_micro_batches * num_chunks
    if size == 1:
        num_warm_up = 0
    elif num_chunks == 1:
        num_warm_up = size - rank - 1
    else:
        num_warm_up = 2 * (size - rank - 1) + (num_chunks - 1) * size
    num_warm_up = min(num_warm_up, total)

    def unit(is_forward: bool, index: int) -> Unit:
        if num_chunks == 1:
            return Unit(is_forward, 0, index)
        round_, inside = divmod(index, size * num_chunks)  # `size` micro-batches pass one chunk, then the next chunk
        chunk, offset = divmod(inside, size)
        return Unit(is_forward, chunk if is_forward else num_chunks - 1 - chunk, round_ * size + offset)

    units = [unit(True, index) for index in range(num_warm_up)]
    for index in range(total - num_warm_up):
        units += [unit(True, num_warm_up + index), unit(False, index)]
    return units + [unit(False, index) for index in range(total - num_warm_up, total)]


def most_micro_batches(size: int) -> int:
    """Return the number of micro-batches after which memory in a pipeline of ``size`` only repeats."""
    return 2 if size == 1 else 3 * size
