# Sourced by every script:  . "$ROOT/tools/setup_env.sh"; swap_setup_env run   (or: dev, for the tests)
#
# Sets SWAP_PYTHON to an interpreter that can import torch, megatron.core and megatron.swap:
#   - by default that of .venv at the repository root, which the first call makes (about 5 GB; minutes);
#   - with MEGATRON_SWAP_PYTHON=python3 that of an existing environment (NGC container, cluster module). Nothing is installed there.

SWAP_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SWAP_VENV="$SWAP_ROOT/.venv"

swap_say() { printf '[megatron-swap] %s\n' "$*" >&2; }
swap_die() { printf '\n[megatron-swap] error: %s\n' "$*" >&2; exit 1; }

# Prints candidate interpreters, one per line, the tested version first. Some may not run (a pyenv shim, for example).
swap_python_candidates() {
    local version dir
    for version in 3.12 3.13; do
        type -ap "python$version" || true
        for dir in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".* "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}/cpython-$version".* \
                   /opt/python/*"${version/./}"* "$HOME/.local" /opt/homebrew; do
            [ -x "$dir/bin/python$version" ] && printf '%s\n' "$dir/bin/python$version"
        done
        command -v uv >/dev/null 2>&1 && uv python find --no-project "$version" 2>/dev/null || true
    done
    type -ap python3 python || true
    for dir in "${CONDA_PREFIX:-}" "$HOME"/{miniconda3,anaconda3,miniforge3,mambaforge} /opt/conda \
               "$HOME"/{miniconda3,anaconda3,miniforge3,mambaforge}/envs/* /opt/conda/envs/*; do
        [ -n "$dir" ] && [ -x "$dir/bin/python3" ] && printf '%s\n' "$dir/bin/python3"
    done
    return 0
}

# Prints the first candidate that runs, is 64-bit Python 3.12 or 3.13, and can make a virtual environment.
swap_find_python() {
    local candidate report seen="" without_venv="" passed_over=""
    while IFS= read -r candidate; do
        case ":$seen:" in *":$candidate:"*) continue ;; esac
        seen="$seen:$candidate"
        report="$("$candidate" -c '
import sys
if sys.maxsize > 2**32 and (3, 12) <= sys.version_info[:2] <= (3, 13):
    try:
        import ensurepip, venv
        print("ok")
    except ImportError:
        print("no venv")
else:
    print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)" || report="does not run"
        case "$report" in
            ok) printf '%s\n' "$candidate"; return 0 ;;
            "no venv") without_venv="$candidate" ;;
        esac
        passed_over="$passed_over
    $candidate: $report"
    done < <(swap_python_candidates)
    if [ -n "$without_venv" ]; then
        swap_die "$without_venv is a suitable Python, but its venv module is missing. On Debian or Ubuntu:
    sudo apt install $(basename "$without_venv")-venv"
    fi
    swap_die "no Python 3.12 or 3.13 was found (PATH, pyenv, uv and conda were searched); megatron-core 0.19.2 has no wheels for others.
Passed over:$passed_over
Install one, for example with one of
    sudo apt install python3.12-venv        uv python install 3.12
    pyenv install 3.12                      conda create -n py312 python=3.12
or name an environment that has torch and megatron-core already:  MEGATRON_SWAP_PYTHON=/path/to/python3"
}

# Prints a hash of everything that determines the installation, the checkout's path included: a moved checkout needs a new editable install.
swap_stamp() {
    { printf '%s\n%s\n' "$SWAP_ROOT" "$("$SWAP_VENV/bin/python" -V)"; cat "$@" "$SWAP_ROOT/pyproject.toml"; } | sha256sum | cut -d' ' -f1
}

# Installs with pip. On a terminal pip shows its own progress. In a log, a line every 10 s says how much has arrived.
swap_pip() {
    local pip=("$SWAP_VENV/bin/python" -m pip --disable-pip-version-check install "$@") log="$SWAP_VENV/pip.log"
    if [ -t 2 ]; then
        "${pip[@]}" >&2 && return 0
    else
        swap_reporting "$log" "${pip[@]}" -q && return 0
        cat "$log" >&2
    fi
    swap_die "pip could not install (its words are above). Network, proxy or disk space (8 GB)? Then run the same command again: it goes on where it stopped."
}

swap_mib() { du -sm "$1" 2>/dev/null | cut -f1; }

# Runs a command of pip, its output in a file, and reports the bytes that it has downloaded and installed.
swap_reporting() { # log command...
    local log="$1" temp="$SWAP_VENV/tmp" status=0 began=$SECONDS child next
    shift
    mkdir -p "$temp"
    TMPDIR="$temp" "$@" >"$log" 2>&1 & # pip downloads into TMPDIR
    child=$!
    trap 'kill "$child" 2>/dev/null; exit 130' INT TERM # a background process ignores Ctrl-C
    next=$((SECONDS + ${SWAP_PROGRESS_S:-10}))
    while kill -0 "$child" 2>/dev/null; do
        sleep 1
        [ "$SECONDS" -ge "$next" ] || continue
        next=$((SECONDS + ${SWAP_PROGRESS_S:-10}))
        swap_say "$((SECONDS - began)) s: $(swap_mib "$temp") MiB downloaded, $(swap_mib "$SWAP_VENV/lib") MiB installed"
    done
    wait "$child" || status=$?
    trap - INT TERM
    rm -rf "$temp"
    return "$status"
}

swap_install() { # kind (run|dev)
    local kind="$1" base stamp_file="$SWAP_VENV/.swap-stamp-$1" files=("$SWAP_ROOT/requirements.txt")
    [ "$kind" = dev ] && files+=("$SWAP_ROOT/requirements-dev.txt")
    if ! "$SWAP_VENV/bin/python" -c 'import sys, pip; assert sys.version_info >= (3, 12)' 2>/dev/null; then
        base="$(swap_find_python)" || exit 1
        swap_say "making .venv with $base"
        "$base" -m venv --clear "$SWAP_VENV" || swap_die "'$base -m venv $SWAP_VENV' failed"
    fi
    [ "$(cat "$stamp_file" 2>/dev/null)" = "$(swap_stamp "${files[@]}")" ] && return 0
    local what; what="$(basename -a "${files[@]}" | paste -sd' ')"
    if [ -n "$(compgen -G "$SWAP_VENV/.swap-stamp-*")" ]; then
        swap_say "bringing .venv up to date with $what"
    else
        swap_say "installing $what into .venv: about 5 GB (torch, CUDA libraries, megatron-core), 3 to 10 minutes, this once"
    fi
    local args=() file
    for file in "${files[@]}"; do args+=(-r "$file"); done
    SECONDS=0
    swap_pip "${args[@]}"
    swap_pip --no-deps --no-build-isolation -e "$SWAP_ROOT"
    swap_stamp "${files[@]}" >"$stamp_file"
    swap_say "installed in $SECONDS s"
}

# Check the user's environment: report what is missing, install nothing. That takes seconds, so scripts that this one starts do not.
swap_check_existing() { # kind
    SWAP_PYTHON="$(type -P "$MEGATRON_SWAP_PYTHON")" || swap_die "MEGATRON_SWAP_PYTHON=$MEGATRON_SWAP_PYTHON: no such program"
    # megatron.swap is found beside an installed megatron-core, because neither has a megatron/__init__.py.
    export PYTHONPATH="$SWAP_ROOT${PYTHONPATH:+:$PYTHONPATH}"
    [ "${SWAP_CHECKED:-}" != "$1 $SWAP_PYTHON" ] || return 0
    local notes told
    notes="$("$SWAP_PYTHON" "$SWAP_ROOT/tools/check_environment.py" "$1" 2>&1 >/dev/null)" || { printf '%s\n' "$notes" >&2; exit 1; }
    # What an environment goes without is told once; where the checkout may not be written to, in each run.
    told="$SWAP_ROOT/.data/told-$(printf '%s' "$SWAP_PYTHON $notes" | sha256sum | cut -c1-16)"
    if [ -n "$notes" ] && [ ! -e "$told" ]; then
        printf '%s\n' "$notes" >&2
        { mkdir -p "$SWAP_ROOT/.data" && : >"$told"; } 2>/dev/null || true
    fi
    export SWAP_CHECKED="$1 $SWAP_PYTHON"
}

swap_setup_env() { # kind (run|dev)
    local kind="${1:-run}"
    if [ -n "${MEGATRON_SWAP_PYTHON:-}" ]; then
        swap_check_existing "$kind"
        return
    fi
    # A second script (or rank) that starts meanwhile waits here instead of installing into the same place.
    if command -v flock >/dev/null 2>&1; then
        exec 9>"$SWAP_ROOT/.venv.lock"
        flock -n 9 || { swap_say "another run is setting up .venv: waiting for it"; flock 9; }
        swap_install "$kind"
        exec 9>&-
    else
        swap_install "$kind"
    fi
    SWAP_PYTHON="$SWAP_VENV/bin/python"
}
