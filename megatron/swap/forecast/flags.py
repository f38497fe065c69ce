"""Reads training flags that decide sizes from a raw command line."""

import argparse
import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from megatron.swap.common.flag_names import nearest_flag
from megatron.swap.common.flags import CommandLine
from megatron.swap.common.plan import DROPPED, FP8_WEIGHTS, Model
from megatron.swap.common.settings import read_fraction, read_loss_chunks
from megatron.swap.common.types import MOST, UsageError
from megatron.swap.forecast.facts import (
    MegatronFacts,
    has_short_gradients,
    has_sum_in_loss,
    holds_main_params,
    model_of,
    state_bytes_of,
)
from megatron.swap.forecast.fp8 import RECIPES, check_fp8_weights, why_copies_stay
from megatron.swap.forecast.loss_chunks import choose_num_chunks
from megatron.swap.forecast.states import States

FLAGS_FILE = Path(__file__).with_name("training_flags.txt")
"""The names of all training flags, Megatron's and ours, behind a line that ends in Megatron's version. Flags that need
a value have ``VALUE`` behind them. ``python -m tests.pages`` renews the file: planning imports neither Megatron nor
torch, so it cannot ask the parser."""

UNSUPPORTED = frozenset({
    "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split",
    "cpu-offloading-num-layers", "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
    "disable-fp8-wgrad", "fine-grained-activation-offloading", "fp4-format", "fp8-output-proj",
    "fp8-quantizer-factory", "moe-ffn-hidden-size", "moe-layer-freq", "moe-shared-expert-intermediate-size",
    "mtp-num-layers", "multi-latent-attention", "no-fp8-wgrad", "optimizer",
    "optimizer-cpu-offload", "pipeline-model-parallel-layout", "recompute-activations", "recompute-granularity",
    "use-megatron-fsdp", "use-torch-fsdp2",
})  # fmt: skip
"""Megatron's flags that change the memory or time of a step so much that ``shape_profile`` has no answer."""
NOT_COUNTED = frozenset({
    "add-qkv-bias", "apply-layernorm-1p", "cross-entropy-loss-fusion", "cuda-graph-impl", "ddp-bucket-size",
    "delay-wgrad-compute", "deterministic-mode", "enable-cuda-graph", "external-cuda-graph",
    "overlap-grad-reduce", "overlap-param-gather", "overlap-param-gather-with-optimizer-step", "qk-layernorm",
    "softmax-type", "squared-relu", "swap-deterministic", "tp-comm-overlap", "use-nccl-ub", "window-size",
})  # fmt: skip
"""Flags that change memory a little. A plan is made without them and says so."""
DECIDED = {"swap-layers": "none", "swap-plan": None, "swap-recompute": None, "swap-modules": None}
"""Flags that choose by hand, with the values that choose nothing."""
# Types of optimizer state, with Megatron's defaults.
OF_STATE = {"exp-avg-dtype": "fp32", "exp-avg-sq-dtype": "fp32", "main-params-dtype": "fp32"}
# ``UNSUPPORTED``, but needless with a planner.
OF_RECOMPUTATION = frozenset({"recompute-activations", "recompute-granularity"})


@dataclass(frozen=True)
class Training:
    """A run as training flags describe it: the input of ``shape_profile``."""

    model: Model
    num_micro_batches: int
    tied: bool  # whether embedding and output layer share their weights
    states: States
    host_gib: float | None = None  # limit of the rank's host memory; None: no flag sets it
    disk_gib: float = 0.0  # limit of the disk behind host memory; infinite: no flag sets it; 0: there is no disk
    budget_gib: float | None = None  # ``--swap-memory-gib``
    num_gpus: int = 1  # GPUs of the run
    num_replicas: int = 1  # replicas of the model, each with its own part of the batch
    budget_fraction: float | None = None  # ``--swap-memory-fraction``
    shares_state: bool = False  # whether ranks that hold the same weights share their optimizer state
    has_positions: bool = True  # whether the flags say how many positions Megatron provides for
    state_stays: str | None = None  # a flag with which optimizer state cannot be offloaded
    loss_chunks: int | Literal["auto"] | None = None  # as ``Settings.loss_chunks``
    has_sum_in_loss: bool = False  # as for ``loss_bytes``
    fuses_gradients: bool = False  # layers add to ``main_grad`` themselves, so that weights have no 16-bit gradients
    avoids_disk: str | None = None  # a flag with which optimizer state cannot be on disk
    may_drop_copies: bool = False
    """The planner chooses whether layers in FP8 keep copies of their weights: no flag says it, and there is a single
    pipeline stage, since all stages must do the same."""
    has_dropout: bool = False  # as for ``layer_class``

    @property
    def num_loss_chunks(self) -> int:
        if self.loss_chunks == "auto":
            return choose_num_chunks(self.model, self.has_sum_in_loss)
        return self.loss_chunks or 1

    @property
    def offloads(self) -> bool:
        return self.states.offload_fraction > 0

    @property
    def tokens(self) -> int:
        """Tokens of a step, of all replicas."""
        model = self.model
        return model.seq_length * model.micro_batch_size * self.num_micro_batches * self.num_replicas


def read_flags(flags: Sequence[str], num_gpus: int | None = None) -> Training:
    """Read Megatron's flags for ``num_gpus`` (None: one replica), with its defaults, or raise ``UsageError``."""
    known, _ = _parser().parse_known_args(list(flags))
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size"):
        if getattr(known, name) is None:
            raise UsageError(f"--{name.replace('_', '-')} is missing among the training flags behind --.")
    for name, value in vars(known).items():
        if type(value) is int and not 1 <= value <= MOST:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be at least 1 and at most {MOST:g}.")
    if known.bf16 and known.fp16:
        raise UsageError("--bf16 and --fp16 cannot be combined: weights have one type. Drop one of the two.")
    tensor, pipeline, context = (
        known.tensor_model_parallel_size, known.pipeline_model_parallel_size, known.context_parallel_size,
    )  # fmt: skip
    replica = tensor * pipeline * context
    data, instances = (replica if num_gpus is None else num_gpus) // replica, known.num_distributed_optimizer_instances
    if data < 1 or (num_gpus or replica) % replica:
        raise UsageError(f"--num-gpus {num_gpus}: must be a multiple of {replica}, the GPUs of one model replica.")
    if data * context % instances:
        raise UsageError(
            f"--num-distributed-optimizer-instances {instances}: must divide {data * context}, the ranks that share "
            "optimizer state (--num-gpus says how many train)."
        )
    per_round = known.micro_batch_size * data
    batch = known.global_batch_size or per_round
    if batch % per_round:
        raise UsageError(f"--global-batch-size {batch}: must be a multiple of {per_round}, micro-batch x replicas.")
    virtual = known.num_virtual_stages_per_pipeline_rank or 1
    if per_stage := known.num_layers_per_virtual_pipeline_stage:
        _check_multiple(known, "num_layers", pipeline * per_stage, "stages x --num-layers-per-virtual-pipeline-stage")
        virtual = known.num_layers // pipeline // per_stage
    known.virtual_pipeline_model_parallel_size = virtual
    _check_multiple(known, "num_layers", pipeline * virtual, "the chunks of the model on all stages")
    if known.kv_channels is None:
        _check_multiple(known, "hidden_size", known.num_attention_heads, "--num-attention-heads")
    _check_multiple(known, "num_attention_heads", tensor, "--tensor-model-parallel-size")
    if known.group_query_attention:
        _check_multiple(known, "num_attention_heads", known.num_query_groups, "--num-query-groups")
    if known.num_experts is not None:
        _check_multiple(known, "num_experts", known.expert_model_parallel_size, "--expert-model-parallel-size")
    if known.max_position_embeddings is not None and known.max_position_embeddings < known.seq_length:
        raise UsageError(
            f"--max-position-embeddings {known.max_position_embeddings}: must be at least --seq-length "
            f"{known.seq_length}. Megatron refuses less."
        )
    _check_fp8(known)
    facts = MegatronFacts.of(vars(known))
    if known.swap_fp8_weights == DROPPED:
        check_fp8_weights(facts)
    stays = _state_stays(known)
    gradient_bytes = 2 if has_short_gradients(facts) else 4
    fraction = read_fraction(known.swap_optimizer)
    if fraction != "auto" and not 0 <= fraction <= 1:
        raise UsageError(f"--swap-optimizer {fraction:g}: must be a fraction of the state, 0 to 1, or auto.")
    if stays is not None and fraction != 0:
        given = known.swap_optimizer
        raise UsageError(f"--swap-optimizer {given} cannot be combined with {stays}. Drop one of the two.")
    avoids_disk = next((f"{flag} {value}" for flag, value in _types_of_state(known) if value in ("fp8", "fp16")), None)
    if avoids_disk is not None and fraction != 0 and known.swap_disk_dir is not None:
        raise UsageError(
            f"--swap-disk-dir cannot be combined with {avoids_disk}: its scale belongs to a whole parameter, which "
            "does not pass through buffers between disk and device. Drop one of the two."
        )
    states = States(
        gradient_bytes=gradient_bytes, state_bytes=state_bytes_of(facts),
        num_shards=data * context // instances if known.use_distributed_optimizer else 1,
        offload_fraction=1.0 if fraction == "auto" else fraction, is_auto=fraction == "auto",
        weight_bytes=2 if known.bf16 or known.fp16 else 4, has_fp8_weights=known.fp8_param_gather,
        num_fp8_moments=(known.exp_avg_dtype, known.exp_avg_sq_dtype).count("fp8"),
        copied_gradient_bytes=0 if gradient_bytes == 4 or holds_main_params(facts) else 4,
    )  # fmt: skip
    return Training(
        model_of(facts, known.swap_fp8_weights), batch // per_round,
        not known.untie_embeddings_and_output_weights, states,
        _gib("--swap-host-gib", known.swap_host_gib),
        0.0 if known.swap_disk_dir is None else _gib("--swap-disk-gib", known.swap_disk_gib) or math.inf,
        _gib("--swap-memory-gib", known.swap_memory_gib), replica * data, data, _budget_fraction(known),
        known.use_distributed_optimizer, known.max_position_embeddings is not None, stays,
        None if known.swap_loss_chunks is None else read_loss_chunks(known.swap_loss_chunks),
        has_sum_in_loss(facts), known.gradient_accumulation_fusion, avoids_disk,
        known.swap_fp8_weights is None and pipeline == 1 and not why_copies_stay(facts), known.hidden_dropout > 0,
    )  # fmt: skip


def check_known(flags: Sequence[str], options: Collection[str] = ()) -> None:
    """Raise ``UsageError`` for flags that are unknown, lack a value, are plan's own ``options``, or are not covered."""
    if not flags:
        raise UsageError("--gpu needs the flags of the training command, behind -- (--gpu h100 -- --num-layers 24 …).")
    version, flags_with_value, _ = _flags_file()
    for flag, value in zip(flags, [*flags[1:], "--"], strict=True):
        if flag == "--save" and value.endswith(".json"):
            raise UsageError(f"--save {value}: behind -- it is the folder of checkpoints. Give it before the -- .")
        if flag in flags_with_value and value.startswith("--"):
            raise UsageError(f"{flag}: needs a value among the training flags.")
    known, rest = _parser().parse_known_args(list(flags))
    for flag in _names(flags):
        if flag in training_flags():
            continue
        if flag in options:
            raise UsageError(f"{flag}: is an option of plan, not of training. Give it before the -- .")
        near = nearest_flag(flag, sorted(training_flags()), cutoff=0.75)
        hint = f"Did you mean {near}?" if near else "Leave it out."
        raise UsageError(f"{flag}: neither Megatron {version} nor Megatron Swap has this training flag. {hint}")
    for name, default in DECIDED.items():
        if (given := getattr(known, name.replace("-", "_"))) != [default]:
            raise UsageError(f"--{name} {' '.join(given)}: plan chooses what is swapped. Leave --{name} out.")
    if known.optimizer != "adam":
        rest.append(f"--optimizer {known.optimizer}")
    for flag, value in zip(rest, [*rest, "--"][1:], strict=True):
        name = flag[2:].split()[0].split("=")[0] if flag.startswith("--") and flag[2:] else ""
        if name in OF_RECOMPUTATION:
            given = flag if value.startswith("--") else f"{flag} {value}"
            raise UsageError(
                f"{given} is not needed. Leave it out: the table has a row for full recomputation, and the planner "
                "recomputes by itself."
            )
        if name in UNSUPPORTED:
            raise UsageError(
                f"{flag}: its memory and time are not known without a measurement. Leave it out, or measure a profile: "
                "train with --swap-save-profile FILE, then plan with --profile FILE."
            )


def not_counted(flags: Sequence[str]) -> list[str]:
    """Return the flags whose memory ``shape_profile`` does not count, each once, in their order."""
    given = [flag for flag in dict.fromkeys(_names(flags)) if flag[2:] in NOT_COUNTED]
    known = _parser().parse_known_args(list(flags))[0]
    backend, dropout = known.attention_backend, known.hidden_dropout
    valued = {
        f"--attention-backend {backend}": backend in ("unfused", "local"),
        f"--hidden-dropout {dropout:g}": dropout != 0,
    }
    return [*given, *(flag for flag, is_given in valued.items() if is_given)]


def _names(flags: Sequence[str]) -> list[str]:
    return [word.split("=", 1)[0] for word in flags if word.startswith("--")]


def training_flags() -> frozenset[str]:
    """Return the flags that a training command may have: Megatron's and our own, with their hyphens."""
    _, valued, others = _flags_file()
    return valued | others


@functools.cache
def _flags_file() -> tuple[str, frozenset[str], frozenset[str]]:
    """Return Megatron's version, the flags that need a value, and the others."""
    head, valued, others = FLAGS_FILE.read_text().split("\n\n")
    return head.splitlines()[0].split()[-1], frozenset(valued.split()), frozenset(others.split())


def _check_fp8(known: argparse.Namespace) -> None:
    """Refuse FP8 flags that Megatron refuses, and recipes that the formulas do not cover."""
    if known.fp8_param_gather and (known.fp8 is None or not known.use_distributed_optimizer):
        missing = "--fp8-format" if known.fp8 is None else "--use-distributed-optimizer"
        raise UsageError(f"--fp8-param-gather: Megatron needs {missing} beside it.")
    if known.fp8 is None:
        return
    if known.fp8_recipe not in RECIPES:
        raise UsageError(
            f"--fp8-recipe {known.fp8_recipe}: its memory and time are not known without a measurement. Known are "
            f"{', '.join(RECIPES)}; for another one measure a profile: train with --swap-save-profile FILE, then plan "
            "with --profile FILE."
        )
    if known.first_last_layers_bf16 and known.fp8_recipe == "delayed":
        raise UsageError("--first-last-layers-bf16: Megatron refuses it with --fp8-recipe delayed. Drop one of them.")
    for where in ("start", "end"):
        given, most = getattr(known, f"num_layers_at_{where}_in_bf16"), known.num_layers
        if given > most // known.pipeline_model_parallel_size:
            raise UsageError(f"--num-layers-at-{where}-in-bf16 {given}: is more than the layers of a pipeline stage.")


def _state_stays(known: argparse.Namespace) -> str | None:
    """Return a flag with which optimizer state is not offloaded, or None."""
    if not known.use_precision_aware_optimizer:
        for (flag, value), default in zip(_types_of_state(known), OF_STATE.values(), strict=True):
            if value != default:
                raise UsageError(f"{flag} {value}: Megatron needs --use-precision-aware-optimizer beside it.")
        return None
    scaled = [f"{flag} {value}" for flag, value in _types_of_state(known) if value in ("fp8", "fp16")]
    if scaled and known.fp8_recipe not in (None, "delayed") and known.main_params_dtype == "fp32":
        return f"--fp8-recipe {known.fp8_recipe} and {scaled[0]}"
    scales_whole = known.fp8_param_gather and known.fp8_recipe == "delayed"
    return "--fp8-param-gather with --fp8-recipe delayed" if scales_whole else None


def _types_of_state(known: argparse.Namespace) -> list[tuple[str, str]]:
    return [(f"--{name}", getattr(known, name.replace("-", "_"))) for name in OF_STATE]


def _check_multiple(known: argparse.Namespace, name: str, parts: int, what: str) -> None:
    if getattr(known, name) % parts:
        raise UsageError(f"--{name.replace('_', '-')} {getattr(known, name)}: must be a multiple of {parts}, {what}.")


def _gib(flag: str, text: str | None) -> float | None:
    """Return the value of ``flag`` in GiB, or None if it is not given."""
    try:
        given = None if text is None else float(text)
    except ValueError:
        given = math.nan
    if given is not None and not 0 < given <= MOST:
        raise UsageError(f"{flag} {text}: a number is expected, above 0 and at most {MOST:g}.")
    return given


def _budget_fraction(known: argparse.Namespace) -> float | None:
    given = known.swap_memory_fraction
    if given is None:
        return None
    if not 0 < given <= 1:
        raise UsageError(f"--swap-memory-fraction {given:g}: must be above 0 and at most 1, of the GPU's memory.")
    if known.swap_memory_gib is not None:
        both = f"--swap-memory-gib {known.swap_memory_gib} and --swap-memory-fraction {given:g}"
        raise UsageError(f"{both} both say how much memory a step may take. Drop one.")
    return float(given)


class _Parser(CommandLine):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"among the training flags: {message}.")


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "micro-batch-size",
                 "ffn-hidden-size", "global-batch-size", "kv-channels", "num-experts",
                 "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank",
                 "vocab-size", "padded-vocab-size", "max-position-embeddings"):  # fmt: skip
        parser.add_argument(f"--{name}", type=int)
    for name in ("num-query-groups", "tensor-model-parallel-size", "pipeline-model-parallel-size",
                 "context-parallel-size", "expert-model-parallel-size",
                 "num-distributed-optimizer-instances", "mlp-chunks-for-training",
                 "num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16"):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    for name, value in {"transformer-impl": "transformer_engine", "optimizer": "adam", "normalization": "LayerNorm",
                        "fp8-recipe": "delayed", "swap-optimizer": "0"}.items():  # fmt: skip
        parser.add_argument(f"--{name}", default=value)
    for name in ("host-gib", "disk-dir", "disk-gib", "memory-gib", "loss-chunks"):
        parser.add_argument(f"--swap-{name}")
    parser.add_argument("--swap-memory-fraction", type=float)
    parser.add_argument("--swap-fp8-weights", choices=FP8_WEIGHTS)
    parser.add_argument("--attention-backend", default="auto", choices=("flash", "fused", "unfused", "local", "auto"))
    for name, of_training in DECIDED.items():
        parser.add_argument(f"--{name}", nargs="+", default=[of_training])
    parser.add_argument("--hidden-dropout", type=float, default=0.1)
    parser.add_argument("--main-grads-dtype", default="fp32", choices=("fp32", "bf16"))
    for name, default in OF_STATE.items():
        types = ("fp32", "fp16") if name == "main-params-dtype" else ("fp32", "fp16", "bf16", "fp8")
        parser.add_argument(f"--{name}", default=default, choices=types)
    parser.add_argument("--fp8-format", dest="fp8", choices=("e4m3", "hybrid"))
    for name in ("group-query-attention", "swiglu", "bf16", "fp16", "sequence-parallel", "use-distributed-optimizer",
                 "use-precision-aware-optimizer", "untie-embeddings-and-output-weights", "fp8-param-gather",
                 "first-last-layers-bf16", "grad-reduce-in-bf16"):  # fmt: skip
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--no-gradient-accumulation-fusion", dest="gradient_accumulation_fusion", action="store_false")
    return parser
