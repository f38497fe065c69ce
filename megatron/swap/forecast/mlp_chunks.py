"""The chunks of the sequence in which a layer's MLP runs, with Megatron's ``--mlp-chunks-for-training``."""

from dataclasses import dataclass

from megatron.swap.common.plan import Model

MLP_CHUNKS = "--mlp-chunks-for-training"
MLP, ATTENTION = "mlp", "self_attention"  # paths of submodules in their layer
MOST_CHUNKS = 32  # planned by formulas: each chunk has sites of its own, which take the solver time
FEWEST_TOKENS = 16384  # of an advised chunk: each reads and writes the weights' gradients once


@dataclass(frozen=True)
class MlpChunk:
    """A call of a layer's MLP: all tokens, or a chunk of them with ``--mlp-chunks-for-training``."""

    number: int
    num_saved: int  # tensors that linear_fc1 saves: its input, the norm's output, the norm's statistics
    part: float = 1.0  # of the tokens
    done: float = 0.0  # part of the tokens whose backward comes before; the last chunk's comes first

    @property
    def norm(self) -> str:
        """Site of the norm's output. Before it linear_fc1 saves its input, in each chunk a view of the same storage."""
        return f"mlp.linear_fc1/{self.num_saved * self.number + 1}"

    @property
    def fc1(self) -> str:
        return f"mlp/{self.number}"

    @property
    def activation(self) -> str:
        return f"mlp.linear_fc2/{self.number}"


def num_mlp_chunks(model: Model) -> int:
    """Return how often a layer's MLP is called in forward."""
    tokens, length = _split(model)
    return -(-tokens // length)


def _split(model: Model) -> tuple[int, int]:
    """Return the tokens of a sample on a rank, and those of a chunk, as ``torch.chunk`` splits them."""
    num_ranks = model.context_parallel * (model.tensor_parallel if model.sequence_parallel else 1)
    tokens = max(1, model.seq_length // num_ranks)
    return tokens, -(-tokens // min(max(1, model.mlp_chunks), tokens))


def mlp_chunks(model: Model) -> list[MlpChunk]:
    """Return the calls of a layer's MLP, in the order of forward."""
    (tokens, length), num_saved = _split(model), 2 + (model.mlp_statistics or 0)
    starts = range(0, tokens, length)
    ends = [min(start + length, tokens) for start in starts]
    return [
        MlpChunk(number, num_saved, (end - start) / tokens, 1 - end / tokens)
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def advised_num_chunks(model: Model) -> int:
    """Return a number of chunks to try where memory is short. 1: as many are used already, or would gain nothing."""
    if model.num_experts or model.fp8_recipe is not None:
        return 1
    wide = model.ffn_hidden_size / model.tensor_parallel * (2 if model.gated else 1)
    tokens = model.seq_length / model.context_parallel * model.micro_batch_size
    # A chunk of linear_fc1's output becomes as large as the hidden states. More chunks hardly lower the peak.
    num = 1
    while num * model.hidden_size < wide and tokens / (2 * num) >= FEWEST_TOKENS:
        num *= 2
    return num if num > model.mlp_chunks else 1
