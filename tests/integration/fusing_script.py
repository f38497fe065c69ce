"""The trainer with ``--gradient-accumulation-fusion``, and a stand-in for the module of apex that it needs."""

import sys
from types import SimpleNamespace

import torch

import pretrain_gpt_swap as program


class Adding:
    """``fused_weight_gradient_mlp_cuda`` in torch: adds a linear layer's weight gradient to ``main_grad``."""

    num_calls = 0

    def __call__(self, inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        self.num_calls += 1
        main_grad.add_(grad_output.t().matmul(inputs))


if __name__ == "__main__":
    program.prepare(sys.argv)
    from megatron.core.tensor_parallel import layers

    adding = Adding()
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=adding, wgrad_gemm_accum_fp16=adding)
    layers._grad_accum_fusion_available = True
    program.main()
    print(f"weight gradients added: {adding.num_calls}", flush=True)
