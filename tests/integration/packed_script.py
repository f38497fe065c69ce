"""The trainer with packed documents on a machine without TransformerEngine.

TransformerEngine's attention takes the documents' lengths; here the local spec's attention turns them into a mask.
"""

import sys
from argparse import Namespace
from typing import Any

import torch

import pretrain_gpt_swap as program

if __name__ == "__main__":
    program.prepare(sys.argv)
    from megatron.swap.megatron_lm import attention
    from megatron.swap.trainer import inputs

    class PackedAttention(attention.SdpaCoreAttention):
        def forward(  # type: ignore[override]
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            *_: Any,
            packed_seq_params: Any,
            **__: Any,
        ) -> torch.Tensor:
            ends = packed_seq_params.cu_seqlens_q[1:]
            assert int(ends[-1]) == len(query)
            documents = torch.bucketize(torch.arange(len(query), dtype=ends.dtype), ends, right=True)
            self.use_given_mask = True
            crosses = (documents[:, None] != documents)[None, None]
            return super().forward(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), crosses)

    attention.SdpaCoreAttention = PackedAttention  # type: ignore[misc]
    check = inputs.check_packing
    inputs.check_packing = lambda args: check(Namespace(**{**vars(args), "transformer_impl": "with such attention"}))
    program.main()
