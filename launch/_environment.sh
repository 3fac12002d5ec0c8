# Sourced by quickstart.sh and test.sh: one virtual environment, .venv in the repository root.
#
#   make_environment NAME REQUIREMENT...
#
# creates .venv where there is none that works, installs PyTorch and then the requirements, and
# leaves a stamp, so that the next call with an unchanged pyproject.toml installs nothing.
#
# Environment:
#   PYTHON     interpreter to build .venv with (default: python3.11, else python3)
#   TORCH_PIN  what to install as PyTorch first (default: torch==2.13.0, what we test with;
#              pyproject.toml says which versions work)
# shellcheck shell=bash

REPO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$REPO_ROOT/.venv"
VENV_PYTHON="$VENV/bin/python"
TORCH_PIN="${TORCH_PIN:-torch==2.13.0}"

# DeepSpeed must not compile kernels when it is installed or imported: nothing here needs them.
export DS_BUILD_OPS=0

step() {
    printf '\n==> %s\n' "$*"
}

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

is_recent_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3 python; do
        if is_recent_python "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer found; set PYTHON to one"
}

# What an installed environment depends on, as one line.
environment_key() {
    {
        cat "$REPO_ROOT/pyproject.toml" "$REPO_ROOT/dist_consolidate/_version.py"
        "$VENV_PYTHON" --version
        printf '%s\n' "$TORCH_PIN" "$@"
    } | sha256sum | cut -d ' ' -f 1
}

pip_install() {
    "$VENV_PYTHON" -m pip install --quiet --quiet --disable-pip-version-check "$@"
}

make_environment() {
    local name="$1" python stamp
    shift
    stamp="$VENV/.installed-$name"
    if ! is_recent_python "$VENV_PYTHON"; then
        python="$(find_python)"
        step "making .venv with $("$python" --version)"
        "$python" -m venv --clear "$VENV"
    fi
    if [[ -f "$stamp" && "$(cat "$stamp")" == "$(environment_key "$@")" ]]; then
        step "using .venv as it is (pyproject.toml unchanged)"
        return
    fi
    rm -f "$stamp"
    step "installing $TORCH_PIN"
    pip_install "$TORCH_PIN"
    step "installing $*"
    (cd "$REPO_ROOT" && pip_install --editable "$@")
    environment_key "$@" >"$stamp"
}
