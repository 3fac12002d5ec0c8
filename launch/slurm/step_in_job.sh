#!/usr/bin/env bash
# Consolidates in a step of its own inside an allocation that is there already: at the end of the
# training script, beside a training step that still runs, or from a shell of salloc.
#
#   bash launch/slurm/step_in_job.sh CKPT_DIR [OUTPUT_DIR] [OPTION...]
#
# Environment:
#   NTASKS        how many tasks (default: as many as the allocation has)
#   SLURM_JOB_ID  which allocation; set there already, and to be set when called from outside
#   PYTHON        interpreter to use (default: python)
set -euo pipefail

if (($# == 0)); then
    echo "usage: bash launch/slurm/step_in_job.sh CKPT_DIR [OUTPUT_DIR] [OPTION...]" >&2
    exit 2
fi
if [[ -z "${SLURM_JOB_ID:-}" ]]; then
    echo "error: no allocation here: call this in a job, or set SLURM_JOB_ID to one" >&2
    exit 2
fi

# The training's own: its port may be in use, and its ranks are not those of this step.
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT

# --overlap: this step shares CPUs, memory and GPUs with what runs in the allocation (SLURM 20.11
# or newer); without it, it would wait for the training step to end. A task that is stopped for good
# would keep the step, were it not for --kill-on-bad-exit.
exec srun --jobid="$SLURM_JOB_ID" --overlap --kill-on-bad-exit=1 ${NTASKS:+--ntasks="$NTASKS"} \
    "${PYTHON:-python}" -m dist_consolidate --launcher slurm "$@"
