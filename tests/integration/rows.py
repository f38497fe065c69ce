"""The matrix: what trains without and with Megatron Swap and is equal to the bit. A row is a line of a table.

``test_matrix.py`` runs the rows, ``tests/support.py`` reads them for docs/reference/support.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.verify import MOE
from megatron.swap.common.plan import LAYER_SECTION, Plan, PlanClass, SitePlan
from megatron.swap.forecast.flags import read_flags
from tests.integration.harness import WITH_FUSION, arguments

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

ALL = "--swap-layers all"
BOTH = "--swap-recompute norm activation"
KINDS = "--swap-recompute norm activation rotary linear"
EVERY_KIND = f"{KINDS} residual"
WINDOW = f"{ALL} --swap-verify --swap-prefetch-gib 0.00001"
"""A window of one storage."""
ROTARY = f"{ALL} --swap-recompute rotary --swap-verify"
AUTO = "--swap-optimizer auto"
AUTO_AT_ONCE = f"{AUTO} --swap-max-candidates 1"
"""Fewer steps until a plan is chosen."""
ON_DISK = "--swap-disk-dir . --swap-host-gib 0.008"
"""Host memory for the buffers between disk and device alone."""

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
OFFLOADED_OF_MIXED = [0, 1, 2, 3, 4, 6]
WHOLE = (PlanClass("0-7", {}, (LAYER_SECTION,)),)
"""All layers run again whole."""
EVERY_OTHER = (PlanClass("1,3,5", {}, (LAYER_SECTION,)), PlanClass("0,2,4", {NORMS[0]: AGAIN, FC1_OUTPUT: SWAP}))


def plan_for(flags: str, *classes: PlanClass) -> Plan:
    """Return a plan for the tiny model with ``flags``, as ``tools/plan.py`` reads them."""
    return Plan(read_flags(arguments(flags)).model, None, None, None, classes)


@dataclass(frozen=True)
class Row:
    """A training run that is compared with the run without swapping.

    Attributes:
        flags: Megatron's, beside those of the tiny model, which has four layers, with a budget eight.
        swap: ours.
        peak: most that autograd holds at once, as a fraction of what it holds without swapping.
        offloaded: bytes that all ranks offload in the last step, in hidden states.
        expected: keys of the summary and their values.
        plan: the classes of the plan file.
        budget: ``--swap-memory-gib`` as a fraction of what autograd holds without swapping.
        lacks: memory that the device lacks, as a fraction of what autograd holds without swapping.
        may_refuse: a reason for which recomputed sites may be refused.
        least_state: least fraction of the optimizer's state that the plan offloads.
        is_short: the short run has it.
        is_nightly: the nightly run alone has it.
        is_evidence: it counts for docs/reference/support.md.
    """

    flags: str = ""
    swap: str = f"{ALL} --swap-verify"
    ranks: int = 1
    peak: float = 1.0
    offloaded: float | None = None
    expected: Mapping[str, Any] = field(default_factory=dict)
    plan: tuple[PlanClass, ...] = ()
    budget: float = 0.0
    lacks: float = 0.0
    may_refuse: str = ""
    least_state: float = 0.0
    is_short: bool = False
    is_nightly: bool = False
    is_evidence: bool = True

    @property
    def training(self) -> str:
        steps = PLANNING_STATE if "--swap-optimizer" in self.swap else PLANNING
        limit = "--swap-cpu-memory-gib 4" if self.lacks else ""
        shape = f"{DEEP} {steps}" if self.budget else "--num-layers 4"
        return f"{shape} {self.flags} {limit}"

    @property
    def hidden_bytes(self) -> int:
        return HIDDEN_BYTES // 2 if "--bf16" in self.flags or "--fp16" in self.flags else HIDDEN_BYTES

    @property
    def offloads(self) -> bool:
        """Whether layers that are named, or sites of the plan, are offloaded."""
        is_planned = any(SWAP in part.sites.values() for part in self.plan)
        return is_planned or ("--swap-layers" in self.swap and "--swap-layers none" not in self.swap and not self.lacks)

    @property
    def words(self) -> str:
        more = {"--swap-memory-gib 1": self.budget, "--swap-plan plan.json": self.plan, "--swap-oom-guard": self.lacks}
        return " ".join([self.flags, self.swap, *filter(more.get, more)])


def spared(flags: str, kinds: str, hidden_units: float, is_nightly: bool = False) -> Row:
    """Return a row that only recomputes. The bytes follow by formula from four layers and two micro-batches."""
    more = {"recomputed_bytes": 2 * 4 * hidden_units * HIDDEN_BYTES, "swapped_out_bytes": 0}
    swap = f"--swap-layers none --swap-recompute {kinds}"
    return Row(flags, swap, expected=more, is_evidence=False, is_nightly=is_nightly)


RMS_NORM_ON_CPU = "one of its inputs is not saved, and keeping that input instead would save no memory"
"""On the CPU, torch's RMS norm saves another tensor than its bf16 input."""

ROWS: dict[str, Row] = {
    # ------------------------------------------------------------------------------------------ all layers offloaded
    "fp32": Row(DEEP, peak=0.37, offloaded=220.75),
    "bf16-verify": Row("--bf16", is_short=True, peak=0.675, offloaded=72.5),
    "bf16-dropout": Row(f"--bf16 {DROPOUT} {DEEP}", ALL, peak=0.371, offloaded=544),
    "experts": Row(MOE, peak=0.729),
    "fp16": Row("--fp16 --initial-loss-scale 1024", peak=0.675, offloaded=72.5),
    "llama": Row(LLAMA, peak=0.705, offloaded=82.25, is_nightly=True),
    "evaluation": Row(f"{EVALUATION} --train-iters 4", peak=0.708, offloaded=72.25),
    "four-micro-batches": Row("--global-batch-size 8", ALL, is_short=True, peak=0.708, offloaded=144.5),
    "given-mask": Row("--reset-attention-mask --reset-position-ids --eod-mask-loss", peak=0.71, offloaded=76.25),
    # ----------------------------------------------------------------------------------------- some layers, a window
    "some-layers": Row(DEEP, "--swap-layers 0,2-4", peak=0.609, offloaded=146.5),
    # Only the last layer stays.
    "a-small-window": Row(DEEP, "--swap-layers 3-7 --swap-prefetch-gib 0.00001",
        expected={"swapped_layers": [3, 4, 5, 6]}, peak=0.603, offloaded=148.5),
    # The window would reload everything at once. So once the size of a layer is known, nothing is offloaded.
    "a-window-as-wide-as-the-model": Row("", f"{ALL} --swap-prefetch-gib 1", expected={"swapped_out_bytes": 0}),
    "core-attention": Row("", f"{ALL} --swap-modules core_attention", peak=0.851, offloaded=24.25),
    # ------------------------------------------------------------------------------------------------- several ranks
    "dp2-distributed-optimizer": Row("--use-distributed-optimizer --bf16", ranks=2, is_short=True,
        peak=0.674, offloaded=72.5),
    "dp2-overlap-gather": Row(f"{DISTRIBUTED} --bf16", ranks=2, peak=0.674, offloaded=72.5, is_nightly=True),
    "tp2-dropout": Row(f"{TENSOR} --bf16 {DROPOUT}", ranks=2, is_short=True, peak=0.722, offloaded=204),
    "pp2-mlp-chunks": Row(f"{PIPELINE} --bf16 --mlp-chunks-for-training 4", ranks=2, peak=0.392, offloaded=439,
        is_nightly=True),
    "pp2-full": Row(f"{PIPELINE} {FULL} uniform", ranks=2, peak=0.912, offloaded=16.125, is_nightly=True),
    "pp2-mtp": Row(f"{PIPELINE} --mtp-num-layers 1", ranks=2, peak=0.526, offloaded=437.5),
    "pp2-vpp2": Row(INTERLEAVED, ranks=2, is_short=True, peak=0.35, offloaded=437.5),
    "ep2": Row(f"{MOE} --expert-model-parallel-size 2", ranks=2, peak=0.737),
    "tp2-pp2": Row(f"{TENSOR} {PIPELINE} --bf16", f"{ALL} --swap-optimizer 0.5", ranks=4, peak=0.405, offloaded=536,
        is_nightly=True),
    "pp4-vpp2": Row(f"{INTERLEAVED} --pipeline-model-parallel-size 4 --bf16", f"{ALL} --swap-optimizer 0.5", ranks=4,
        peak=0.411, offloaded=497.5, is_nightly=True),
    "ep2-dp2": Row(f"{EXPERTS_DP2} --bf16", f"{ALL} --swap-optimizer 0.5", ranks=4, peak=0.723,
        is_nightly=True),
    # ------------------------------------------------------------------------------------- Megatron's recomputation
    "full": Row(f"{FULL} uniform --bf16 {DROPOUT}", WINDOW, is_short=True, peak=0.617, offloaded=4.5),
    "block-and-sites": Row(
        f"{FULL} block --recompute-num-layers 4 {DEEP}", f"{ALL} {BOTH}",
        expected={"recomputed_bytes": 2 * 4 * 6 * HIDDEN_BYTES}, peak=0.522, offloaded=54.5),
    # Others need TransformerEngine (layernorm) or grouped matrix products on a GPU (moe_act). The local spec's mlp
    # with biases recurses without end upstream: its bias leaves the checkpointed function as it came.
    "selective-attention": Row(f"{SELECTIVE} core_attn {DROPOUT}", ALL, peak=0.715, offloaded=80, is_nightly=True),
    "selective-mlp": Row(f"{SELECTIVE} mlp core_attn --disable-bias-linear --bf16", ALL, peak=0.627, offloaded=40),
    "selective-experts": Row(f"{SELECTIVE} moe {MOE}", ALL, peak=0.68),
    "selective-shared-experts": Row(f"{SELECTIVE} shared_experts {MOE} --moe-shared-expert-intermediate-size 64", ALL,
        peak=0.729, is_nightly=True),
    "selective-mla": Row(f"{SELECTIVE} mla_up_proj {MLA}", ALL, peak=0.732, offloaded=78, is_nightly=True),
    # ------------------------------------------------------------------------------------------------- our own sites
    "sites": Row("", f"{ALL} {EVERY_KIND} --swap-verify", peak=0.313, offloaded=24.25),
    "sites-bf16-dropout": Row(f"--bf16 {DROPOUT} {WITH_FUSION}", f"{ALL} {KINDS} --swap-verify",
        peak=0.605, offloaded=140, is_nightly=True),
    "sites-llama": Row(f"{FUSED_LLAMA} {DEEP}", f"{ALL} {EVERY_KIND} --swap-verify", is_short=True,
        peak=0.162, offloaded=52.75),
    "sites-llama-bf16": Row(f"{FUSED_LLAMA} --bf16", f"{ALL} {BOTH} --swap-verify", ranks=2, may_refuse=RMS_NORM_ON_CPU,
        peak=0.611, offloaded=76.5, is_nightly=True),
    "sites-qk-layernorm": Row("--qk-layernorm", f"{ALL} {EVERY_KIND} --swap-verify", peak=0.318, offloaded=25.25),
    "sites-experts": Row(MOE, f"{ALL} {EVERY_KIND} --swap-verify", peak=0.419),
    "sites-mla": Row(MLA, f"{ALL} {EVERY_KIND} --swap-verify", peak=0.533, offloaded=57.5),
    "sites-mlp-chunks": Row(f"{FUSED_LLAMA} --mlp-chunks-for-training 3", f"{ALL} {BOTH} --swap-verify",
        peak=0.544, offloaded=50.25, is_nightly=True),
    "sites-tp2": Row(f"{NO_BIAS} {TENSOR}", f"{ALL} {KINDS} --swap-verify", ranks=2, peak=0.314, offloaded=20),
    "sites-pp2": Row(f"{NO_BIAS} {PIPELINE}", f"--swap-layers 0-5 {EVERY_KIND} --swap-verify", ranks=2,
        peak=0.139, offloaded=53.5, is_nightly=True),
    "sites-selective": Row(f"{SELECTIVE} core_attn", f"{ALL} {EVERY_KIND} --swap-verify", peak=0.311, offloaded=24,
        is_nightly=True),
    "spared-gelu": spared(WITH_FUSION, "norm activation", 6, is_nightly=True),
    "spared-swiglu": spared(FUSED_LLAMA, "norm activation", 4),  # a gated MLP is 2 x 64 wide here, not 4 x 64
    "spared-fused-residual": spared(f"{FUSED_LLAMA} ^--no-bias-dropout-fusion", "residual", 1),
    "spared-grouped": spared(FUSED_LLAMA, "rotary linear", 1 + 0.5 + 2 + 4, is_nightly=True),  # two heads share keys
    "spared-all": spared(NO_BIAS, "norm activation rotary residual linear", 2 + 2 + 2 + 1 + 3 + 4),
    # ------------------------------------------------------------------------------------------------------- plans
    "plan": Row(f"--bf16 {DROPOUT} {DEEP}", "--swap-verify", plan=MIXED, is_short=True,
        peak=0.839, offloaded=64),
    "plan-tp2": Row(f"{TENSOR} {DEEP}", "--swap-verify", plan=MIXED, ranks=2, peak=0.681, offloaded=56,
        is_nightly=True),
    "plan-pp2": Row(PIPELINE, "--swap-verify", plan=MIXED, ranks=2, peak=0.545, offloaded=112),
    "plan-experts": Row(f"{MOE} {DEEP}", "--swap-verify", plan=(PlanClass("0-7", {FC1_OUTPUT: KEEP, NORMS[0]: AGAIN,
                                                   "self_attention.core_attention/0": SWAP}),), peak=0.955,
        is_nightly=True),
    "whole": Row(DEEP, "", plan=WHOLE, is_short=True, peak=0.092),
    "whole-bf16-dropout": Row(f"--bf16 {DROPOUT} {DEEP}", "", plan=WHOLE, peak=0.042, is_nightly=True),
    "whole-tp2": Row(f"{TENSOR} {DROPOUT} {DEEP}", "", plan=WHOLE, ranks=2, peak=0.082, is_nightly=True),
    "whole-pp2": Row(f"{PIPELINE} {DROPOUT}", "--swap-verify", plan=EVERY_OTHER, ranks=2, peak=0.486, offloaded=48),
    # Scores of three experts are summed in the order of ``topk``, which Megatron lets sort with gradients alone.
    "whole-experts": Row(f"{MOE} --moe-router-topk 3 {DEEP}", "", plan=WHOLE, peak=0.036),
    # --------------------------------------------------- rotary positions: each scaling beside each other flag's values
    "rope-scaled-base-grouped": Row(f"--use-rope-scaling --rotary-base 500000 {GROUPED}", ROTARY,
        peak=0.646, offloaded=60.25),
    # Megatron refuses it interleaved.
    "yarn-half-grouped": Row(f"{YARN} --mscale 0.7 --rotary-percent 0.5 {GROUPED}", ROTARY,
        peak=0.646, offloaded=60.25),
    "interpolated-grouped": Row(f"{INTERPOLATED} --rotary-interleaved {GROUPED}", ROTARY,
        peak=0.646, offloaded=60.25, is_nightly=True),
    # --------------------------------------------------------------------------------------------- the loss in a chunk
    "loss-untied": Row(f"--bf16 --untie-embeddings-and-output-weights {MASKED}", f"{ALL} --swap-loss-chunks 1",
        peak=0.675, offloaded=72.5),
    "loss-tp2": Row(TENSOR, f"{ALL} --swap-loss-chunks 1", ranks=2, peak=0.714, offloaded=88),
    "loss-pp2": Row(f"{PIPELINE} --bf16", f"{ALL} --swap-loss-chunks 1", ranks=2, peak=0.392, offloaded=439,
        is_nightly=True),
    # ----------------------------------------------------------------------------------------------- optimizer state
    "state": Row(PLANNING_STATE, "--swap-optimizer 1"),
    "half-of-the-state": Row(f"{BF16} {PLANNING_STATE}", "--swap-optimizer 0.5", is_nightly=True),
    "state-of-skipped-steps": Row(SKIPS_STEPS, "--swap-optimizer 1", is_nightly=True),
    "state-and-layers": Row(f"{BF16} {DEEP}", f"{ALL} --swap-optimizer 0.7", is_short=True,
        peak=0.362, offloaded=245.5),
    "state-on-disk": Row(f"{BF16} {PLANNING_STATE}", f"--swap-optimizer 1 --swap-min-mib 0 {ON_DISK}"),
    "state-on-disk-dp2": Row(f"{BF16} {DISTRIBUTED} {PLANNING_STATE}", f"--swap-optimizer 1 --swap-min-mib 0 {ON_DISK}",
                             ranks=2, is_nightly=True),
    **{f"state-of-{name}": Row(f"{BF16} --optimizer {name}", "--swap-optimizer 1", is_nightly=name in ("lion", "soap"))
       for name in ("sgd", "lion", "muon", "soap")},
    "state-without-clipping": Row(f"{BF16} --clip-grad 0", "--swap-optimizer 1", is_nightly=True),
    "state-of-muon-dp2": Row(f"{BF16} --optimizer muon {DISTRIBUTED}", "--swap-optimizer 1", ranks=2, is_nightly=True),
    "state-of-dist-muon": Row(f"{BF16} --optimizer dist_muon", "--swap-optimizer 1", ranks=2, is_nightly=True),
    "state-dp2-distributed": Row(f"{BF16} {DISTRIBUTED} {PLANNING_STATE}", "--swap-optimizer 1", ranks=2,
        is_nightly=True),
    # ------------------------------------------------------------------------------------------------------- budgets
    "budget": Row("", "", budget=0.8, is_nightly=True),
    "budget-llama": Row(FUSED_LLAMA, "", budget=0.6, is_short=True),
    "budget-mlp-chunks": Row(f"{FUSED_LLAMA} --mlp-chunks-for-training 4", "", budget=0.6, is_nightly=True),
    "budget-experts": Row(MOE, "", budget=0.75, is_nightly=True),
    "budget-mla": Row(MLA, "", budget=0.75, is_nightly=True),
    "budget-fp16": Row("--fp16 --initial-loss-scale 1024", "", budget=0.75, is_nightly=True),
    "budget-selective": Row(f"{SELECTIVE} core_attn", "", budget=0.75, is_nightly=True),
    "budget-selective-mlp": Row(f"{SELECTIVE} mlp --disable-bias-linear", "", budget=0.75, is_nightly=True),
    "budget-selective-experts": Row(f"{MOE} {SELECTIVE} moe", "", budget=0.75, is_nightly=True),
    "budget-dp2": Row("", "", budget=0.7, ranks=2, is_nightly=True),
    "budget-tp2": Row(TENSOR, "", budget=0.7, ranks=2, is_nightly=True),
    "budget-pp2-vpp": Row(f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 2", "", budget=0.7, ranks=2),
    "budget-layout": Row(f"{PIPELINE} --pipeline-model-parallel-layout 'Et*8|mL' --mtp-num-layers 1", "", budget=0.7,
        ranks=2, is_nightly=True),
    "budget-layout-in-chunks": Row(f"{PIPELINE} --pipeline-model-parallel-layout 'Et*3|t*3|t*2|L'", "", budget=0.7,
        ranks=2, is_nightly=True),
    "budget-and-state-dp2": Row(f"{BF16} {DISTRIBUTED}", AUTO, budget=0.3, least_state=0.5, ranks=2),
    "budget-tp2-pp2": Row(f"{TENSOR} {PIPELINE} --bf16", AUTO_AT_ONCE, budget=0.45, ranks=4, is_nightly=True),
    "budget-pp4-vpp2": Row(f"{INTERLEAVED} --pipeline-model-parallel-size 4 --bf16", AUTO_AT_ONCE,
                           budget=0.225, ranks=4, is_nightly=True),
    "budget-ep2-dp2": Row(f"{EXPERTS_DP2} --bf16", AUTO_AT_ONCE, budget=0.225, ranks=4, is_nightly=True),
    # ----------------------------------------------------------------------------------------------------- the guard
    "guard-bf16-dropout": Row(f"--bf16 {DROPOUT}", "--swap-layers none", lacks=0.5),
    "guard-llama": Row(LLAMA, "--swap-layers 1-2 --swap-recompute norm", lacks=0.5, is_short=True),
    "guard-experts": Row(MOE, "--swap-layers none", lacks=0.5, is_nightly=True),
    "guard-pp2": Row(PIPELINE, "--swap-layers none", lacks=0.5, ranks=2),
    "guard-tp2": Row(TENSOR, "--swap-layers 0", lacks=0.5, ranks=2, is_nightly=True),
}  # fmt: skip

PACKED = "--dataloader-inter-document-masking"
VPP = f"{INTERLEAVED} --micro-batch-size 1"
OF_DOCUMENTS = {
    "all-kinds": (FUSED_LLAMA, f"{ALL} {EVERY_KIND} --swap-verify", 1),
    "pp2-vpp2": (VPP, f"{ALL} {EVERY_KIND}", 2),  # two of four stages read no tokens
    "full": (f"{FULL} uniform", ALL, 1),
}
"""Runs of ``test_packed.py``, with packed documents: flags of Megatron, ours, and ranks."""
WITH_HOOKS = (
    ("--overlap-grad-reduce", 1), ("--overlap-grad-reduce --use-distributed-optimizer --global-batch-size 8", 2),
)  # fmt: skip
"""Runs of ``test_gradient_fusion.py``: flags of Megatron, and ranks."""
FUSED_SWAPS = (ALL, f"--swap-layers 0-3 {KINDS}")
ALSO_COMPARED = (
    *((f"{flags} {swap} {PACKED}", ranks) for flags, swap, ranks in OF_DOCUMENTS.values()),
    (f"{PACKED} --swap-memory-gib 1", 1),
    *((f"--bf16 {flags} {swap}", ranks) for flags, ranks in WITH_HOOKS for swap in FUSED_SWAPS),
)
"""Tests beside the matrix that count for docs/reference/support.md: flags and ranks."""
UPSTREAM_CANNOT = (
    ("--tensor-model-parallel-size 2 --sequence-parallel", 2, "sequence parallel not supported by torch LayerNorm"),
    ("--context-parallel-size 2", 2, "the local spec's attention does not support it"),
    (f"{SELECTIVE} layernorm", 1, "FP8GlobalStateManager"),
)
"""Flags of Megatron that need TransformerEngine, swapping or not: ranks, and what it says."""
