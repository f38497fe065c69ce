"""The trainer with an Adam that counts steps in its parameter groups, as those of Apex and TransformerEngine do.
Upstream cannot resume the distributed optimizer with torch's Adam. The arithmetic is ours; Megatron takes its code
paths for Apex."""

from __future__ import annotations

import sys
from typing import Any

import torch

import pretrain_gpt_swap as program


class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params: Any, adam_w_mode: bool, capturable: bool, **settings: Any) -> None:
        assert adam_w_mode
        assert not capturable
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(param)
                (one, two), (mean, square) = group["betas"], (state["exp_avg"], state["exp_avg_sq"])
                mean.lerp_(param.grad, 1 - one)
                square.mul_(two).addcmul_(param.grad, param.grad, value=1 - two)
                root = (square / (1 - two ** group["step"])).sqrt_().add_(group["eps"])
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.addcdiv_(mean, root, value=-group["lr"] / (1 - one ** group["step"]))


if __name__ == "__main__":
    program.prepare(sys.argv)
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
    program.main()
