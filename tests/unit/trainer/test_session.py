"""A session leaves nothing behind."""

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.training import training
from torch import nn

from megatron.swap.common.types import MIB, UsageError
from megatron.swap.memory.disk_file import DiskError
from megatron.swap.patches import registry
from megatron.swap.trainer.session import SwapSession
from tests.megatron_args import OF_A_RUN, parsed


def arguments(*flags: str) -> argparse.Namespace:
    """Return our arguments, and those of Megatron's that the session reads."""
    own = {"num_layers": 2, "seq_length": 32, "micro_batch_size": 1, "padded_vocab_size": 256,
           "recompute_granularity": "selective", "recompute_modules": ["core_attn"]}  # fmt: skip
    return parsed(" ".join(flags), **OF_A_RUN, **own)


def patched() -> set[str]:
    return set(registry._in_place)


@pytest.mark.skipif(torch.cuda.is_available(), reason="builds the emulated device")
@pytest.mark.parametrize("flags", ["--swap-layers all --swap-summary x.json", "--swap-recompute norm activation"])
def test_a_closed_session_leaves_nothing_and_another_can_be_installed(flags: str):
    model_config = SimpleNamespace(pre_wrap_hooks=[])
    before = patched()
    for _ in range(2):
        session = SwapSession.install(arguments(*flags.split()), model_config)
        assert patched() > before
        chunk = nn.Linear(2, 2)
        for hook in model_config.pre_wrap_hooks:
            hook([chunk])
        assert "forward" in vars(chunk)
        session.close()
        session.close()
        assert patched() == before
        assert model_config.pre_wrap_hooks == []
        assert "forward" not in vars(chunk)


@pytest.mark.skipif(torch.cuda.is_available(), reason="builds the emulated device")
def test_what_fails_at_the_end_leaves_nothing_either():
    before = patched()
    session = SwapSession.install(arguments("--swap-layers", "all"), SimpleNamespace(pre_wrap_hooks=[]))
    chunk = nn.Linear(2, 2)
    chunk.forward = own = lambda inputs: inputs * 42  # some other library's
    session.attach([chunk])

    def fails() -> None:
        raise DiskError("the disk broke")

    session.optimizer_swap = SimpleNamespace(  # type: ignore[assignment]
        close=fails, abandon=lambda: None, reserved_bytes=0, offloaded_tensors=lambda: ()
    )
    with pytest.raises(DiskError, match="broke"):
        session.close()
    assert patched() == before
    assert session.parts is None
    assert vars(chunk)["forward"] is own
    session.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="builds the emulated device")
@pytest.mark.parametrize("flags", ["--swap-layers all", "--swap-summary x.json", "--swap-memory-gib 1"])
def test_a_model_that_nobody_told_of_does_not_train(flags: str):
    before = patched()
    SwapSession.install(arguments(*flags.split()))
    with pytest.raises(UsageError, match=r"model_config of that model, or pass the model's chunks to attach"):
        training.train(None, [], None)
    assert patched() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="builds the emulated device")
def test_a_model_without_a_stack_of_layers_does_not_train_unswapped():
    before = patched()
    session = SwapSession.install(arguments("--swap-layers", "all"))
    session.attach([nn.Linear(2, 2)])
    with pytest.raises(UsageError, match="no TransformerBlock of Megatron"):
        training.train(None, [], None)
    assert patched() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="builds the emulated device")
def test_after_a_failure_no_allocation_is_rescued_any_more():
    session = SwapSession.install(
        arguments("--swap-layers", "all", "--swap-oom-guard"), SimpleNamespace(pre_wrap_hooks=[])
    )
    session.attach([nn.Linear(2, 2)])
    assert session.parts is not None
    guard = session.parts.machine.guard
    assert guard.is_on
    session.on_finish(RuntimeError("somebody's"), [], None)
    assert not guard.is_on
    session.close()


class Momentum(torch.optim.Optimizer):
    """As Muon: steps whole parameters, and creates their moments in the first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    moment = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
                    param -= group["lr"] * moment.add_(param.grad)


OrthogonalizedOptimizer = type("OrthogonalizedOptimizer", (Momentum,), {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="builds the emulated device")
def test_moments_that_the_first_step_creates_are_reserved_until_it_has_ended():
    flags = "--swap-layers all --swap-optimizer 1 --swap-min-mib 0 --swap-host-gib 1 --swap-host-unchecked"
    args = arguments(*flags.split())
    same = dict.fromkeys((
        "optimizer_cpu_offload", "optimizer_cuda_graph", "log_params_norm", "async_save", "qk_clip",
        "rl_offload_optimizer_during_inference", "fp8_param_gather", "fp4_param_gather",
    ), False)  # fmt: skip
    dtypes = dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"), torch.float32)
    vars(args).update(same | dtypes, optimizer="muon")
    session = SwapSession.install(args, SimpleNamespace(pre_wrap_hooks=[]))
    try:
        chunk = nn.Linear(1024, 1024)
        session.attach([chunk])
        optimizer = FP32Optimizer.__new__(FP32Optimizer)
        vars(optimizer).update(
            optimizer=OrthogonalizedOptimizer(chunk.parameters()), init_state_fn=None, config=None,
            is_stub_optimizer=False, grad_scaler=None,
        )  # fmt: skip
        session.on_optimizer_built(optimizer)
        swap, reservation = session.optimizer_swap, session.planned.state_memory
        assert swap is not None
        assert session.parts is not None
        chunk.weight.grad = torch.ones_like(chunk.weight)
        for _ in range(2):
            optimizer.optimizer.step()
            assert 4 * MIB <= swap.reserved_bytes <= reservation.num_bytes
            session.on_iteration(1, {}, None, False, None)
            assert swap.reserved_bytes <= reservation.num_bytes
        chunk.bias.grad = torch.ones_like(chunk.bias)
        optimizer.optimizer.step()
        assert swap.reserved_bytes <= reservation.num_bytes
        session.on_iteration(2, {}, None, False, None)
        assert swap.reserved_bytes == reservation.num_bytes, "activations get the rest"
    finally:
        session.close()
