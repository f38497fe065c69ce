#!/usr/bin/env bash
# Pretrain a GPT with Megatron-LM while activations are swapped to host memory. Installs its environment on a fresh machine.
#
#   bash examples/pretrain_gpt_swap.sh --swap-layers 0-23                      # tiny without a GPU, 1.3b with one
#   MODEL=8b NUM_GPUS=2 bash examples/pretrain_gpt_swap.sh --tensor-model-parallel-size 2 --sequence-parallel --swap-layers all
#   DATA_PATH=.data/mine_text_document bash examples/pretrain_gpt_swap.sh --tokenizer-type HuggingFaceTokenizer --tokenizer-model gpt2
#
# What it does: finds Python 3.12 or 3.13, makes .venv (once; about 5 GB), turns the standard library's source files into a byte-level
# corpus under .data (once; seconds), trains. All flags go to Megatron after the preset's, so they override it.
#
# Expected without swapping, by arithmetic (18 bytes a parameter with Adam; 34 bytes x tokens x width a layer and 6 bytes a logit for one
# micro-batch; 400 TFLOP/s), except tiny, which was run:
#
#   MODEL    layers x width, tokens   model + optimizer   activations   a step
#   tiny     24 x 128,   256          below 2 GiB of host memory        1.4 s on 2 CPU cores; 20 steps and start-up: 1 minute
#   125m     12 x 768,  2048            3 GiB               19 GiB      0.1 s
#   350m     24 x 1024, 2048            7 GiB               17 GiB      0.2 s
#   1.3b     24 x 2048, 4096           24 GiB               30 GiB      1.4 s
#   2.7b     32 x 2560, 4096           47 GiB               24 GiB      2.7 s
#   8b       32 x 4096, 8192          135 GiB               40 GiB      16 s for all the work on one GPU; needs two or more, split by
#                                                                       tensor parallelism or --use-distributed-optimizer
#
# Measured on one H200 (docs/benchmarks/appendix.md): 1.3b with --swap-layers 0-3 takes 1.2 s a step and has a peak of
# 44 GiB. With 0-23 it takes 3.6 s and 27 GiB: the link then carries 88 GiB each way, for which forward is too short.
#
# Settings from the environment:
#   MODEL=tiny|125m|350m|1.3b|2.7b|8b   preset by size
#   NUM_GPUS=N              ranks to start here (default: 1); without a GPU they are CPU processes. Under torchrun: this process is one rank
#   DATA_PATH=PREFIX        your own indexed dataset (tools/preprocess_data.py), with your tokenizer flags; without any it is byte-level
#   SUMMARY=FILE            shorthand for --swap-summary FILE
#   MEGATRON_SWAP_PYTHON=python3        use an existing environment (NGC container, cluster) and install nothing
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../tools/setup_env.sh"
swap_setup_env run

# Detect the number of GPUs, whether TransformerEngine imports, and whether apex's gradient kernel is installed.
read -r gpus transformer_engine apex_kernel < <("$SWAP_PYTHON" -W ignore - <<'PY'
import importlib.util
import torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
engine = 0
if gpus:
    try:
        import transformer_engine.pytorch
        engine = 1
    except Exception:
        pass
print(gpus, engine, int(importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None))
PY
) || swap_die "$SWAP_PYTHON cannot import torch"

if [ -n "${RANK:-}" ] && [ -n "${WORLD_SIZE:-}" ]; then
    ranks="$WORLD_SIZE"
    launch=("$SWAP_PYTHON")
else
    ranks="${NUM_GPUS:-1}"
    case "$ranks" in '' | 0 | *[!0-9]*) swap_die "NUM_GPUS=$ranks: a number of ranks from 1 is expected" ;; esac
    [ "$gpus" -gt 0 ] && [ "$ranks" -gt "$gpus" ] && swap_die "NUM_GPUS=$ranks, but this machine has $gpus"
    launch=("$SWAP_PYTHON")
    if [ "$ranks" -gt 1 ]; then
        launch=("$SWAP_PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$ranks")
    else # a single rank needs no launcher; port 0 picks a free port, so that runs do not collide
        export RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=0
    fi
fi

if [ "$gpus" -gt 0 ]; then default_model=1.3b; else default_model=tiny; fi
MODEL="${MODEL:-$default_model}"
vocabulary=50257 iterations=50 evaluations=2 batch=16 learning_rate=2e-4 warm_up=0.2 preset=()
case "$MODEL" in
    tiny) shape=(24 128 4 256) micro=4 batch=8 vocabulary=257 iterations=20 evaluations=0 learning_rate=2e-3 warm_up=0.1
        preset=(--swap-min-mib 0.06) ;;
    125m) shape=(12 768 12 2048) micro=16 ;;
    350m) shape=(24 1024 16 2048) micro=8 ;;
    1.3b) shape=(24 2048 16 4096) micro=4 ;;
    2.7b) shape=(32 2560 32 4096) micro=2 ;;
    8b) shape=(32 4096 32 8192) micro=1 vocabulary=128256
        preset=(--ffn-hidden-size 14336 --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm
                --rotary-base 500000 --disable-bias-linear) ;;
    *) swap_die "MODEL=$MODEL is not known; choose tiny, 125m, 350m, 1.3b, 2.7b or 8b" ;;
esac
# Enough for every data-parallel size that the ranks allow.
if [ $((micro * ranks)) -gt "$batch" ]; then batch=$((micro * ranks)); fi

# Embeddings begin at 1.0: at Megatron's 0.02 the first norm multiplies their gradients by 50, and a byte that comes up first at step 14 is a spike.
flags=(
    --num-layers "${shape[0]}" --hidden-size "${shape[1]}" --num-attention-heads "${shape[2]}"
    --seq-length "${shape[3]}" --max-position-embeddings "${shape[3]}"
    --position-embedding-type rope --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size "$micro" --global-batch-size "$batch" --train-iters "$iterations"
    --lr "$learning_rate" --lr-decay-style cosine --min-lr 1e-5 --lr-warmup-fraction "$warm_up" --clip-grad 1.0 --weight-decay 0.1
    --adam-beta2 0.95 --embedding-init-method-std 1.0
    --split 969,30,1 --eval-interval 1000 --eval-iters "$evaluations" --log-interval 1
    "${preset[@]}"
)
[ "$apex_kernel$transformer_engine" != 00 ] || flags+=(--no-gradient-accumulation-fusion) # no kernel for it

if [ "$gpus" -gt 0 ]; then
    export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
    export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
    flags+=(--bf16)
else
    export TORCHDYNAMO_DISABLE="${TORCHDYNAMO_DISABLE:-1}" # 28 s of start-up for a compiler that the CPU path does not use
    cores="$(nproc 2>/dev/null || echo 1)"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}"
    flags+=(--distributed-backend gloo --num-workers 0)
fi
if [ "$transformer_engine" = 1 ]; then
    flags+=(--transformer-impl transformer_engine)
else
    flags+=(--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion)
fi

case " $* " in
    *" --tokenizer-type"*) ;;
    # Byte-level tokens in an embedding of the model's real size; 256 ends a document.
    *) flags+=(--tokenizer-type NullTokenizer --vocab-size "$vocabulary" --null-tokenizer-eod-id 256) ;;
esac
case " $* " in
    *" --data-path"* | *" --mock-data"* | *" --train-data-path"* | *" --data-args-path"* | *" --per-split-data-args-path"*) ;;
    *)
        if [ -z "${DATA_PATH:-}" ]; then
            prefix="$("$SWAP_PYTHON" "$SWAP_ROOT/tools/prepare_stdlib_corpus.py" --folder "$SWAP_ROOT/.data")"
            flags+=(--data-path "$prefix")
        else
            read -r -a prefixes <<<"$DATA_PATH" # one prefix, or weights and prefixes in turn
            flags+=(--data-path "${prefixes[@]}")
        fi
        ;;
esac
[ -n "${SUMMARY:-}" ] && flags+=(--swap-summary "$SUMMARY")

[ "${RANK:-0}" = 0 ] && swap_say "MODEL=$MODEL on $ranks $([ "$gpus" -gt 0 ] && echo GPU || echo "CPU process")(s)"
exec "${launch[@]}" "$SWAP_ROOT/pretrain_gpt_swap.py" "${flags[@]}" "$@"
