#!/usr/bin/env bash
# Make .venv with the pinned requirements and this package (editable). Does nothing when .venv is
# up to date. Usage: scripts/setup_venv.sh [python3.12-or-newer]
set -euo pipefail
cd "$(dirname "$0")/.."
transformer_engine=2.20.2

is_new_enough() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null
}

find_python() {
    local candidate
    # An explicit choice wins, then PATH, then what pyenv has installed (newest 3.12 first: that
    # is what CI runs).
    for candidate in "$@" python3.12 python3.13 python3.14 python3 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.{12,13,14}*/bin/python3; do
        if is_new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

stamp=.venv/.requirements.sha256
wanted=$(cat requirements.txt setup.py scripts/setup_venv.sh | sha256sum)
if [[ -x .venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    exit 0
fi
if ! python=$(find_python "$@"); then
    echo "setup: no Python >= 3.12 on PATH or under pyenv (megatron-core needs it)." \
        "Install one, for example 'apt-get install python3.12 python3.12-venv' or" \
        "'pyenv install 3.12', and run this again." >&2
    exit 1
fi
echo "setup: making .venv with $("$python" --version); a first install takes a few minutes"
"$python" -m venv --clear .venv
.venv/bin/pip install --quiet --disable-pip-version-check -r requirements.txt
.venv/bin/pip install --quiet --disable-pip-version-check --no-deps --editable .
# The Python part of Transformer Engine, for tests/te_stub. Aside: Megatron uses what it can import.
.venv/bin/pip install --quiet --disable-pip-version-check --no-deps --target .venv/te \
    "transformer-engine==$transformer_engine"
echo "$wanted" >"$stamp"
