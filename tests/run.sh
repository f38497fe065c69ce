#!/usr/bin/env bash
# Lint, types, then the tests (those marked `gpu` only where there is one). Limits: after installation, on 2 idle cores.
#
#   bash tests/run.sh                            what finds most: unit tests, some rows of the matrix, fuzzes of a few
#                                                cases, some runs of the trainer. At most 5 minutes
#   bash tests/run.sh --all                      all but the nightly's: most of the matrix, a run of the oldest Megatron,
#                                                the wheel, fuzzes of more cases. At most 15 minutes
#   bash tests/run.sh --nightly                  everything: also the commands of all pages, examples, each Megatron,
#                                                fuzzes at full size, kills at random moments, benchmarks. No limit
#   bash tests/run.sh tests/unit -k planner -x   the tests that you name, all of them (lint and types: seconds)
#
# Layout is left to the writer (no formatter check): line length, import order and likely bugs are checked.
# Other arguments go to pytest. The last line tells how long it took and what it left out.
#
# MEGATRON_SWAP_TEST_JOBS=N   pytest workers (default: 2, or 1 on a single core; 0 for none, as --pdb wants)
# MEGATRON_SWAP_PYTHON=python3   an environment that exists, requirements-dev.txt included
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../tools/setup_env.sh"
swap_setup_env dev
cd "$SWAP_ROOT"

words=()
export SWAP_TESTS=short # read by tests/sizes.py
for word in "$@"; do
    case "$word" in
        --all) SWAP_TESTS=all ;;
        --nightly) SWAP_TESTS=nightly ;;
        -k* | -m* | --lf | --last-failed) SWAP_TESTS=nightly words+=("$word") ;;
        *) words+=("$word"); [ ! -e "${word%%::*}" ] || SWAP_TESTS=nightly ;;
    esac
done

began=$SECONDS
SWAP_TESTS_LEFT_OUT="$(mktemp)"
export SWAP_TESTS_LEFT_OUT
swap_finish() {
    local status=$? took=$((SECONDS - began)) more=""
    [ "$SWAP_TESTS" = nightly ] || more="; it left out $(cat "$SWAP_TESTS_LEFT_OUT")"
    rm -f "$SWAP_TESTS_LEFT_OUT"
    printf '[megatron-swap] tests/run.sh took %d min %d s%s\n' $((took / 60)) $((took % 60)) "$more"
    exit "$status"
}
printf 'the tests of larger runs and the full sizes of the fuzzes' >"$SWAP_TESTS_LEFT_OUT" # until pytest has counted
trap swap_finish EXIT

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
[ "$SWAP_TESTS" != nightly ] || words=(-o timeout=1800 "${words[@]}") # seconds a test: fuzzes at full size take minutes
swap_say "pytest: $jobs worker(s)${select[*]:+, without a GPU}"
"$SWAP_PYTHON" -m pytest -n "$jobs" --dist worksteal "${select[@]}" "${words[@]}"
