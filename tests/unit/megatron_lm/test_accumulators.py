"""Gradients are accumulated on the stream that computes them, whoever asks for the nodes later."""

import pytest
import torch
from torch import nn

from megatron.swap.megatron_lm import accumulators


def node_of(parameter: nn.Parameter) -> object:
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def test_who_asks_later_gets_the_same_node() -> None:
    module = nn.Linear(2, 3)
    nodes = accumulators.hold_grad_accumulators(module)
    assert [node_of(parameter) for parameter in module.parameters()] == nodes
    assert [node.variable for node in nodes] == list(module.parameters())


def test_frozen_and_shared_parameters() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    second.weight = first.weight
    second.bias.requires_grad_(False)
    assert len(accumulators.hold_grad_accumulators(nn.ModuleList([first, second]))) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_memory_of_gradients_is_free_at_once() -> None:
    """Megatron puts hooks on the nodes on another stream. Memory that passes between streams is freed late."""

    def num_late(early: bool) -> int:
        module = nn.Linear(1024, 1024, bias=False, device="cuda")
        nodes = accumulators.hold_grad_accumulators(module) if early else []
        with torch.cuda.stream(torch.cuda.Stream()):
            nodes.append(node_of(module.weight))
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        module(torch.ones(8, 1024, device="cuda")).sum().backward()
        module.weight.grad = None
        stats = torch.cuda.memory_stats()
        late: int = stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]
        torch.cuda.synchronize()
        return late

    assert num_late(early=False) > 0
    assert num_late(early=True) == 0
