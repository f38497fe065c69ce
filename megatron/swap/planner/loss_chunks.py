"""The memory around the loss, and the number of chunks that ``--swap-loss-chunks auto`` takes.

The number follows from the shape of the model alone, so that all ranks, and a run that resumes, add in one order.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.swap.common.config import MOST_LOSS_CHUNKS
from megatron.swap.common.plan import Model
from megatron.swap.common.types import LOSS_ROWS

BYTES = 2
"""Bytes of a logit."""
FEWEST_TOKENS = 256
"""Fewest tokens of a chunk that ``auto`` takes: matrix products of fewer do not fill a GPU."""


@dataclass(frozen=True)
class LossBytes:
    """Bytes around the loss of one micro-batch on one rank, beside what layers hold.

    Attributes:
        inputs: the final norm's input and output, which are saved.
        logits: those that exist at a time.
        rows: those of them that exist in single precision at a time, in forward.
        gradients: of the final norm's output, in backward of several chunks.
    """

    inputs: float
    logits: float
    rows: float
    gradients: float

    @property
    def kept(self) -> float:
        """Bytes from forward to backward."""
        return self.inputs + self.logits

    @property
    def peak(self) -> float:
        """The most of them at once, in forward or in backward."""
        return self.kept + max(self.rows, self.gradients)


def num_tokens(model: Model) -> float:
    """Return the tokens of a micro-batch on one rank, before sequence parallelism divides them."""
    return model.seq_length / model.context_parallel * model.micro_batch_size


def loss_bytes(model: Model, num_chunks: int = 1) -> LossBytes:
    """Return the bytes around the loss in ``num_chunks`` chunks of the sequence."""
    tokens, words = num_tokens(model), model.padded_vocab_size / model.tensor_parallel
    hidden = tokens * model.hidden_size * BYTES / (model.tensor_parallel if model.sequence_parallel else 1)
    of_chunk = tokens / num_chunks
    return LossBytes(
        inputs=2 * hidden,
        logits=BYTES * of_chunk * words,
        rows=4 * of_chunk * words / max(1, of_chunk // LOSS_ROWS),
        gradients=hidden if num_chunks > 1 else 0.0,
    )


def saved_bytes(model: Model) -> float:
    """Return what ``choose_num_chunks`` takes from the peak at the loss."""
    return loss_bytes(model).peak - loss_bytes(model, choose_num_chunks(model)).peak


def choose_num_chunks(model: Model) -> int:
    """Return the fewest chunks with which the loss takes no more memory than a layer's MLP in backward.

    With them the loss does not set the peak of a step any more. 1: it does not set it as a whole.
    """
    tokens = num_tokens(model)
    wide = model.ffn_hidden_size / model.tensor_parallel * (2 if model.gated else 1)
    of_layer = tokens * BYTES * (2 * model.hidden_size + wide)
    most = int(max(1, min(MOST_LOSS_CHUNKS, tokens // FEWEST_TOKENS)))
    for num_chunks in range(1, most + 1):
        sizes = loss_bytes(model, num_chunks)
        if sizes.peak - sizes.inputs <= of_layer:
            return num_chunks
    return most
