"""The matrix: what trains without and with Megatron Swap and is equal to the bit. A row is a line of a table.

``test_matrix.py`` runs the rows, ``tests/support.py`` reads them for docs/reference/support.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.verify import MOE
from megatron.swap.common.plan import LAYER_SECTION, Plan, PlanClass, SitePlan
from megatron.swap.forecast.flags import read_flags
from tests.integration.harness import WITH_FUSION, arguments

# ------------------------------------------------------------------------------------------------ flags of Megatron

LLAMA = (
    "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)
FUSED_LLAMA = f"{WITH_FUSION} {LLAMA}"
NO_BIAS = f"{WITH_FUSION} --disable-bias-linear --swiglu"
"""Flags without biases. Then, or with fused biases, the activation saves the output of linear_fc1 itself."""
MLA = (
    "--multi-latent-attention --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --kv-lora-rank 16 "
    "--q-lora-rank 16"
)
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
EVALUATION = "--eval-interval 2 --eval-iters 1"
FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
TENSOR = "--tensor-model-parallel-size 2"
PIPELINE = "--num-layers 8 --pipeline-model-parallel-size 2 --global-batch-size 8"
EXPERTS_DP2 = f"{MOE} --expert-model-parallel-size 2 --global-batch-size 8 --use-distributed-optimizer"
INTERLEAVED = f"{PIPELINE} --num-virtual-stages-per-pipeline-rank 2"
BF16 = "--bf16 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights"
DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
SKIPS_STEPS = "--fp16 --initial-loss-scale 4294967296 --loss-scale-window 4 --train-iters 30 --lr-decay-iters 30"
"""Loss scales fall until steps are taken, and rise until one is skipped again."""
MASKED = "--calculate-per-token-loss --reset-position-ids --eod-mask-loss"
GROUPED = "--group-query-attention --num-query-groups 2"
YARN = "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16"
INTERPOLATED = "--rotary-seq-len-interpolation-factor 2"
PLANNING = "--train-iters 14 --lr-decay-iters 14"
"""Enough steps for a plan."""
PLANNING_STATE = "--train-iters 16 --lr-decay-iters 16"
"""Enough steps for a plan with optimizer state."""
DEEP = "--num-layers 8"

# --------------------------------------------------------------------------------------------------- flags of ours

ALL = "--swap-layers all"
BOTH = "--swap-recompute norm activation"
KINDS = "--swap-recompute norm activation rotary linear"
EVERY_KIND = f"{KINDS} residual"
ROTARY = f"{ALL} --swap-recompute rotary"
ON_DISK = "--swap-disk-dir . --swap-host-gib 0.008"
"""Host memory for the buffers between disk and device alone."""

# ----------------------------------------------------------------------------------------------------------- plans

HIDDEN_BYTES = 64 * 2 * 64 * 4
"""Bytes of hidden states: sequence 64, micro-batch 2, width 64, fp32."""
ANGLES_BYTES = 64 * 16 * 4
"""Bytes of the rotary angles: sequence 64, 16 channels a head, fp32."""
NORMS = ("self_attention.linear_qkv/0", "mlp.linear_fc1/0")
FC1_OUTPUT, ACTIVATION_OUTPUT = "mlp/0", "mlp.linear_fc2/0"
SWAP, AGAIN, KEEP = SitePlan("swap"), SitePlan("recompute"), SitePlan("keep")
MIXED = (
    PlanClass("0-3", {**dict.fromkeys(NORMS, AGAIN), FC1_OUTPUT: SWAP, ACTIVATION_OUTPUT: AGAIN,
                      "self_attention.core_attention/0": KEEP, "self_attention.core_attention/1": SWAP}),
    PlanClass("4,6", {ACTIVATION_OUTPUT: SWAP}),
    PlanClass("5", {NORMS[0]: AGAIN}),
)  # fmt: skip
WHOLE = (PlanClass("0-7", {}, (LAYER_SECTION,)),)
"""All layers run again whole."""
EVERY_OTHER = (PlanClass("1,3,5", {}, (LAYER_SECTION,)), PlanClass("0,2,4", {NORMS[0]: AGAIN, FC1_OUTPUT: SWAP}))


def plan_for(flags: str, *classes: PlanClass) -> Plan:
    """Return a plan for the tiny model with ``flags``, as ``tools/plan.py`` reads them."""
    return Plan(read_flags(arguments(flags)).model, None, None, None, classes)


# ------------------------------------------------------------------------------------------------------------ rows


@dataclass(frozen=True)
class Row:
    """A training run that is compared with the run without swapping.

    Attributes:
        flags: Megatron's, beside those of the tiny model, which has four layers, with a budget eight.
        swap: ours.
        peak: most that autograd holds at once, as a fraction of what it holds without swapping.
        expected: keys of the summary and their values.
        plan: the classes of the plan file.
        budget: ``--swap-memory-gib`` as a fraction of what autograd holds without swapping.
        lacks: memory that the device lacks, as a fraction of what autograd holds without swapping.
        may_refuse: a reason for which recomputed sites may be refused.
        is_short: the short run has it.
        is_nightly: the nightly run alone has it.
        is_evidence: it counts for docs/reference/support.md.
    """

    flags: str = ""
    swap: str = f"{ALL} --swap-verify"
    ranks: int = 1
    peak: float = 1.0
    expected: Mapping[str, Any] = field(default_factory=dict)
    plan: tuple[PlanClass, ...] = ()
    budget: float = 0.0
    lacks: float = 0.0
    may_refuse: str = ""
    is_short: bool = False
    is_nightly: bool = False
    is_evidence: bool = True

    @property
    def training(self) -> str:
        """All flags of the run without swapping."""
        steps = PLANNING_STATE if "--swap-optimizer" in self.swap else PLANNING
        limit = "--swap-cpu-memory-gib 4" if self.lacks else ""
        shape = f"{DEEP} {steps}" if self.budget else "--num-layers 4"
        return f"{shape} {self.flags} {limit}"

    @property
    def words(self) -> str:
        """The flags that it is evidence for."""
        more = {"--swap-memory-gib 1": self.budget, "--swap-plan plan.json": self.plan, "--swap-oom-guard": self.lacks}
        return " ".join([self.flags, self.swap, *filter(more.get, more)])


def layers(swap: str, *numbers: int) -> Row:
    return Row(DEEP, f"--swap-layers {swap}", expected={"swapped_layers": list(numbers)})


def spared(flags: str, kinds: str, hidden_units: float) -> Row:
    """Return a row that only recomputes. The bytes follow by formula from four layers and two micro-batches."""
    more = {"recomputed_bytes": 2 * 4 * hidden_units * HIDDEN_BYTES, "swapped_out_bytes": 0}
    return Row(flags, f"--swap-layers none --swap-recompute {kinds}", expected=more, is_evidence=False)


RMS_NORM_ON_CPU = "one of its inputs is not saved, and keeping that input instead would save no memory"
"""On the CPU, torch's RMS norm saves another tensor than its bf16 input."""

ROWS: dict[str, Row] = {
    # ------------------------------------------------------------------------------------------ all layers offloaded
    "fp32": Row(DEEP, peak=0.5, is_short=True),
    "bf16-verify": Row("--bf16", is_short=True),
    "bf16-dropout": Row(f"--bf16 {DROPOUT} {DEEP}", ALL, peak=0.5, is_short=True),
    "experts": Row(MOE, is_short=True),
    "mla": Row(MLA),
    "mtp": Row("--mtp-num-layers 1"),
    "fp16": Row("--fp16 --initial-loss-scale 1024"),
    "llama": Row(LLAMA, is_short=True),
    "llama-bf16": Row(f"{LLAMA} --bf16 {DEEP}", ALL, peak=0.5),
    "evaluation": Row(f"{EVALUATION} --train-iters 4"),
    "four-micro-batches": Row("--global-batch-size 8", ALL, is_short=True),
    "given-mask": Row("--reset-attention-mask --reset-position-ids --eod-mask-loss"),
    # ----------------------------------------------------------------------------------------- some layers, a window
    "some-layers": layers("0,2-4", 0, 2, 3, 4),
    "every-third": layers("every:3", 0, 3, 6),
    "a-small-window": layers("3-7 --swap-prefetch-gib 0.00001", 3, 4, 5, 6),  # only the last layer stays
    "large-storages": layers("all --swap-min-mib 0.1", 0, 1, 2, 3, 4, 5),  # the window is one layer
    # The window would reload everything at once. So once the size of a layer is known, nothing is offloaded.
    "a-window-as-wide-as-the-model": Row("", f"{ALL} --swap-prefetch-gib 1", expected={"swapped_out_bytes": 0}),
    "linear-inputs": Row("", f"{ALL} --swap-modules mlp.linear_fc1 self_attention.linear_qkv"),
    "core-attention": Row("", f"{ALL} --swap-modules core_attention"),
    "layer-inputs": Row("", f"{ALL} --swap-modules layer input_layernorm"),
    # ------------------------------------------------------------------------------------------------- several ranks
    "dp2-overlap": Row("--bf16 --overlap-grad-reduce --global-batch-size 8", ranks=2),
    "dp2-distributed-optimizer": Row("--use-distributed-optimizer --bf16", ranks=2, is_short=True),
    "dp2-overlap-gather": Row(f"{DISTRIBUTED} --bf16", ranks=2),
    "tp2-dropout": Row(f"{TENSOR} --bf16 {DROPOUT}", ranks=2, is_short=True),
    "tp2-mlp-chunks": Row(f"{TENSOR} --mlp-chunks-for-training 4", ranks=2),
    "pp2-mlp-chunks": Row(f"{PIPELINE} --bf16 --mlp-chunks-for-training 4", ranks=2),
    "pp2-full": Row(f"{PIPELINE} {FULL} uniform", ranks=2),
    "pp2-mtp": Row(f"{PIPELINE} --mtp-num-layers 1", ranks=2),
    "pp2-vpp2": Row(INTERLEAVED, ranks=2, is_short=True),
    "pp2-vpp2-evaluation": Row(f"{INTERLEAVED} --bf16 {EVALUATION}", ranks=2),
    "ep2": Row(f"{MOE} --expert-model-parallel-size 2", ranks=2),
    "tp2-pp2": Row(f"{TENSOR} {PIPELINE} --bf16", f"{ALL} --swap-optimizer 0.5", ranks=4),
    "pp4-vpp2": Row(f"{INTERLEAVED} --pipeline-model-parallel-size 4 --bf16", f"{ALL} --swap-optimizer 0.5", ranks=4),
    "ep2-dp2": Row(
        f"{EXPERTS_DP2} --bf16",
        f"{ALL} --swap-optimizer 0.5", ranks=4,
    ),
    # ------------------------------------------------------------------------------------- Megatron's recomputation
    "full": Row(f"{FULL} uniform --bf16 {DROPOUT}", f"{ALL} --swap-prefetch-gib 0.00001", is_short=True),
    "full-four": Row(f"{FULL} uniform --recompute-num-layers 4 --num-layers 16", f"{ALL} --swap-prefetch-gib 0.00001"),
    "full-experts": Row(f"{FULL} uniform {MOE}", f"{ALL} --swap-prefetch-gib 0.00001"),
    "block": Row(f"{FULL} block --recompute-num-layers 4 {DEEP}", ALL),
    "block-and-sites": Row(
        f"{FULL} block --recompute-num-layers 4 {DEEP}", f"{ALL} {BOTH}",
        expected={"recomputed_bytes": 2 * 4 * 6 * HIDDEN_BYTES},
    ),
    # Others need TransformerEngine (layernorm) or grouped matrix products on a GPU (moe_act). The local spec's mlp
    # with biases recurses without end upstream: its bias leaves the checkpointed function as it came.
    "selective-attention": Row(f"{SELECTIVE} core_attn {DROPOUT}", ALL, is_short=True),
    "selective-mlp": Row(f"{SELECTIVE} mlp core_attn --disable-bias-linear --bf16", ALL),
    "selective-experts": Row(f"{SELECTIVE} moe {MOE}", ALL),
    "selective-shared-experts": Row(f"{SELECTIVE} shared_experts {MOE} --moe-shared-expert-intermediate-size 64", ALL),
    "selective-mla": Row(f"{SELECTIVE} mla_up_proj {MLA}", ALL),
    # ------------------------------------------------------------------------------------------------- our own sites
    "sites": Row("", f"{ALL} {EVERY_KIND}"),
    "sites-bf16-dropout": Row(f"--bf16 {DROPOUT} {WITH_FUSION}", f"{ALL} {KINDS} --swap-verify"),
    "sites-gelu": Row(WITH_FUSION, f"{ALL} {BOTH}"),
    "sites-llama": Row(f"{FUSED_LLAMA} {DEEP}", f"{ALL} {EVERY_KIND} --swap-verify", is_short=True),
    "sites-llama-bf16": Row(f"{FUSED_LLAMA} --bf16", f"{ALL} {BOTH}", ranks=2, may_refuse=RMS_NORM_ON_CPU),
    "sites-half-rotary": Row(f"{NO_BIAS} --rotary-percent 0.5 --rotary-interleaved", f"--swap-layers 0-1 {EVERY_KIND}"),
    "sites-qk-layernorm": Row("--qk-layernorm", f"{ALL} {EVERY_KIND}"),
    "sites-experts": Row(MOE, f"{ALL} {EVERY_KIND}"),
    "sites-mla": Row(MLA, f"{ALL} {EVERY_KIND}"),
    "sites-mlp-chunks": Row(f"{FUSED_LLAMA} --mlp-chunks-for-training 3", f"{ALL} {BOTH}"),
    "sites-tp2": Row(f"{NO_BIAS} {TENSOR}", f"{ALL} {KINDS} --swap-verify", ranks=2),
    "sites-pp2": Row(f"{NO_BIAS} {PIPELINE}", f"--swap-layers 0-5 {EVERY_KIND}", ranks=2),
    "sites-selective": Row(f"{SELECTIVE} core_attn", f"{ALL} {EVERY_KIND}"),
    "spared-norm": spared("", "norm", 2),
    "spared-activation": spared("", "activation", 4),
    "spared-gelu": spared(WITH_FUSION, "norm activation", 6),
    "spared-swiglu": spared(FUSED_LLAMA, "norm activation", 4),  # a gated MLP is 2 x 64 wide here, not 4 x 64
    "spared-residual": spared("", "residual", 1),
    "spared-fused-residual": spared(f"{FUSED_LLAMA} ^--no-bias-dropout-fusion", "residual", 1),
    "spared-rotary": spared("", "rotary", 2),  # queries and keys; linear_qkv's output is there for the values
    "spared-linear": spared("", "linear", 3),  # with biases the activation saves a sum that no linear layer made
    "spared-rotary-linear": spared(NO_BIAS, "rotary linear", 2 + 3 + 4),
    "spared-grouped": spared(FUSED_LLAMA, "rotary linear", 1 + 0.5 + 2 + 4),  # two heads share keys and values
    "spared-all": spared(NO_BIAS, "norm activation rotary residual linear", 2 + 2 + 2 + 1 + 3 + 4),
    # ------------------------------------------------------------------------------------------------------- plans
    "plan": Row(f"--bf16 {DROPOUT} {DEEP}", "--swap-verify", plan=MIXED, is_short=True,
                expected={"swapped_layers": [0, 1, 2, 3, 4, 6]}),
    "plan-llama": Row(f"{FUSED_LLAMA} {DEEP}", "", plan=MIXED),
    "plan-tp2": Row(f"{TENSOR} {DEEP}", "", plan=MIXED, ranks=2),
    "plan-pp2": Row(PIPELINE, "", plan=MIXED, ranks=2),
    "plan-experts": Row(f"{MOE} {DEEP}", "", plan=(PlanClass("0-7", {FC1_OUTPUT: KEEP, NORMS[0]: AGAIN,
                                                   "self_attention.core_attention/0": SWAP}),)),
    "whole": Row(DEEP, "", plan=WHOLE, peak=0.5, expected={"swapped_out_bytes": 0}, is_short=True),
    "whole-bf16-dropout": Row(f"--bf16 {DROPOUT} {DEEP}", "", plan=WHOLE, peak=0.5),
    "whole-tp2": Row(f"{TENSOR} {DROPOUT} {DEEP}", "", plan=WHOLE, ranks=2, peak=0.5),
    "whole-pp2": Row(f"{PIPELINE} {DROPOUT}", "", plan=EVERY_OTHER, ranks=2),
    # Scores of three experts are summed in the order of ``topk``, which Megatron lets sort with gradients alone.
    "whole-experts": Row(f"{MOE} --moe-router-topk 3 {DEEP}", "", plan=WHOLE, peak=0.5),
    "whole-every-other": Row(f"{FUSED_LLAMA} {DEEP}", "--swap-verify", plan=EVERY_OTHER),
    # --------------------------------------------------- rotary positions: each scaling beside each other flag's values
    "rope-scaled-base-grouped": Row(f"--use-rope-scaling --rotary-base 500000 {GROUPED}", ROTARY),
    "rope-scaled-half": Row("--use-rope-scaling --rotary-percent 0.5 --rotary-interleaved", ROTARY),
    "yarn-base": Row(f"{YARN} --rotary-base 500000", ROTARY),  # Megatron refuses it interleaved
    "yarn-half-grouped": Row(f"{YARN} --mscale 0.7 --rotary-percent 0.5 {GROUPED}", ROTARY),
    "interpolated-base": Row(f"{INTERPOLATED} --rotary-base 500000 --rotary-percent 0.5", ROTARY),
    "interpolated-grouped": Row(f"{INTERPOLATED} --rotary-interleaved {GROUPED}", ROTARY),
    # --------------------------------------------------------------------------------------------- the loss in a chunk
    "loss-untied": Row(f"--bf16 --untie-embeddings-and-output-weights {MASKED}", f"{ALL} --swap-loss-chunks 1"),
    "loss-mtp": Row("--mtp-num-layers 1", f"{ALL} --swap-loss-chunks 1"),
    "loss-tp2": Row(TENSOR, f"{ALL} --swap-loss-chunks 1", ranks=2, is_short=True),
    "loss-pp2": Row(f"{PIPELINE} --bf16", f"{ALL} --swap-loss-chunks 1", ranks=2),
    # ----------------------------------------------------------------------------------------------- optimizer state
    "state": Row(PLANNING_STATE, "--swap-optimizer 1"),
    "half-of-the-state": Row(f"{BF16} {PLANNING_STATE}", "--swap-optimizer 0.5"),
    "state-of-skipped-steps": Row(SKIPS_STEPS, "--swap-optimizer 1"),
    "state-and-layers": Row(f"{BF16} {DEEP}", f"{ALL} --swap-optimizer 0.7", is_short=True),
    "state-on-disk": Row(f"{BF16} --train-iters 8", f"--swap-optimizer 1 --swap-min-mib 0 {ON_DISK}", is_short=True),
    "state-on-disk-dp2": Row(f"{BF16} {DISTRIBUTED} --train-iters 8", f"--swap-optimizer 1 --swap-min-mib 0 {ON_DISK}",
                             ranks=2),
    **{f"state-of-{name}": Row(f"{BF16} --optimizer {name}", "--swap-optimizer 1", is_short=name == "muon")
       for name in ("sgd", "lion", "muon", "soap")},
    "state-without-clipping": Row(f"{BF16} --clip-grad 0", "--swap-optimizer 1"),
    "state-of-muon-tp2": Row(f"{BF16} --optimizer muon {TENSOR}", "--swap-optimizer 1", ranks=2),
    "state-of-muon-dp2": Row(f"{BF16} --optimizer muon {DISTRIBUTED}", "--swap-optimizer 1", ranks=2),
    "state-of-dist-muon": Row(f"{BF16} --optimizer dist_muon", "--swap-optimizer 1", ranks=2),
    "state-dp2": Row(BF16, "--swap-optimizer 1", ranks=2),
    "state-dp2-distributed": Row(f"{BF16} {DISTRIBUTED}", "--swap-optimizer 1", ranks=2),
    "state-dp2-distributed-fp32": Row(DISTRIBUTED, "--swap-optimizer 1", ranks=2),
    # ------------------------------------------------------------------------------------------------------- budgets
    "budget": Row("", "", budget=0.8),
    "budget-bf16-dropout": Row(f"--bf16 {DROPOUT} {DEEP}", "", budget=0.6),
    "budget-llama": Row(FUSED_LLAMA, "", budget=0.6, is_short=True),
    "budget-mlp-chunks": Row(f"{FUSED_LLAMA} --mlp-chunks-for-training 4", "", budget=0.6),
    "budget-experts": Row(MOE, "", budget=0.75),
    "budget-mla": Row(MLA, "", budget=0.75),
    "budget-mtp": Row("--mtp-num-layers 1", "", budget=0.75),
    "budget-fp16": Row("--fp16 --initial-loss-scale 1024", "", budget=0.75),
    "budget-selective": Row(f"{SELECTIVE} core_attn", "", budget=0.75),
    "budget-selective-mlp": Row(f"{SELECTIVE} mlp --disable-bias-linear", "", budget=0.75, is_nightly=True),
    "budget-selective-experts": Row(f"{MOE} {SELECTIVE} moe", "", budget=0.75, is_nightly=True),
    "budget-dp2": Row("", "", budget=0.7, ranks=2),
    "budget-tp2": Row(TENSOR, "", budget=0.7, ranks=2),
    "budget-pp2": Row(PIPELINE, "", budget=0.7, ranks=2, is_nightly=True),
    "budget-pp2-vpp": Row(f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 2", "", budget=0.7, ranks=2),
    **{f"budget-{layout}": Row(f"{PIPELINE} --pipeline-model-parallel-layout '{layout}' {more}", "", budget=0.7,
                               ranks=2, is_nightly="8" in layout and not more)
       for layout, more in (("Et*8|L", ""), ("E|t*8L", ""), ("Et*8|mL", "--mtp-num-layers 1"), ("Et*3|t*3|t*2|L", ""))},
    "budget-and-state": Row(BF16, "--swap-optimizer auto", budget=0.3),
    "budget-and-state-dp2": Row(f"{BF16} {DISTRIBUTED}", "--swap-optimizer auto", budget=0.3, ranks=2),
    "budget-tp2-pp2": Row(f"{TENSOR} {PIPELINE} --bf16", "--swap-optimizer auto", budget=0.45, ranks=4),
    "budget-pp4-vpp2": Row(f"{INTERLEAVED} --pipeline-model-parallel-size 4 --bf16", "--swap-optimizer auto",
                           budget=0.225, ranks=4, is_nightly=True),
    "budget-ep2-dp2": Row(f"{EXPERTS_DP2} --bf16",
                          "--swap-optimizer auto", budget=0.225, ranks=4, is_nightly=True),
    # ----------------------------------------------------------------------------------------------------- the guard
    "guard": Row("", "--swap-layers none --swap-verify", lacks=0.5),
    "guard-bf16-dropout": Row(f"--bf16 {DROPOUT}", "--swap-layers none", lacks=0.5),
    "guard-llama": Row(LLAMA, "--swap-layers 1-2 --swap-recompute norm", lacks=0.5, is_short=True),
    "guard-experts": Row(MOE, "--swap-layers none", lacks=0.5),
    "guard-pp2": Row(PIPELINE, "--swap-layers none", lacks=0.5, ranks=2),
    "guard-tp2": Row(TENSOR, "--swap-layers 0", lacks=0.5, ranks=2),
}  # fmt: skip
