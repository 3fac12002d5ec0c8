#!/usr/bin/env bash
# From nothing to a consolidated checkpoint, on a machine with Python 3.11 or newer.
#
#   bash launch/quickstart.sh
#       trains a small tied GPT under DeepSpeed ZeRO-3 on two CPU ranks, consolidates the
#       checkpoint with torchrun, and compares the result with the live engine, bit for bit
#   bash launch/quickstart.sh CKPT_DIR [OUTPUT_DIR] [OPTION...]
#       consolidates that checkpoint; arguments go to dist_consolidate as they are
#
# Environment: NPROC, number of processes (default: one for each GPU, else 2), and what
# _environment.sh names.
set -euo pipefail

# shellcheck source=launch/_environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
TORCHRUN="$VENV/bin/torchrun"
RUN_DIR="$REPO_ROOT/quickstart_run"

make_environment quickstart '.[deepspeed]' safetensors

num_gpus="$("$VENV_PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

consolidate() {
    local num_processes="$1"
    shift
    step "torchrun --nproc_per_node=$num_processes -m dist_consolidate $*"
    "$TORCHRUN" --standalone --nproc_per_node="$num_processes" -m dist_consolidate "$@"
}

demonstrate() {
    local output="$RUN_DIR/consolidated" num_processes="${NPROC:-2}" device=auto
    if ((num_gpus > 0 && num_gpus < num_processes)); then
        device=cpu # NCCL wants a GPU for each rank
    fi
    rm -rf "$RUN_DIR"
    step "training a small tied GPT under DeepSpeed ZeRO-3 on two CPU ranks"
    DS_ACCELERATOR=cpu "$TORCHRUN" --standalone --nproc_per_node=2 \
        "$REPO_ROOT/launch/quickstart_train.py" "$RUN_DIR"
    consolidate "$num_processes" "$RUN_DIR/checkpoint" "$output" --device "$device"
    step "comparing with what the live engine held"
    "$VENV_PYTHON" "$REPO_ROOT/launch/quickstart_show.py" "$output" "$RUN_DIR/live_masters.pt"
}

if (($# > 0)); then
    consolidate "${NPROC:-$((num_gpus > 0 ? num_gpus : 2))}" "$@"
else
    demonstrate
fi
