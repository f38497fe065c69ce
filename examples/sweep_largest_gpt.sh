#!/usr/bin/env bash
# Find the largest GPT that this machine trains with each method: unswapped, full recompute, Megatron's offloads, ours. Installs its environment
# on a fresh machine.
#
#   bash examples/sweep_largest_gpt.sh                                        # with a GPU the depth sweep, without one a tiny one on the CPU
#   bash examples/sweep_largest_gpt.sh --method none ours-fit-full-recompute  # further flags go to tools/sweep.py
#   SWEEP=h200-family bash examples/sweep_largest_gpt.sh --resume             # go on where it was interrupted
#
# What it does: finds Python 3.12 or 3.13, makes .venv (once; about 5 GB); predicts with the planner's memory model what fits and where to begin;
# trains 20 real steps at one depth after another, each run in a separate process, until the next depth does not train. Rows are written as runs
# end, so that it can be interrupted and resumed.
#
# Expected, by arithmetic:
#   h200-depth   one GPU of 140 GiB, 122 GiB of host memory, 20 GiB of disk. About three runs a method; the time is that of building and
#                training models of 8 to 24 billion parameters, minutes a run, hours in all. Choose with --method, cut with --time-limit-s and --resume.
#   quick        below 2 GiB of host memory; about 15 runs of some seconds each on 2 CPU cores: two minutes. An emulated device of 14 MiB
#                trains 4 layers without offload, 16 with all layers offloaded.
# Another GPU: copy benchmarks/sweeps/definitions/h200-depth.toml, change host_limit_gib and --swap-host-gib, give its path as SWEEP.
#
# Settings from the environment:
#   SWEEP=NAME|FILE.toml    which sweep (default: h200-depth with a GPU, quick without)
#   OUTPUT=FILE.jsonl       rows; table and picture beside them (default: runs/SWEEP-sweep.jsonl)
#   MEGATRON_SWAP_PYTHON=python3        use an existing environment (NGC container, cluster) and install nothing
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../tools/setup_env.sh"
swap_setup_env run

gpus="$("$SWAP_PYTHON" -W ignore -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')" ||
    swap_die "$SWAP_PYTHON cannot import torch"
if [ "$gpus" -gt 0 ]; then default_sweep=h200-depth; else default_sweep=quick; fi
SWEEP="${SWEEP:-$default_sweep}"
OUTPUT="${OUTPUT:-$SWAP_ROOT/runs/$(basename "$SWEEP" .toml)-sweep.jsonl}"

swap_say "SWEEP=$SWEEP into $OUTPUT"
exec "$SWAP_PYTHON" "$SWAP_ROOT/tools/sweep.py" --sweep "$SWEEP" --output "$OUTPUT" "$@"
