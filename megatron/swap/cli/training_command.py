"""The training command that a plan is for, to paste into a shell."""

import shlex
from collections.abc import Sequence

ENVIRONMENT = ("CUDA_DEVICE_MAX_CONNECTIONS=1", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
"""Megatron's order of kernels and copies; an allocator whose memory can be used again in other sizes."""
SCRIPT = "pretrain_gpt_swap.py"
OURS = (  # flags of decisions that the planner makes
    "--swap-memory-gib", "--swap-memory-fraction", "--swap-plan", "--swap-policy", "--swap-layers", "--swap-modules",
    "--swap-recompute", "--swap-optimizer", "--swap-host-gib", "--swap-disk-dir",
)  # fmt: skip
WIDTH = 117


def training_command(flags: Sequence[str], chosen: Sequence[str], num_gpus: int, per_host: int) -> str:
    """Return the command of a run: environment, launcher, the user's flags but those that we decide, and ``chosen``."""
    local = min(num_gpus, per_host)
    launcher = [*ENVIRONMENT, "torchrun", "--nproc-per-node", str(local)]
    if num_gpus > local:
        # The shell of each host sets these two variables.
        launcher += ["--nnodes", str(-(-num_gpus // local)), "--node-rank", '"$NODE_RANK"',
                     "--master-addr", '"$MASTER_ADDR"']  # fmt: skip
    kept, is_ours = [], False
    for word in flags:
        if word.startswith("--"):
            is_ours = word.split("=", 1)[0] in OURS
        if not is_ours:  # nor a value of one of ours
            kept.append(word)
    units = [*launcher, SCRIPT]
    for word in [*kept, *chosen]:  # a flag stays with its values
        if word.startswith("--") or units[-1] == SCRIPT:
            units.append(shlex.quote(word))
        else:
            units[-1] += f" {shlex.quote(word)}"
    lines, line = [], ""
    for unit in units:
        if line and len(line) + len(unit) > WIDTH:
            lines.append(line)
            line = "   "
        line += f" {unit}" if line else unit
    return " \\\n".join([*lines, line])
