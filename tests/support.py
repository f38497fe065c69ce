"""The support matrix: what has been tested together, read from tests, result files and the refusals in the code.

Rows of ``tests/integration/rows.py`` train with and without swapping and are compared to the bit. On a GPU every
committed result row says what ran. No cell is typed by hand.
"""

import argparse
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.training.arguments import add_megatron_arguments

from benchmarks.report.tables import equal_to_plain
from benchmarks.rows import COMPLETE, read_rows
from megatron.swap.common.flags import add_swap_flags
from megatron.swap.common.types import PRODUCERS, QUANTIZED, UsageError
from megatron.swap.patches.registry import BUILT_ONLY, VERSIONS
from megatron.swap.trainer.command_line import swap_config
from tests.integration.harness import arguments
from tests.integration.rows import ALSO_COMPARED, ROWS, UPSTREAM_CANNOT

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
MEGATRON = (*BUILT_ONLY, *VERSIONS["megatron-core"])
Flags = Mapping[str, list[str]]

CPU, GPU, RAN = "CPU", "GPU", "ran"
"""Equal to the bit on the CPU's emulation; on a GPU; trained on a GPU, not compared or not with equal kernels."""
CANNOT = "needs TE"


@dataclass(frozen=True)
class Run:
    flags: Flags
    ranks: int
    shows: str

    def number(self, *names: str) -> int:
        """The value of the first of these flags that is given; 1 if none is."""
        return next((int(self.flags[name][0]) for name in names if name in self.flags), 1)

    @property
    def data_parallel(self) -> int:
        sizes = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
        size = self.ranks
        for name in sizes:
            size //= self.number(name)
        return size


def parsed(words: list[str]) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, *rest = word.split("=", 1)
            flags[name] = values = rest
        else:
            values.append(word)
    return flags


def has(flag: str, *values: str) -> Callable[[Run], bool]:
    return lambda run: flag in run.flags and all(value in run.flags[flag] for value in values)


def more_than_one(*flags: str) -> Callable[[Run], bool]:
    return lambda run: run.number(*flags) > 1


def recomputes(module: str) -> Callable[[Run], bool]:
    selective, modules = has("--recompute-granularity", "selective"), has("--recompute-modules", module)
    return lambda run: selective(run) and modules(run)


PLAN_FLAGS = ("--swap-plan", "--swap-memory-gib", "--swap-memory-fraction", "--swap-policy")
COLUMNS: dict[str, tuple[str, Callable[[Run], bool]]] = {
    "offload": ("--swap-layers all", lambda run: run.flags.get("--swap-layers", ["none"]) != ["none"]),
    "recompute": ("--swap-recompute {kind}", has("--swap-recompute")),
    "planner": ("--swap-policy auto", lambda run: any(flag in run.flags for flag in PLAN_FLAGS)),
    "optimizer": ("--swap-optimizer 1", lambda run: run.flags.get("--swap-optimizer", ["0"]) != ["0"]),
    "guard": ("--swap-oom-guard", has("--swap-oom-guard")),
}
VIRTUAL = ("--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage")
FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"

# A feature: the flags that ask for it, and how a run is known to have it (by default: it has these flags).
FEATURES: dict[str, dict[str, Callable[[Run], bool] | None]] = {
    "Parallelism": {
        "--tensor-model-parallel-size 2": more_than_one("--tensor-model-parallel-size"),
        "--sequence-parallel": None,
        "--pipeline-model-parallel-size 2": more_than_one("--pipeline-model-parallel-size"),
        "--num-virtual-stages-per-pipeline-rank 2": lambda run: any(flag in run.flags for flag in VIRTUAL),
        "--context-parallel-size 2": more_than_one("--context-parallel-size"),
        "--expert-model-parallel-size 2": more_than_one("--expert-model-parallel-size"),
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2":
            lambda run: run.number("--tensor-model-parallel-size") > 1 < run.number("--pipeline-model-parallel-size"),
        "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2":
            lambda run: run.number("--pipeline-model-parallel-size") > 2 and any(flag in run.flags for flag in VIRTUAL),
        "--expert-model-parallel-size 2, data parallel":
            lambda run: 1 < run.number("--expert-model-parallel-size") < run.data_parallel,
        "data parallel": lambda run: run.data_parallel > 1,
        "data parallel, --use-distributed-optimizer":
            lambda run: run.data_parallel > 1 and "--use-distributed-optimizer" in run.flags,
        "--overlap-grad-reduce": None,
        "--overlap-param-gather": None,
        "--overlap-moe-expert-parallel-comm": None,
        "--use-megatron-fsdp": None,
        "--use-torch-fsdp2": None,
    },
    "Megatron's own savings": {
        f"{FULL} uniform": has("--recompute-method", "uniform"),
        f"{FULL} block": has("--recompute-method", "block"),
        **{
            f"--recompute-granularity selective --recompute-modules {module}": recomputes(module)
            for module in ("core_attn", "mlp", "layernorm", "moe", "moe_act", "shared_experts", "mla_up_proj")
        },
        "--cpu-offloading-num-layers 1": None,
        "--fine-grained-activation-offloading": None,
        "--moe-paged-stash": None,
        "--optimizer-cpu-offload": None,
        "--cuda-graph-impl local": has("--cuda-graph-impl"),
    },
    "Model": {
        "--transformer-impl local": has("--transformer-impl", "local"),
        "--transformer-impl transformer_engine": has("--transformer-impl", "transformer_engine"),
        "--num-experts 4": has("--num-experts"),
        "--multi-latent-attention": None,
        "--mtp-num-layers 1": has("--mtp-num-layers"),
        "--hybrid-layer-pattern *-": has("--hybrid-layer-pattern"),
        "--mlp-chunks-for-training 4": has("--mlp-chunks-for-training"),
        "--use-rope-scaling": None,
        "--position-embedding-type yarn": has("--position-embedding-type", "yarn"),
        # Megatron has no other attention that takes packed documents; tests without a GPU have a stand-in.
        "--dataloader-inter-document-masking --transformer-impl transformer_engine":
            has("--dataloader-inter-document-masking"),
        "fp32": lambda run: not {"--bf16", "--fp16", "--fp8-format"} & set(run.flags),
        "--bf16": None,
        "--fp16": None,
        "--fp8-format hybrid --fp8-recipe tensorwise": has("--fp8-recipe", "tensorwise"),
        "--fp8-format hybrid --fp8-recipe delayed":
            lambda run: "--fp8-format" in run.flags and run.flags.get("--fp8-recipe", ["delayed"]) == ["delayed"],
        "--fp8-format e4m3 --fp8-recipe blockwise": has("--fp8-recipe", "blockwise"),
    },
    "Optimizer": {
        "--optimizer adam": lambda run: run.flags.get("--optimizer", ["adam"]) == ["adam"],
        **{f"--optimizer {name}": has("--optimizer", name) for name in ("sgd", "lion", "muon", "dist_muon", "soap")},
        "--use-precision-aware-optimizer": None,
        "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16": has("--exp-avg-dtype", "bf16"),
        "--exp-avg-dtype fp8": has("--exp-avg-dtype", "fp8"),
        "--fp8-param-gather": None,
    },
}  # fmt: skip


def runs_of_tests() -> Iterator[Run]:
    """The runs of the matrix, of tests beside it, and those that fail without TransformerEngine, swapping or not."""
    rows = [(row.words, row.ranks, CPU) for row in ROWS.values() if row.is_evidence]
    failing = [(flags, ranks, CANNOT) for flags, ranks, _ in UPSTREAM_CANNOT]
    for words, ranks, shows in (*rows, *((*one, CPU) for one in ALSO_COMPARED), *failing):
        yield Run(parsed(arguments(words)), ranks, shows)


def runs_of_results() -> Iterator[Run]:
    for path in sorted(RESULTS.glob("*.jsonl")):
        rows = read_rows(path)
        equal = {id(run.row) for run in equal_to_plain(rows) if run.is_equal}
        for row in rows:
            if row["outcome"] in COMPLETE and (row.get("machine") or {}).get("gpu"):
                shows = GPU if id(row) in equal else RAN
                yield Run(parsed(shlex.split(row["flags"])), row.get("num_ranks") or 1, shows)


SHAPE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --train-iters 5 "
    "--hidden-dropout 0"
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}


def is_refused(parser: argparse.ArgumentParser, feature: str, ours: str) -> bool:
    """Whether the checks before the model is built refuse ``feature`` beside ``ours``."""
    flags = [word for word in feature.replace(",", "").split() if word not in ("data", "parallel", "fp32")]
    args = parser.parse_args([*SHAPE.split(), *flags, *ours.split()])
    vars(args).update(  # what Megatron derives
        rank=0, local_rank=0, world_size=1, padded_vocab_size=256, vocab_size=255, ffn_hidden_size=256,
        num_query_groups=4, kv_channels=16, virtual_pipeline_model_parallel_size=None, gtp_weight_remat_size=1,
        expert_gtp_weight_remat_size=1,
        **{name: DTYPES[getattr(args, name)] for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype")},
    )  # fmt: skip
    try:
        swap_config(args)
    except UsageError as error:
        if "cannot be combined with" not in str(error):
            raise
        return True
    return False


def refusal(parser: argparse.ArgumentParser, feature: str, column: str) -> str:
    ours, _ = COLUMNS[column]
    if column != "recompute":
        return "refused" if is_refused(parser, feature, ours) else ""
    possible = [kind for kind in PRODUCERS if kind != QUANTIZED or "--fp8-format" in feature]
    kinds = [kind for kind in possible if is_refused(parser, feature, ours.format(kind=kind))]
    if kinds == possible:
        return "refused"
    return f"refused: {', '.join(kinds)}" if kinds else ""


HEAD = """\
# Support

<!-- made by `python -m tests.pages` from tests, result files and the checks of flags -->

Rows are flags of Megatron, columns parts of Megatron Swap:
*offload* (`--swap-layers`), *recompute* (`--swap-recompute`), *planner* (`--swap-memory-gib`, `--swap-plan`),
*optimizer* (`--swap-optimizer`), *guard* (`--swap-oom-guard`).

| cell | meaning |
|---|---|
| GPU | On H200s or H100s, losses are equal to the bit. |
| ran | Training ran there, not compared. |
| CPU | A test of a tiny model compares the last checkpoint to the bit, most also losses. |
| refused | The flag is refused by name before the model is built. |
| needs TE | Megatron fails without TransformerEngine. |
| sources | Patches fit this source; not run. |
| – | Not tested. |

GPU runs are rows of `docs/results`.
"""

VERSIONS_HEAD = """\
## Versions

`tests/integration/test_versions.py` trains with each version of megatron-core. Others train if the patched functions
are the same; else [a message](../guide/troubleshooting.md) names what differs.
`tests/integration/test_built_model.py` does so with [`swap.install`](python.md): `megatron.core` is enough.
0.16.1 has no trainer, and that of 0.17.1 is refused.
"""

TE_HEAD = """\
TransformerEngine. With another version, `swap: without …` names what is not recomputed.
"""


def cell(evidence: list[Run], refused: str) -> str:
    shown = {run.shows for run in evidence}
    if refused == "refused":
        return refused
    if GPU in shown:
        shown.discard(RAN)
    known = [kind for kind in (GPU, RAN, CPU) if kind in shown]
    return "; ".join([*known, *filter(None, [refused])]) or "–"


def matrix() -> dict[str, dict[str, dict[str, str]]]:
    of_tests = list(runs_of_tests())
    failing = [run for run in of_tests if run.shows == CANNOT]
    runs = [*(run for run in of_tests if run.shows == CPU), *runs_of_results()]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_swap_flags(add_megatron_arguments(parser))
    table: dict[str, dict[str, dict[str, str]]] = {}
    for heading, features in FEATURES.items():
        table[heading] = {}
        for feature, given in features.items():
            is_there = has(feature) if given is None else given
            cells = {
                column: cell([run for run in runs if uses(run) and is_there(run)], refusal(parser, feature, column))
                for column, (_, uses) in COLUMNS.items()
            }
            if any(map(is_there, failing)) and not any(run.shows == CPU and is_there(run) for run in runs):
                cells = {column: CANNOT if text == "–" else f"{text}; {CANNOT}" for column, text in cells.items()}
            table[heading][feature] = cells
    return table


def versions_that_ran(distribution: str) -> set[str]:
    """The versions of ``distribution`` in the result rows of runs on a GPU that ended well."""
    rows = [row for path in RESULTS.glob("*.jsonl") for row in read_rows(path)]
    return {
        row["versions"][distribution]
        for row in rows
        if row["outcome"] == "ok" and (row.get("machine") or {}).get("gpu") and distribution in row["versions"]
    }


def versions_of_megatron() -> dict[str, list[str]]:
    from tests.integration import test_built_model, test_versions

    known, on_gpu = VERSIONS["megatron-core"], versions_that_ran("megatron-core")
    with_newest = matrix()["Model"]["--mtp-num-layers 1"]["offload"]
    above = [GPU if version in on_gpu else "–" for version in known[:-1]]
    rows = {"the tables above": [*above, f"{GPU}; {CPU}" if known[-1] in on_gpu else CPU]}
    rows |= {feature: [CPU] * len(known) for feature in test_versions.EQUAL}
    for feature, refusing in test_versions.REFUSED.items():
        rows[feature] = ["refused" if version in refusing else "–" for version in known[:-1]] + [with_newest]
    rows = {feature: ["–"] * len(BUILT_ONLY) + cells for feature, cells in rows.items()}
    return rows | {feature: [CPU] * len(MEGATRON) for feature in test_built_model.FEATURES}


def versions_of_te() -> dict[str, list[str]]:
    on_gpu = versions_that_ran("transformer-engine")
    cells = [GPU if version in on_gpu else "sources" for version in VERSIONS["transformer_engine"]]
    return {"`--transformer-impl transformer_engine`": cells}


def table(rows: Mapping[str, Sequence[str]], columns: Sequence[str]) -> list[str]:
    head = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    return [*head, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()), ""]


def named(feature: str) -> str:
    """A feature as a row names it: in code font, short."""
    short = feature.replace("--recompute-granularity selective ", "").replace("--recompute-num-layers 1 ", "")
    return ", ".join(f"`{part}`" if part.startswith("--") else part for part in short.split(", "))


def support_page() -> str:
    lines = [HEAD]
    for heading, features in matrix().items():
        lines += [f"## {heading}", ""]
        lines += table({named(feature): list(cells.values()) for feature, cells in features.items()}, list(COLUMNS))
    lines += [VERSIONS_HEAD, *table(versions_of_megatron(), MEGATRON)]
    lines += [TE_HEAD, *table(versions_of_te(), VERSIONS["transformer_engine"])]
    return "\n".join(lines)
