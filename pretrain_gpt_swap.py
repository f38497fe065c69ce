"""Pretrain a GPT with Megatron-LM's own trainer and swapped activations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from megatron.swap.prepare import prepare

# One dictionary of tensors per micro-batch, as the data loader makes it; None where this rank reads no data.
Batch = dict[str, Any]

BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
DOCUMENT_KEYS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")


def has_mtp(vp_stage: int | None) -> bool:
    """Return whether layers that predict further tokens are on this pipeline stage: they read tokens and labels."""
    from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.training import get_args

    args = get_args()
    layout = args.pipeline_model_parallel_layout
    if layout is not None:
        layout = PipelineParallelLayerLayout(layout, args.pipeline_model_parallel_size)
    return bool(mtp_on_this_rank(layout, args.mtp_num_layers, vp_stage is None, vp_stage))


def reads_data(vp_stage: int | None) -> bool:
    """Return whether this pipeline stage reads data."""
    from megatron.training.utils import is_first_or_last_pipeline_stage

    return is_first_or_last_pipeline_stage(vp_stage) or has_mtp(vp_stage)


def has_mask(args: Any) -> bool:
    """Return whether the data has an attention mask. Packed documents need none: attention knows their lengths."""
    from megatron.swap.trainer.inputs import packs_documents

    return bool(args.reset_attention_mask) and not packs_documents(args)


def documents_in(batch: Batch, seq_length: int) -> Any:
    """Return where the documents of a packed micro-batch begin, for attention and the rotary embedding."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.training.training import update_seqlen_stats_from_cu_seqlens

    begins, longest = batch["cu_seqlens"].squeeze(0), int(batch["max_seqlen"])
    update_seqlen_stats_from_cu_seqlens(begins)  # for the FLOPs that Megatron prints
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=begins, cu_seqlens_kv=begins, max_seqlen_q=longest, max_seqlen_kv=longest,
        tokens_per_sample=seq_length,
    )  # fmt: skip


def get_batch(data_iterator: Iterator[Batch] | None, vp_stage: int | None) -> list[Any]:
    """Return this rank's part of the next micro-batch: the tensors of ``BATCH_KEYS``, then the documents in it.

    ``None`` stands for what is not needed. Each pipeline stage needs the documents, if they are packed.
    """
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
    from megatron.training import get_args

    from megatron.swap.trainer.inputs import packs_documents

    args = get_args()
    is_packed = packs_documents(args)
    if not is_packed and not reads_data(vp_stage):
        return [None] * (len(BATCH_KEYS) + 1)
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    stage = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    batch: Batch = dict.fromkeys((*BATCH_KEYS, *DOCUMENT_KEYS))
    if tensor_rank == 0:
        assert data_iterator is not None, "the first tensor-parallel rank of this pipeline stage has no data"
        device, data = torch.cuda.current_device(), next(data_iterator)
        batch |= {key: data[key].to(device, non_blocking=True) for key in batch if key in data}
    batch = get_batch_on_this_tp_rank(
        batch,
        is_packed,  # has_cu_seqlens, which was is_sft before 0.19
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=has_mask(args),
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tensor_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(**stage),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(**stage),
    )
    documents = None
    if is_packed:
        from megatron.core.utils import flatten_batch_for_packed_sequences

        batch = flatten_batch_for_packed_sequences(batch)  # several samples are one pack
        documents = documents_in(batch, args.seq_length)
    if args.context_parallel_size > 1 and reads_data(vp_stage):
        group = parallel_state.get_context_parallel_group()
        batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    return [*(batch.get(key) for key in BATCH_KEYS), documents]


def loss_function(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the losses, the number of tokens, and a report of both: Megatron averages over the batch."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().to(torch.int)
    report = torch.cat([loss.detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def forward_step(
    data_iterator: Iterator[Batch] | None, model: Any
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Run one micro-batch through this rank's part of the model; return the output and its loss function."""
    from megatron.core.utils import get_attr_wrapped_model
    from megatron.training import get_timers

    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    tokens, labels, loss_mask, attention_mask, position_ids, documents = get_batch(data_iterator, vp_stage)
    timers("batch-generator").stop()
    output = model(
        tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask, packed_seq_params=documents
    )
    return output, partial(loss_function, loss_mask)


def provide_datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Build training, validation and test data: indexed (``--data-path``), generated (``--mock-data``), or
    conversations (``--sft``)."""
    from megatron.core import parallel_state
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
    from megatron.training import get_args, get_tokenizer
    from megatron.training.utils import get_blend_and_blend_per_split

    from megatron.swap.trainer.inputs import evaluates, masks_documents, packs_documents

    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        # Causal attention needs no mask: it would take sequence² bytes a sample, and prevent fast kernels.
        create_attention_mask=has_mask(args),
        context_parallel_size=args.context_parallel_size,
        **({"inter_document_masking": True} if masks_documents(args) else {}),  # unknown before 0.19
    )

    if not evaluates(args):  # Megatron would read these parts all the same, and fail at those that are too small
        (config.split_matrix or config.blend_per_split)[1:] = [None, None]

    def is_built_on_this_rank() -> bool:
        # Of a stage that reads data, one tensor-parallel rank reads it and broadcasts it.
        is_source = parallel_state.get_tensor_model_parallel_rank() == 0
        return bool(is_source and (packs_documents(args) or reads_data(vp_stage)))

    dataset: Any = MockGPTDataset if args.mock_data else GPTDataset
    if args.sft:
        from megatron.training.datasets.sft_dataset import SFTDataset

        dataset = SFTDataset
    return BlendedMegatronDatasetBuilder(dataset, num_samples, is_built_on_this_rank, config).build()


# Megatron calls the provider on every rank then, and the builder decides which ranks read.
provide_datasets.is_distributed = True  # type: ignore[attr-defined]


def main() -> None:
    prepare(sys.argv)  # must run before Megatron is imported
    from megatron import swap
    from megatron.training.arguments import parse_and_validate_args

    from megatron.swap.attention import sdpa_layer_spec
    from megatron.swap.trainer.inputs import check_data, check_packing
    from megatron.swap.trainer.prepare import asks_for_debug
    from megatron.swap.trainer.refusals import told_refusals

    with told_refusals(in_full=asks_for_debug(sys.argv)):
        args = parse_and_validate_args(extra_args_provider=swap.add_swap_args)
        check_packing(args)
        check_data(args)
    is_local = args.transformer_impl == "local"
    layer_spec = sdpa_layer_spec(args.swap_deterministic, has_mask(args)) if is_local else None
    swap.pretrain(args, provide_datasets, forward_step, layer_spec=layer_spec)


if __name__ == "__main__":
    main()
