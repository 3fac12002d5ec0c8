#!/usr/bin/env bash
# Lint, types and all tests, on a machine with Python 3.11 or newer and nothing else.
#
#   bash launch/test.sh [PYTEST_ARGUMENT...]      for example: tests/unit -k archive
#
# Tests that start SLURM, MPI or network namespaces are skipped where these are missing. With
# DIST_CONSOLIDATE_REQUIRE=slurm,mpi,netns they fail there.
#
# Environment: PYTEST_WORKERS, how many tests run at a time (default 2; 0: in one process), and
# what _environment.sh names.
set -euo pipefail

# shellcheck source=launch/_environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
cd "$REPO_ROOT"

make_environment test '.[test]'

# PYTHONFAULTHANDLER: a process that aborts says where it was.
export DS_ACCELERATOR=cpu HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONFAULTHANDLER=1

step "ruff check"
"$VENV_PYTHON" -m ruff check .

step "ruff format --check"
"$VENV_PYTHON" -m ruff format --check .

step "mypy"
"$VENV_PYTHON" -m mypy

# One file stays on one worker, so that what a file's tests share (a trained checkpoint, say) is
# made once.
step "pytest $*"
"$VENV_PYTHON" -m pytest -n "${PYTEST_WORKERS:-2}" --dist loadfile "$@"
