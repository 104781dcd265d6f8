#!/usr/bin/env bash
# Create .venv and install replayssm into it, pinned by constraints.txt. Called by `make`; safe to run again.
#   PYTHON=…       interpreter to use (else the first of python3.13 … python3 that runs and is new enough)
#   TORCH_INDEX=…  further package index for torch, for instance PyTorch's own with CPU builds (200 MB instead of GBs)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset VIRTUAL_ENV PYTHONHOME PYTHONPATH
readonly PY=.venv/bin/python

say() { printf '%s\n' "setup: $*" >&2; }
die() { printf '%s\n' "error: $*" >&2; exit 1; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    if [[ -n ${PYTHON:-} ]]; then
        new_enough "$PYTHON" || die "PYTHON=$PYTHON does not run or is older than 3.11"
        echo "$PYTHON" && return
    fi
    for name in python3.13 python3.12 python3.11 python3; do
        if new_enough "$name"; then echo "$name" && return; fi
    done
    die "no Python >= 3.11 found; install one (Debian: apt install python3 python3-venv) or set PYTHON=/path/to/python3"
}

# Run a command with its output in a log; show its last line and the seconds while it runs, its end if it fails.
follow() {
    local log=.venv/setup.log start=$SECONDS shown=$SECONDS line
    "$@" >"$log" 2>&1 </dev/null &
    local pid=$!
    trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM
    while kill -0 "$pid" 2>/dev/null; do
        line=$(tail -n 1 "$log" | tr -d '\r' | cut -c 1-70)
        if [[ -t 2 ]]; then
            printf '\r\033[K  %4d s  %s' $((SECONDS - start)) "$line" >&2
        elif ((SECONDS - shown >= 10)); then
            shown=$SECONDS
            printf '  %4d s  %s\n' $((SECONDS - start)) "$line" >&2
        fi
        sleep 0.2
    done
    [[ -t 2 ]] && printf '\r\033[K' >&2
    trap - INT TERM
    wait "$pid"
}

pip_install() { follow "$PY" -m pip install --disable-pip-version-check -c constraints.txt "$@"; }
or_show_log() { "$@" || { tail -n 15 .venv/setup.log >&2; die "installation failed; the full log is .venv/setup.log"; }; }

make_venv() {
    local python=$1
    rm -rf .venv
    if "$python" -m venv .venv >/dev/null 2>&1; then return; fi
    rm -rf .venv
    if "$python" -m virtualenv -q .venv >/dev/null 2>&1; then return; fi
    if command -v virtualenv >/dev/null && virtualenv -q -p "$python" .venv; then return; fi
    rm -rf .venv
    die "$python cannot create virtual environments; on Debian: apt install python3-venv"
}

install_torch() {
    local version
    version=$(sed -n 's/^torch==//p' constraints.txt)
    if "$PY" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '$version')" 2>/dev/null
    then
        say "torch $version is there"
        return
    fi
    say "torch $version${TORCH_INDEX:+ from $TORCH_INDEX}"
    local from=(${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"})
    if ! command -v nvidia-smi >/dev/null && pip_install "${from[@]}" "torch==$version+cpu"; then return; fi
    or_show_log pip_install "${from[@]}" "torch==$version" # no small CPU build within reach, or a GPU is there
}

python=$(find_python)
if [[ -x $PY ]] && new_enough "$PY" && "$PY" -m pip --version >/dev/null 2>&1; then
    say "using .venv ($("$PY" --version))"
else
    say "creating .venv with $python ($("$python" --version))"
    make_venv "$python"
fi
install_torch
say "replayssm and its tools"
or_show_log pip_install -e '.[serve,dev]'
say "done in $SECONDS s"
