"""Parameters that the device cannot hold twice wait in host memory until Megatron has made its buffers."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from torch import nn

from megatron.swap.megatron_lm import param_copies
from megatron.swap.megatron_lm.accumulators import hold_grad_accumulators
from megatron.swap.patches.cpu import CPU_PATCHES
from megatron.swap.patches.param_buffer import param_buffer_patch
from megatron.swap.patches.registry import apply

NUM_LAYERS = 4
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="patches for machines without CUDA")


@pytest.fixture(scope="module", autouse=True)
def parallel(group: object) -> Iterator[None]:
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


class Other(nn.Parameter):
    """A parameter of another type, as those in 8 bits are."""


def model_of() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(NUM_LAYERS)))


def wrapped(model: nn.Module, *, is_distributed: bool = True, in_fp32: bool = False) -> DistributedDataParallel:
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=in_fp32, use_distributed_optimizer=is_distributed, overlap_grad_reduce=False
    )
    return DistributedDataParallel(config, settings, model)


@on_cpu
@pytest.mark.parametrize(("is_distributed", "in_fp32"), [(True, True), (True, False), (False, False)])
def test_the_buffers_bytes_are_known_before_they_are_made(is_distributed: bool, in_fp32: bool) -> None:
    model = model_of()
    model[0].weight = Other(model[0].weight.data)
    calls: list[tuple[list[nn.Parameter], int]] = []

    def note(params: Sequence[nn.Parameter], num_bytes: int) -> AbstractContextManager[None]:
        calls.append((list(params), num_bytes))
        return nullcontext()

    with apply(CPU_PATCHES), apply([param_buffer_patch(note)]):
        parallel = wrapped(model, is_distributed=is_distributed, in_fp32=in_fp32)
    if is_distributed:
        ((params, num_bytes),) = calls
        assert [id(param) for param in params] == [id(param) for param in list(model.parameters())[1:]]
        (buffer,) = parallel.buffers
        assert num_bytes == buffer.param_data.nbytes + buffer.grad_data.nbytes
    else:
        assert not calls, "Megatron makes no buffer for parameters"


@on_cpu
@pytest.mark.parametrize(
    ("free", "host_bytes", "is_moved"),
    [([False, True], 10**6, False), ([False, False], NUM_LAYERS * 64 * 64 * 2, True),
     ([False, False], NUM_LAYERS * 64 * 64 * 2 - 1, False)],
)  # fmt: skip
def test_parameters_keep_values_and_accumulators(
    monkeypatch: pytest.MonkeyPatch, free: list[bool], host_bytes: int, is_moved: bool
) -> None:
    """They wait in host memory where the device lacks room and the host has it."""
    answers = iter(free)
    monkeypatch.setattr(param_copies, "has_free", lambda num_bytes: next(answers))
    model = model_of()
    expected = [param.detach().clone() for param in model.parameters()]
    held = hold_grad_accumulators(model)
    seen: list[int] = []

    @contextmanager
    def watched(params: Sequence[nn.Parameter], num_bytes: int) -> Iterator[None]:
        with param_copies.off_device(params, num_bytes, host_bytes=host_bytes):
            seen.extend(param.untyped_storage().nbytes() for param in params)
            yield

    with apply(CPU_PATCHES), apply([param_buffer_patch(watched)]):
        parallel = wrapped(model)
    assert seen == [2 if is_moved else 64 * 64 * 2] * NUM_LAYERS
    params = list(model.parameters())
    assert all(torch.equal(param, values) for param, values in zip(params, expected, strict=True))
    (buffer,) = parallel.buffers
    storage = buffer.param_data.untyped_storage().data_ptr()
    assert all(param.untyped_storage().data_ptr() == storage and param.is_contiguous() for param in params)
    assert set(parallel.grad_accs) == set(held), "gradients would be added on another stream"


def node_of(parameter: nn.Parameter) -> object:
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def test_who_asks_later_gets_the_same_node() -> None:
    module = nn.Linear(2, 3)
    nodes = hold_grad_accumulators(module)
    assert [node_of(parameter) for parameter in module.parameters()] == nodes
    module.bias.requires_grad_(False)
    assert len(hold_grad_accumulators(nn.ModuleList([module, module]))) == 1
