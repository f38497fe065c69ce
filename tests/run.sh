#!/usr/bin/env bash
# Everything that can be checked here: lint, types, then the tests (those marked `gpu` only where there is one).
# Layout is left to the writer (no formatter check): line length, import order and likely bugs are checked.
# About half an hour on 2 cores after the first installation. Arguments go to pytest:
#
#   bash tests/run.sh                            all of it
#   bash tests/run.sh tests/unit -k planner -x   some of it (lint and types still run: seconds)
#
# MEGATRON_SWAP_TEST_JOBS=N   pytest workers (default: 2, or 1 on a single core; 0 for none, as --pdb wants)
# MEGATRON_SWAP_PYTHON=python3   an environment that exists, requirements-dev.txt included
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../tools/setup_env.sh"
swap_setup_env dev
cd "$SWAP_ROOT"

swap_say "ruff"
"$SWAP_PYTHON" -m ruff check .
swap_say "mypy"
"$SWAP_PYTHON" -m mypy

cores="$(nproc --all 2>/dev/null || echo 1)" # plain nproc answers what OMP_NUM_THREADS says
# Each worker, and each rank that a test starts, would otherwise take all cores for itself.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TORCHDYNAMO_DISABLE="${TORCHDYNAMO_DISABLE:-1}"
jobs="${MEGATRON_SWAP_TEST_JOBS:-$((cores > 1 ? 2 : 1))}"
select=()
"$SWAP_PYTHON" -W ignore -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || select=(-m "not gpu")
swap_say "pytest: $jobs worker(s)${select[*]:+, without a GPU}"
exec "$SWAP_PYTHON" -m pytest -n "$jobs" "${select[@]}" "$@"
