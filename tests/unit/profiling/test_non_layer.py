"""Tensors that a chunk saves outside its layers are recorded by site; recording changes nothing."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional

from megatron.swap.common.site_paths import NON_LAYER
from megatron.swap.engine.sites import SiteNames
from megatron.swap.profiling.observer import Observer
from megatron.swap.profiling.recording import Recording
from tests.engine import HIDDEN, TOKENS, Engine, stack, watch

VOCABULARY = 48
HIDDEN_BYTES, LOGITS_BYTES = 4 * TOKENS * HIDDEN, 4 * TOKENS * VOCABULARY
EXPECTED = {
    "embedding/0": 8 * TOKENS,  # token numbers
    "dropout/0": HIDDEN_BYTES,  # on a CPU the mask, in the dtype of its input
    "model/0": HIDDEN_BYTES,  # saved by the chunk itself, before its layers
    "norm/0": HIDDEN_BYTES, "norm/1": 4 * TOKENS, "norm/2": 4 * TOKENS,
    "head/0": HIDDEN_BYTES,
    "loss/0": LOGITS_BYTES,  # saved after its layers: the logarithms of softmax, which are saved twice
    "loss/2": 8 * TOKENS,
    "loss/3": 4,
}  # fmt: skip


class Chunk(nn.Module):
    """A whole model in one chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = stack(3)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.dropout = nn.Dropout(0.25)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.embedding(tokens)).sigmoid()
        for layer in self.layers:
            hidden = layer(hidden)
        normed = self.norm(hidden)
        del hidden
        return functional.cross_entropy(self.head(normed), labels, reduction="none")


@contextmanager
def engine_around(chunk: Chunk) -> Iterator[Engine]:
    """Hook a chunk as a session does."""
    observer, inner = Observer(), chunk.forward
    with Engine(chunk.layers, observer=observer, recorded=True) as engine:
        assert engine.recorder is not None
        unwatch, saved = watch(engine.recorder, chunk), engine.saved_tensors
        names = SiteNames(NON_LAYER, chunk, without=list(chunk.layers))

        def forward(*arguments: torch.Tensor) -> torch.Tensor:
            with observer.context(chunk):
                if not saved.is_recorded:
                    return inner(*arguments)
                with saved.outside_layers(names):
                    return inner(*arguments)

        chunk.forward = forward  # type: ignore[method-assign]
        yield engine
        del chunk.forward
        unwatch()
        names.remove()


def train(chunk: Chunk, num_micro_batches: int = 2) -> list[torch.Tensor]:
    """Return losses and gradients of a step."""
    chunk.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    losses = []
    for number in range(num_micro_batches):
        batch = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(number))
        loss = chunk(*(one.clone() for one in batch)).mean()  # nobody else holds them
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(parameter.grad for parameter in chunk.parameters() if parameter.grad is not None)]


def recorded(chunk: Chunk) -> Recording:
    with engine_around(chunk) as engine:
        assert engine.recorder is not None
        train(chunk)
        engine.recorder.start(1)
        train(chunk)
        engine.recorder.step_ended(2)
        return engine.recorder.stop()


def test_names_and_bytes_and_what_others_hold_while_the_loss_is_computed() -> None:
    """The chunk's own frames hold the norm's output (``head/0``), and its caller the batch."""
    found = recorded(Chunk()).non_layer
    assert [(one.site, one.num_bytes) for one in found] == 2 * list(EXPECTED.items())
    assert {one.chunk for one in found} == {0}
    assert {one.site for one in found if one.has_external_refs} == {"embedding/0", "model/0", "head/0", "loss/2"}


@pytest.mark.parametrize("recording", [False, True])
def test_not_a_bit_changes_and_off_nothing_stands_in_the_graph(recording: bool) -> None:
    chunk = Chunk()
    plain = train(copy.deepcopy(chunk))
    with engine_around(chunk) as engine:
        assert engine.recorder is not None
        seen: list[object] = []
        saved_non_layer = engine.recorder.saved_non_layer
        engine.recorder.saved_non_layer = lambda *what: seen.append(what) or saved_non_layer(*what)  # type: ignore[method-assign,func-returns-value]
        if recording:
            engine.recorder.start(1)
        assert all(torch.equal(one, two) for one, two in zip(plain, train(chunk), strict=True))
        assert bool(seen) == recording
        with torch.no_grad():
            assert not engine.saved_tensors.is_recorded
