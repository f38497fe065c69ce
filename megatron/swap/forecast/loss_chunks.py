"""The memory around the loss, and the number of chunks that ``--swap-loss-chunks auto`` takes.

The number follows from the model's shape and from flags, so that all ranks, and a run that resumes, add in one order.
"""

from dataclasses import dataclass

from megatron.swap.common.plan import Model
from megatron.swap.common.settings import MOST_LOSS_CHUNKS
from megatron.swap.common.types import LOSS_ROWS

BYTES = 2  # bytes of a logit
FEWEST_TOKENS = 256  # of a chunk that ``auto`` takes: matrix products of fewer do not fill a GPU


@dataclass(frozen=True)
class LossBytes:
    """Bytes around the loss of a micro-batch on a rank, beside those of layers."""

    inputs: float  # the final norm's input and output, which are saved
    logits: float  # those that exist at a time
    rows: float  # those of them that exist in single precision at a time, in forward
    gradients: float  # in backward of several chunks: of the final norm's output, and the weight's sum

    @property
    def kept(self) -> float:
        """Bytes from forward to backward."""
        return self.inputs + self.logits

    @property
    def peak(self) -> float:
        """The most at once, in forward or in backward."""
        return self.kept + max(self.rows, self.gradients)


def num_tokens(model: Model) -> float:
    """Return the tokens of a micro-batch on a rank, before sequence parallelism divides them."""
    return model.seq_length / model.context_parallel * model.micro_batch_size


def loss_bytes(model: Model, num_chunks: int = 1, has_sum: bool = False) -> LossBytes:
    """Return the bytes around the loss in ``num_chunks`` chunks of the sequence, with ``facts.has_sum_in_loss``."""
    tokens, words = num_tokens(model), model.padded_vocab_size / model.tensor_parallel
    hidden = tokens * model.hidden_size * BYTES / (model.tensor_parallel if model.sequence_parallel else 1)
    of_chunk, of_weight = tokens / num_chunks, 4 * model.hidden_size * words if has_sum else 0.0
    return LossBytes(
        inputs=2 * hidden, logits=BYTES * of_chunk * words, rows=4 * of_chunk * words / max(1, of_chunk // LOSS_ROWS),
        gradients=hidden + of_weight if num_chunks > 1 else 0.0,
    )  # fmt: skip


def saved_bytes(model: Model, has_sum: bool = False) -> float:
    """Return how much ``choose_num_chunks`` takes from the peak at the loss."""
    return loss_bytes(model).peak - loss_bytes(model, choose_num_chunks(model, has_sum), has_sum).peak


def choose_num_chunks(model: Model, has_sum: bool = False) -> int:
    """Return the fewest chunks with which the loss takes no more memory than a layer's MLP, or a chunk of it."""
    tokens = num_tokens(model)
    wide = model.ffn_hidden_size / model.tensor_parallel * (2 if model.gated else 1)
    of_layer = tokens * BYTES * (2 * model.hidden_size + wide / model.mlp_chunks)
    most = int(max(1, min(MOST_LOSS_CHUNKS, tokens // FEWEST_TOKENS)))
    for num_chunks in range(1, most + 1):
        sizes = loss_bytes(model, num_chunks, has_sum)
        if sizes.peak - sizes.inputs <= of_layer:
            return num_chunks
    # Chunks with a sum may take more than the whole.
    return most if loss_bytes(model, most, has_sum).peak < loss_bytes(model).peak else 1
