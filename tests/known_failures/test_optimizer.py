"""Known failure of offloading: optimizer state that a fused kernel cannot step where it lies."""

from typing import Any

import pytest
import torch

from megatron.swap.common.types import UsageError
from megatron.swap.megatron_lm.optimizer_adapter import is_elementwise
from tests.unit.optimizer.test_stepper import Training, same

HOST: list[torch.Tensor] = []
"""Host memory of the running test, which no kernel of a GPU can write."""


class FusedAdam(torch.optim.Optimizer):
    """An Adam for the GPU alone, which counts steps in its groups. State that lies on the host it poisons, silently."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(param)
                (one, two), mean, square = group["betas"], state["exp_avg"], state["exp_avg_sq"]
                mean.lerp_(param.grad, 1 - one)
                square.mul_(two).addcmul_(param.grad, param.grad, value=1 - two)
                root = (square / (1 - two ** group["step"])).sqrt_().add_(group["eps"])
                param.addcdiv_(mean, root, value=-group["lr"] / (1 - one ** group["step"]))
                for tensor in (param, mean, square):
                    if is_on_host(tensor):
                        tensor.fill_(torch.nan)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` lies in the memory that state is offloaded to."""
    return any(region.data_ptr() <= tensor.data_ptr() < region.data_ptr() + region.numel() for region in HOST)


class TestMomentsPoisoned:
    """A fused Adam of the GPU steps moments on the host, and corrupts them.

    Seen in NVIDIA-NeMo/RL#3544: TransformerEngine's FusedAdam with `cpu_offload: true` raised no error; the resumed
    run's loss was NaN.

    Here: the optimizer's own step gets device memory, bucket by bucket, and its counters advance once. Unknown
    optimizers are refused.
    """

    @pytest.fixture
    def pair(self) -> tuple[Training, Training]:
        """Training with all state offloaded in many buckets, and without."""
        swapped, plain = Training(FusedAdam, lambda _: True), Training(FusedAdam)
        HOST[:] = [region.tensor for region in swapped.arena._regions]
        assert sum(region.numel() for region in HOST) >= 12 * sum(param.numel() for param in swapped.params)
        return swapped, plain

    def test_steps(self, pair: tuple[Training, Training]) -> None:
        swapped, plain = pair
        assert same(swapped.steps(6).all(), plain.steps(6).all())
        assert [group["step"] for group in swapped.optimizer.param_groups] == [6]

    def test_checkpoints_in_between(self, pair: tuple[Training, Training]) -> None:
        """What a checkpoint reads is finite, and so are the moments that go on from it."""
        swapped, plain = pair
        assert swapped.stepper is not None
        for _ in range(3):
            assert same(swapped.steps(2).all(), plain.steps(2).all())  # materializes the state, on the host
            moments = [value for state in swapped.optimizer.state.values() for value in state.values()]
            assert moments
            assert all(is_on_host(value) and value.isfinite().all() for value in moments)
            swapped.stepper.store_loaded()  # as after a resume
        assert same(swapped.steps(2).all(), plain.steps(2).all())

    def test_a_class_that_is_not_known(self) -> None:
        class OtherAdam(torch.optim.Optimizer):
            pass

        with pytest.raises(UsageError, match="it is not known whether OtherAdam steps each parameter alone"):
            is_elementwise(OtherAdam([torch.zeros(1)], {}), has_disk=False)
