#!/usr/bin/env bash
# Trace a few training steps and check them: the order of every copy, and how much of the copy time compute hid.
#
#   bash tools/profile.sh --swap-layers 0-23                     # the flags of examples/pretrain_gpt_swap.sh
#   PROFILER=torch MODEL=350m bash tools/profile.sh --swap-layers 0-7
#
# Uses Nsight Systems if there is a GPU and nsys is found, else torch.profiler (also without a GPU). Training ends after the last traced
# step. Exit status: that of training, then 1 if the analysis finds a copy that is out of order or differs from the summary.
#
# Settings from the environment, besides those of the example:
#   PROFILER=nsys|torch     choose (default: nsys if it can be used)
#   PROFILE_STEPS=4-5       steps to trace, from 3 on
#   PROFILE_DIR=FOLDER      output folder (default: runs/profile-DATE-TIME)
#   NSYS=/path/to/nsys      if it is neither on PATH nor below /opt/nvidia
# Output: about.json (machine, versions, commit), run.json (the summary), the trace (rank-0.json.gz, or trace.nsys-rep and trace.sqlite),
# findings.json, copies.csv, and trace.perfetto.json.gz for https://ui.perfetto.dev.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
swap_setup_env run

steps="${PROFILE_STEPS:-4-5}"
folder="${PROFILE_DIR:-$SWAP_ROOT/runs/profile-$(date +%Y%m%d-%H%M%S)}"

[[ "$steps" =~ ^([0-9]{1,9})(-([0-9]{1,9}))?$ ]] || swap_die "PROFILE_STEPS=$steps: give a step or a range of steps, N or N-M."
first_step=$((10#${BASH_REMATCH[1]})); last_step=$((10#${BASH_REMATCH[3]:-${BASH_REMATCH[1]}}))
[ "$first_step" -ge 3 ] || swap_die "PROFILE_STEPS=$steps (--swap-profile-steps $steps): steps can be traced from 3 on; earlier ones are warm-up."
[ "$first_step" -le "$last_step" ] || swap_die "PROFILE_STEPS=$steps: the range ends before it begins."

has_gpu() { "$SWAP_PYTHON" -W ignore -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; }
find_nsys() {
    local candidate
    for candidate in "${NSYS:-}" "$(type -P nsys || true)" /opt/nvidia/nsight-systems/*/bin/nsys \
                     /opt/nvidia/nsight-systems/*/target-linux-x64/nsys /opt/nvidia/nsight-compute/*/host/target-linux-x64/nsys; do
        [ -x "$candidate" ] && printf '%s\n' "$candidate" && return 0
    done
    return 1
}

nsys=""
case "${PROFILER:-}" in
    torch) ;;
    nsys)
        nsys="$(find_nsys)" || swap_die "PROFILER=nsys, but no nsys was found (PATH, /opt/nvidia). Set NSYS=/path/to/nsys, or PROFILER=torch."
        has_gpu || swap_die "PROFILER=nsys, but there is no GPU to trace. PROFILER=torch traces the CPU emulation." ;;
    "") has_gpu && nsys="$(find_nsys)" || nsys="" ;;
    *) swap_die "PROFILER=$PROFILER is not known; choose nsys or torch" ;;
esac

train=(bash "$SWAP_ROOT/examples/pretrain_gpt_swap.sh" --eval-iters 0 --train-iters "$last_step" --swap-profile-steps "$steps" "$@")
case " $* " in *" --help "* | *" --help-swap "* | *" -h "*) exec "${train[@]}" ;; esac
case " $* " in
    *" --swap-layers none "* | *" --swap-layers=none "*) swap_die "with --swap-layers none there is nothing to judge. Choose layers." ;;
    *" --swap-layers "* | *" --swap-layers="*) ;;
    *) swap_die "without --swap-layers nothing is swapped and there is nothing to judge. Say which layers: bash tools/profile.sh --swap-layers 0-3" ;;
esac
[ ! -e "$folder/findings.json" ] || swap_die "$folder holds what another run has found. Name another PROFILE_DIR, or remove that one."
mkdir -p "$folder"
folder="$(cd "$folder" && pwd)"
export SUMMARY="$folder/run.json"
# Remove files of an earlier run that failed, so that they are not mistaken for this run's.
(cd "$folder" && rm -f about.json run.json rank-*.json.gz trace.nsys-rep trace.qdstrm trace.sqlite copies.csv trace.perfetto.json.gz)
# The machine of the findings and, with a GPU, the speed of the idle link, which the copies are compared with.
(cd "$SWAP_ROOT" && "$SWAP_PYTHON" -W ignore -m benchmarks.machine --command "bash tools/profile.sh $*") >"$folder/about.json"
if [ -n "$nsys" ]; then
    swap_say "tracing steps $steps with $("$nsys" --version)"
    # Sampling call stacks needs permissions that containers lack, and shows nothing about copies.
    "$nsys" profile --sample=none --cpuctxsw=none --trace=cuda,nvtx --capture-range=cudaProfilerApi --capture-range-end=stop \
        --force-overwrite=true --output="$folder/trace" "${train[@]}" --swap-profile nsys
    if [ ! -f "$folder/trace.nsys-rep" ] && [ -f "$folder/trace.qdstrm" ]; then
        # The nsys inside Nsight Compute does not find its importer and leaves the raw stream.
        host="$(dirname "$(dirname "$nsys")")"
        importer="$(find "$host" -name QdstrmImporter -print -quit)"
        [ -n "$importer" ] || swap_die "nsys left $folder/trace.qdstrm, and no QdstrmImporter was found below $host"
        LD_LIBRARY_PATH="$(dirname "$importer"):$(dirname "$nsys")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" \
            "$importer" -i "$folder/trace.qdstrm" -o "$folder/trace.nsys-rep"
    fi
    LD_LIBRARY_PATH="$(dirname "$nsys")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" \
        "$nsys" export --type=sqlite --force-overwrite=true --output="$folder/trace.sqlite" "$folder/trace.nsys-rep"
    trace="$folder/trace.sqlite"
else
    swap_say "tracing steps $steps with torch.profiler"
    "${train[@]}" --swap-profile "$folder"
    trace="$folder/rank-0.json.gz"
fi
[ -s "$trace" ] || swap_die "training ended, but no trace was left at $trace"
exec "$SWAP_PYTHON" "$SWAP_ROOT/tools/analyze_trace.py" "$trace" --summary "$SUMMARY" --about "$folder/about.json" --output "$folder"
