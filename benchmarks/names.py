"""Names of runs for people: ``3.5B, 4k tokens`` for a model, ``layers 0-3 + recompute norm`` for a method."""

import re

from benchmarks.flags import swapped_layers, value, words_after
from benchmarks.rows import Row

BASELINES = {
    "none": "no offload", "none-again": "no offload, second run", "unfused": "unfused gradients",
    "full-recompute": "full recompute", "fine-grained-offload": "fine-grained offload",
    "save-on-cpu": "torch save_on_cpu", "torchtune-offload": "torchtune offload",
    "torchtune-offload-one-stream": "torchtune offload, one stream",
    "deepspeed-checkpoint": "DeepSpeed checkpoint on CPU", "layer-offload-half": "TE layer offload, half",
    "layer-offload-all-but-one": "TE layer offload, all but one",
}  # fmt: skip
MODULES = {
    "core-attn": "core attention", "qkv": "QKV", "layernorm": "layer norm", "mlp": "MLP", "attention": "attention",
}  # fmt: skip


def model(row: Row) -> str:
    """Return size, sequence length and 8-bit recipe of a run's model: ``3.5B, 4k tokens, FP8 tensorwise``."""
    count = row.get("num_params") or row.get("params")
    lengths = [length for _, length in row.get("sequence_schedule") or ()]
    lengths = sorted(set(lengths)) or [int(value(row, "--seq-length") or 0)]
    experts = " MoE" if value(row, "--num-experts") else ""
    size = f"{billions(count)}{experts}, " if count else ""
    fp8 = f", FP8 {value(row, '--fp8-recipe') or 'delayed'}" if value(row, "--fp8-format") else ""
    return f"{size}{' and '.join(tokens(length) for length in lengths)} tokens{fp8}"


def billions(count: float) -> str:
    scaled, unit = (count / 1e9, "B") if count >= 0.95e9 else (count / 1e6, "M")
    return f"{scaled:.0f}{unit}" if unit == "M" else f"{scaled:.1f}".removesuffix(".0") + unit


def is_plan_file(row: Row) -> bool:
    return value(row, "--swap-plan") is not None


def budget(row: Row) -> str | None:
    found = row.get("budget_gib")
    return None if found is None else gib(found)


def gib(size: float) -> str:
    return f"{size:.1f}".removesuffix(".0")


def tokens(length: int) -> str:
    """Format a sequence length: ``4k``."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def method(row: Row) -> str:
    """Return what a run does to save memory, in words; a method without a rule keeps its name."""
    name = str(row["method"])
    if row.get("is_ours"):
        return f"{_ours(row) or name}{' + unfused gradients' if name.endswith('-unfused') else ''}"
    if name in BASELINES:
        return BASELINES[name]
    found = re.fullmatch(r"megatron-(?:optimizer-)?([\d.]+)(-unpinned)?(-full-recompute)?", name)
    if found is not None:
        unpinned, recompute = (", unpinned" if found[2] else ""), (" + full recompute" if found[3] else "")
        return f"Megatron optimizer offload {float(found[1]):.0%}{unpinned}{recompute}"
    parts = re.findall(r"(offload|recompute)-(.+?)(?=-recompute-|$)", name)
    if not parts:
        return name
    return " + ".join(f"{verb} {_modules(modules)}" for verb, modules in parts)


def _modules(words: str) -> str:
    found = re.findall("|".join(MODULES), words)
    return ", ".join(MODULES[word] for word in found) or words


def _ours(row: Row) -> str:
    parts = []
    if (budget := row.get("budget_gib")) is not None:
        parts.append(f"{'plan file' if is_plan_file(row) else 'auto'}, {gib(budget)} GiB")
    if (layers := swapped_layers(row)) is not None:
        which = "all layers" if layers == "all" else f"layers {layers}"
        modules = words_after(row, "--swap-modules")
        parts.append(f"{modules.replace('self_attention', 'attention')} of {which}" if modules else which)
    if (sites := words_after(row, "--swap-recompute")) is not None:
        parts.append(f"recompute {sites.replace(' ', ', ')}")
    if (fraction := value(row, "--swap-optimizer")) is not None:
        share = "optimizer state auto" if fraction == "auto" else f"{float(fraction):.0%} of optimizer state"
        parts.append(f"{share}, disk" if value(row, "--swap-disk-dir") else share)
    for part, flag in (("loss", "--swap-loss-chunks"), ("MLP", "--mlp-chunks-for-training")):
        if (number := value(row, flag)) is not None:
            parts.append(f"{part} chunks: {number}")
    granularity = value(row, "--recompute-granularity")
    if granularity is not None:
        modules = value(row, "--recompute-modules")
        parts.append("full recompute" if granularity == "full" else f"recompute {_modules(modules or '')}")
    if "--swap-oom-guard" in row["flags"].split():
        parts.append("out-of-memory guard")
    return " + ".join(parts)
