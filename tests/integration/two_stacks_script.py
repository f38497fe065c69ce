"""The trainer with Megatron's T5: an encoder and a decoder of ``--num-layers`` each, which both read the tokens."""

import sys
from typing import Any

import torch

import pretrain_gpt_swap as program
from megatron.swap.common.types import SwapError

if __name__ == "__main__":
    program.prepare(sys.argv)
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.models.T5.t5_spec import (
        get_t5_decoder_with_local_block_spec,
        get_t5_encoder_with_local_block_spec,
    )
    from megatron.training.models.gpt import GPTModelBuilder

    class TwoStacks(T5Model):
        """Takes what the trainer's step passes to a GPT."""

        def forward(self, tokens: Any, position_ids: Any, attention_mask: Any, *, labels: Any, **_: Any) -> Any:
            size = tokens.shape[1]
            all_seen = torch.zeros(1, 1, size, size, dtype=torch.bool)
            causal = torch.ones_like(all_seen).triu(1)
            return super().forward(tokens, tokens, all_seen, causal, all_seen, lm_labels=labels)

    def build_model(self: Any, pg_collection: Any, *_: Any, **__: Any) -> Any:
        config = self._model_config
        number = config.transformer.num_layers
        return TwoStacks(
            config.transformer, config.transformer, get_t5_encoder_with_local_block_spec(number),
            get_t5_decoder_with_local_block_spec(number), config.vocab_size, config.seq_length,
            share_embeddings_and_output_weights=True, position_embedding_type="rope", pg_collection=pg_collection,
        )  # fmt: skip

    GPTModelBuilder.build_model = build_model  # type: ignore[method-assign]
    try:
        program.main()
    except SwapError as error:
        sys.exit(f"error: {error}")
