"""Random cases for Megatron's trainer: a model, a schedule of micro-batches, ways to swap. A seed gives one case."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.swap.common.types import PRODUCERS, QUANTIZED

BASE = (
    "--transformer-impl local --distributed-backend gloo --num-workers 0 --no-gradient-accumulation-fusion "
    "--no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion --no-bias-dropout-fusion "
    "--tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 8 --mock-data "
    "--log-interval 1 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --no-create-attention-mask-in-dataloader "
    "--dataloader-type single --swap-log-level quiet"
)
OURS = "--swap-host-unchecked --swap-log-level quiet"
PLAN, FOLDER, MEMORY, BUDGET = "@PLAN", "@FOLDER", "@MEMORY", "@BUDGET"
"""In flags: the plan file, the folder of the run, and GiB that depend on what the unswapped run takes."""


@dataclass(frozen=True)
class Case:
    """A pair of trainings, or several.

    Attributes:
        model: Megatron's flags, of all runs.
        swaps: flags of each run with swapping.
        plan: what the second run with swapping gets as ``@PLAN``: ``saved``, the plan that the first one has saved;
            ``random``, other actions for the sites of that plan.
        lengths, with_mask, spec: as in ``megatron_training``.
        stop_after: training ends after this step with a checkpoint and is resumed, the swapped one with the flags that
            come next in ``swaps``; 0: it runs through.
    """

    seed: int
    num_ranks: int
    model: str
    swaps: tuple[str, ...]
    plan: str = ""
    lengths: tuple[int, ...] = ()
    with_mask: bool = False
    spec: str = "sdpa"
    stop_after: int = 0
    commit_bytes: int = 0
    """Copies start as soon as so many bytes are pending; a tiny layer never has the product's 16 MiB."""
    scarcity: float = 0.0
    """Fraction of what the unswapped run's autograd holds that ``@MEMORY`` and ``@BUDGET`` lack."""


def megatron_case(seed: int, num_ranks: int = 1) -> Case:
    return _Generator(seed, num_ranks).case()


class _Generator:
    def __init__(self, seed: int, num_ranks: int) -> None:
        self._seed, self._num_ranks = seed, num_ranks
        self._random = random.Random(f"megatron {num_ranks} {seed}")
        self._flags: list[str] = []

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _some(self, choices: Sequence[str]) -> list[str]:
        number = self._random.randint(1, len(choices))
        return sorted(self._random.sample(choices, number), key=choices.index)

    def _add(self, *flags: str) -> None:
        self._flags.append(self._random.choice(flags))

    def _maybe(self, probability: float, *flags: str) -> bool:
        given = self._chance(probability)
        if given:
            self._add(*flags)
        return given

    def case(self) -> Case:
        choose = self._random
        kind = choose.choices(("layers", "plan", "guard", "auto"), (64, 25, 7, 4))[0]
        self._parallel()
        self._shape()
        self._is_mla = self._chance(0.2)
        self._has_experts = self._num_experts > 0 or (self._tensor == 1 and self._chance(0.25))
        self._attention()
        self._mlp()
        self._positions_and_norms()
        self._precision()
        self._optimizer()
        self._recompute(may_be_full=kind in ("layers", "guard"))
        with_mask = self._pipeline == 1 and self._chance(0.08)
        if with_mask:
            self._flags.append("--reset-attention-mask --reset-position-ids --eod-mask-loss")
        lengths: tuple[int, ...] = ()
        if self._pipeline == 1 and not with_mask and self._chance(0.25):
            lengths = tuple(choose.randrange(2, self._seq + 1) for _ in range(choose.randint(2, 5)))
        self._steps(14 if kind == "auto" else choose.randint(2, 4))
        spec = "local" if self._chance(0.005 if self._is_mla else 0.25) else "sdpa"
        stop_after, plan = 0, ""
        if kind == "plan":
            swaps: tuple[str, ...] = (self._saving(), self._by_plan())
            plan = choose.choice(("saved", "random", "random"))
        elif kind == "auto":
            swaps = (self._auto(),)
        elif kind == "guard":
            swaps = (self._guarded(),)
        elif self._chance(0.12) and not self._is_distributed:
            stop_after = choose.randint(1, self._num_steps - 1)
            swaps = (self._by_layers(), self._by_layers())
        else:
            swaps = (self._by_layers(),)
        model = " ".join([BASE, *self._flags])
        commit_bytes = choose.choice([1, 1, 4096, 1 << 24])
        scarcity = round(choose.uniform(0.1, 0.6), 2) if kind in ("guard", "auto") else 0.0
        return Case(
            self._seed, self._num_ranks, model, swaps, plan, lengths, with_mask, spec, stop_after, commit_bytes,
            scarcity,
        )  # fmt: skip

    # ------------------------------------------------------------------ Megatron

    def _parallel(self) -> None:
        """Divide the ranks: tensor, pipeline (interleaved, uneven, by layout), expert and data parallelism."""
        choose, ranks = self._random, self._num_ranks
        self._tensor = choose.choice([1, 1, 2]) if ranks > 1 else 1
        self._pipeline = choose.choice([size for size in (1, 2, 4) if ranks // self._tensor % size == 0])
        self._data = ranks // self._tensor // self._pipeline
        self._num_layers = choose.randint(3, 6) if self._pipeline == 1 else self._pipeline * choose.randint(2, 3)
        self._stages, self._num_experts = self._pipeline, 0
        self._layout: list[str] = []
        self._group = 1  # micro-batches come in groups of so many
        if self._tensor > 1:
            self._flags.append(f"--tensor-model-parallel-size {self._tensor}")
        if self._data > 1 and self._tensor == 1 and self._chance(0.3):
            self._flags.append(f"--expert-model-parallel-size {self._data}")
            self._num_experts = 2 * self._data
        if self._pipeline > 1:
            self._flags.append(f"--pipeline-model-parallel-size {self._pipeline}")
            match choose.choice(("even", "interleaved", "interleaved", "uneven", "layout")):
                case "interleaved":
                    self._num_layers = 2 * self._pipeline * choose.randint(1, 2)
                    self._flags.append("--num-virtual-stages-per-pipeline-rank 2")
                    self._group = self._pipeline
                    self._maybe(0.3 if self._pipeline > 2 else 0.02, "--no-overlap-p2p-communication")
                case "uneven":
                    rest = self._pipeline - 1
                    first = choose.randint(1, 4)
                    self._num_layers = first + rest * choose.randint(1, 3)
                    self._flags.append(f"--decoder-first-pipeline-num-layers {first}")
                case "layout":
                    counts = [choose.randint(1, 3) for _ in range(self._pipeline * choose.choice([1, 2]))]
                    self._num_layers = sum(counts)
                    if len(counts) > self._pipeline:
                        self._group = self._pipeline
                    self._layout = ["t" * count for count in counts]

    def _shape(self) -> None:
        choose = self._random
        self._heads = choose.choice([2, 4])
        width = self._heads * choose.choice([8, 16])
        self._seq = choose.choice([8, 16, 24, 32])
        self._flags.append(
            f"--num-layers {self._num_layers} --hidden-size {width} --num-attention-heads {self._heads} "
            f"--seq-length {self._seq} --max-position-embeddings {self._seq}"
        )
        self._flags.append(f"--ffn-hidden-size {choose.choice([24, 48, 80, 2 * width, 4 * width])}")
        self._maybe(0.1, "--kv-channels 12")

    def _attention(self) -> None:
        has_lora = True
        if self._is_mla:
            self._flags.append(
                "--multi-latent-attention --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --kv-lora-rank 16"
            )
            has_lora = self._maybe(0.6, "--q-lora-rank 16")
            self._maybe(0.5, "--rope-type rope", "--rope-type yarn")
        elif self._heads > self._tensor and self._chance(0.4):
            self._flags.append(f"--group-query-attention --num-query-groups {self._heads // 2}")
        self._maybe(0.25 if has_lora else 0.02, "--qk-layernorm")
        if not self._is_mla:
            self._maybe(0.15, "--add-qkv-bias")
            self._maybe(0.1, "--attention-output-gate")
        self._maybe(0.1, "--attention-softmax-in-fp32")
        self._maybe(0.1, "--apply-residual-connection-post-layernorm")

    def _mlp(self) -> None:
        choose = self._random
        self._is_gated = self._maybe(0.35, "--swiglu")
        if not self._is_gated:
            self._maybe(0.01, "--quick-geglu")
        self._is_fused = self._chance(0.5)
        if not self._is_fused:
            self._flags.append("--no-bias-gelu-fusion --no-bias-swiglu-fusion")
            if not self._is_gated:
                self._maybe(0.2, "--squared-relu")
        self._has_bias = not self._maybe(0.97 if self._has_experts else 0.35, "--disable-bias-linear")
        if self._has_experts:
            number = self._num_experts or choose.choice([2, 4])
            self._flags.append(f"--num-experts {number}")
            self._add("--moe-router-topk 2", "--moe-router-topk 1 --moe-router-pre-softmax")
            is_sparse = self._pipeline == 1 and self._chance(0.3)
            self._flags += ["--moe-layer-freq 2"] if is_sparse else []
            self._add("--moe-token-dispatcher-type alltoall", "--moe-token-dispatcher-type allgather")
            if not self._maybe(0.6, *(f"--moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type {kind}" for kind in (
                    "aux_loss", "aux_loss", "seq_aux_loss", "global_aux_loss"))):  # fmt: skip
                self._add("--moe-router-load-balancing-type sinkhorn", "--moe-router-load-balancing-type none")
            self._maybe(0.2, "--moe-z-loss-coeff 1e-3")
            self._maybe(0.3, "--moe-shared-expert-intermediate-size 24")
            self._maybe(0.2, "--moe-router-score-function sigmoid --moe-router-enable-expert-bias")
            self._maybe(0.2, "--moe-router-dtype fp32")
            if not any("sinkhorn" in flag for flag in self._flags):
                self._maybe(0.25, "--moe-expert-capacity-factor 1.0",
                            "--moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity")  # fmt: skip
        num_mtp = choose.choice([1, 2]) if self._chance(0.01 if self._is_mla else 0.18) else 0
        self._has_mtp = num_mtp > 0
        self._flags += [f"--mtp-num-layers {num_mtp}"] if num_mtp else []
        if self._layout:
            self._layout[0] = f"E{self._layout[0]}"
            self._layout[-1] += "m" * num_mtp + "L"
            self._flags.append(f"--pipeline-model-parallel-layout '{'|'.join(self._layout)}'")

    def _positions_and_norms(self) -> None:
        kind = self._random.choices(("rope", "learned_absolute", "none", "yarn"), (70, 15, 5, 10))[0]
        if self._is_mla or (self._has_mtp and kind not in ("rope", "none")):
            kind = "rope"
        self._flags.append(f"--position-embedding-type {kind}")
        if kind == "rope" and not self._is_mla:
            self._maybe(0.2, "--rotary-percent 0.5", "--rotary-interleaved", "--use-rope-scaling")
        self._maybe(0.4, "--normalization RMSNorm")
        self._maybe(0.5, "--untie-embeddings-and-output-weights")
        self._maybe(0.15, "--mlp-chunks-for-training 2", "--mlp-chunks-for-training 3")
        self._maybe(0.03, "--apply-layernorm-1p", "--use-mup",
                    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2",
                    "--moe-grouped-gemm", "--cross-entropy-loss-fusion")  # fmt: skip
        if self._tensor > 1:
            self._maybe(0.02, "--sequence-parallel")

    def _precision(self) -> None:
        if self._chance(0.5):
            self._add("--bf16", "--bf16", "--fp16 --initial-loss-scale 1024",
                      "--fp16 --initial-loss-scale 4294967296 --loss-scale-window 2")  # fmt: skip
            self._maybe(0.03, "--fp32-residual-connection")
            is_bf16 = "--bf16" in self._flags
            self._maybe(0.2, "--grad-reduce-in-bf16" if is_bf16 else "--accumulate-allreduce-grads-in-fp32")
        for what in ("attention", "hidden"):
            self._flags.append(f"--{what}-dropout {self._random.choice(['0', '0', '0.1', '0.3'])}")
        self._flags.append(f"--seed {self._random.randrange(1, 10000)}")

    def _optimizer(self) -> None:
        self._is_elementwise = True
        self._is_distributed = False
        emerging = 6 if "--bf16" in self._flags else 0.5  # upstream has them for bf16
        weights = (70, 8, *4 * [emerging])
        kind = self._random.choices(("adam", "sgd", "lion", "muon", "soap", "dist_muon"), weights)[0]
        if kind != "adam":
            self._flags.append(f"--optimizer {kind}")
            self._is_elementwise = kind in ("sgd", "lion")
        self._flags.append(f"--clip-grad {self._random.choice(['0', '1.0', '0.1'])}")
        self._maybe(0.2, "--calculate-per-token-loss")
        self._maybe(0.1, "--decoupled-lr 5e-3")
        if kind != "sgd" and self._chance(0.5 if self._data > 1 else 0.15):
            self._is_distributed = True
            self._flags.append("--use-distributed-optimizer")
            if self._data > 1:
                self._maybe(0.4, "--overlap-grad-reduce", "--overlap-grad-reduce --overlap-param-gather")
        elif self._data > 1:
            self._maybe(0.3, "--overlap-grad-reduce")

    def _recompute(self, may_be_full: bool) -> None:
        """Let Megatron recompute. Note which kinds are left for us."""
        kinds = [kind for kind in PRODUCERS if kind != QUANTIZED]  # 8 bits need a GPU
        if self._is_gated and not self._is_fused:
            kinds.remove("activation")
        if self._tensor > 1 or "--hidden-dropout 0" not in self._flags:
            kinds.remove("residual")
        if may_be_full and self._chance(0.2):
            method, number = self._random.choice(("uniform", "block")), self._random.randint(1, 2)
            self._flags.append(
                f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {number}"
            )
            kinds = [] if method == "uniform" else kinds
        elif self._chance(0.15):
            modules = ["core_attn"]
            modules += ["moe", *(["moe_act"] if self._chance(0.1) else [])] if self._has_experts else []
            modules += [] if self._has_bias else ["mlp"]
            modules += ["mla_up_proj"] if self._is_mla else []
            modules += ["layernorm"] if self._chance(0.05) else []
            chosen = self._some(modules)
            self._flags.append(f"--recompute-granularity selective --recompute-modules {' '.join(chosen)}")
            gone = {"layernorm": ("norm", "linear"), "mlp": ("activation", "linear"), "moe": ("activation",),
                    "moe_act": ("activation",)}  # fmt: skip
            kinds = [kind for kind in kinds if not any(kind in gone.get(module, ()) for module in chosen)]
        if "--sequence-parallel" in self._flags and "linear" in kinds:
            kinds.remove("linear")
        self._kinds = kinds

    def _steps(self, num_steps: int) -> None:
        choose = self._random
        self._num_steps = num_steps
        micro = choose.randint(1, 3)
        most = 4 if self._group == 1 else 2
        numbers = sorted(self._group * choose.randint(1, most) for _ in range(2))  # upstream refuses fewer later
        if self._pipeline > 1:
            numbers = [max(number, self._pipeline) for number in numbers]
        sizes = [micro * self._data * number for number in numbers]
        num_samples = num_steps * max(sizes)
        with_evaluation = self._chance(0.3)
        varies = self._chance(0.4) and not (with_evaluation and self._group > 1)  # upstream evaluates with the first
        if sizes[0] != sizes[1] and varies:
            change = sizes[0] * self._seq * max(1, num_steps // 2)
            self._flags.append(f"--step-batch-size-schedule '0:{sizes[0]} {change}:{sizes[1]}'")
        else:
            self._flags.append(f"--global-batch-size {sizes[0]}")
        self._flags.append(f"--micro-batch-size {micro} --train-iters {num_steps} --lr-decay-iters {num_samples}")
        self._flags.append(f"--eval-interval {1 if with_evaluation else 99} --eval-iters {int(with_evaluation)}")

    # ------------------------------------------------------------------ swapping

    def _common(self) -> list[str]:
        choose = self._random
        flags = [OURS, f"--swap-min-mib {choose.choice(['0', '0.0005', '0.001', '0.003'])}"]
        flags.append(f"--swap-cpu-delay-ms {choose.choice(['0', '0.05', '0.2', '0.5'])}")
        if self._chance(0.2):
            flags.append(f"--swap-prefetch-gib {choose.choice(['1e-7', '1e-6', '1e-5', '1e-4'])}")
        if self._chance(0.2):
            flags.append("--swap-verify")
        if self._chance(0.15):
            flags.append(f"--swap-summary {FOLDER}/summary.json")
        return flags

    def _state_and_disk(self) -> list[str]:
        """Return flags of a part of the optimizer's state, and of a disk behind host memory that is too small."""
        has_state, on_disk = self._chance(0.35), self._chance(0.2)
        flags = [f"--swap-optimizer {self._random.choice(['0.3', '0.7', '1', '1'])}"] if has_state else []
        if not on_disk or (has_state and not self._is_elementwise):
            return [*flags, "--swap-host-gib 0.25"]
        return [*flags, f"--swap-disk-dir {FOLDER} --swap-host-gib {'0.04' if has_state else '0.0073'}"]

    def _layers(self) -> str:
        text = self._random.choice(("all", "all", "all", "every:2", "some", "range"))
        numbers = range(self._num_layers)
        if text == "some":
            chosen = sorted(self._random.sample(numbers, self._random.randint(1, self._num_layers)))
            return ",".join(map(str, chosen))
        if text == "range":
            first = self._random.choice(numbers)
            return f"{first}-{self._random.choice(numbers[first:])}"
        return text

    def _by_layers(self) -> str:
        if self._is_elementwise and self._chance(0.06):  # all buckets of the state pass through the disk
            disk = f"--swap-disk-dir {FOLDER} --swap-host-gib 0.008"
            return " ".join([*self._common(), f"--swap-min-mib 0 --swap-optimizer 1 {disk}"])
        flags = self._common() + self._state_and_disk()
        flags.append(f"--swap-layers {self._layers()}")
        if self._chance(0.15):
            modules = ["mlp", "self_attention", "layer", "input_layernorm", "core_attention", "linear_proj"]
            flags.append(f"--swap-modules {' '.join(self._some(modules))}")
        if self._kinds and self._chance(0.35):
            flags.append(f"--swap-recompute {' '.join(self._some(self._kinds))}")
        return " ".join(flags)

    def _saving(self) -> str:
        flags = [*self._common(), "--swap-host-gib 0.25", f"--swap-layers all --swap-save-plan {PLAN}"]
        if self._kinds:
            flags.append(f"--swap-recompute {' '.join(self._some(self._kinds))}")
        return " ".join(flags)

    def _by_plan(self) -> str:
        return " ".join([*self._common(), *self._state_and_disk(), f"--swap-plan {PLAN}"])

    def _guarded(self) -> str:
        flags = [*self._common(), "--swap-host-gib 0.25 --swap-oom-guard --swap-cpu-memory-gib", MEMORY]
        flags.append(f"--swap-layers {self._random.choice(['none', self._layers()])}")
        return " ".join(flags)

    def _auto(self) -> str:
        flags = [*self._common(), "--swap-host-gib 0.25 --swap-memory-gib", BUDGET]
        if self._chance(0.3):
            flags.append("--swap-optimizer auto")
        return " ".join(flags)
