#!/usr/bin/env bash
# Consolidates a checkpoint on processes that mpirun starts, on this host or on several.
#
#   bash launch/mpi/consolidate.sh CKPT_DIR [OUTPUT_DIR] [OPTION...]
#   NP=16 HOSTFILE=hosts bash launch/mpi/consolidate.sh CKPT_DIR --transport gather
#
# Arguments go to dist_consolidate as they are. mpi4py, built for this mpirun's MPI, must be
# installed: pip install 'dist-consolidate[mpi]'.
#
# Environment:
#   NP        number of processes, one for each GPU of all hosts (default: those of this host,
#             else 2)
#   HOSTFILE  the hosts, as mpirun reads them; in a SLURM or PBS job mpirun knows them
#   MPIRUN    mpirun itself, with further arguments if need be (default: mpirun)
#   PYTHON    interpreter, the same path on every host (default: python3)
set -euo pipefail

PYTHON="${PYTHON:-python3}"
read -ra launcher <<<"${MPIRUN:-mpirun}"

if [[ -z "${NP:-}" ]]; then
    NP="$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)"
    ((NP > 0)) || NP=2
fi

launcher+=(-n "$NP")
if [[ -n "${HOSTFILE:-}" ]]; then
    launcher+=(-hostfile "$HOSTFILE")
fi
if "${launcher[0]}" --version 2>/dev/null | grep -q 'Open MPI'; then
    # Bound to a core, as two ranks are by default, all threads of a rank would share it.
    launcher+=(--bind-to none)
    # Other hosts get only what is named.
    for name in GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME NCCL_DEBUG OMP_NUM_THREADS PYTHONPATH; do
        if [[ -n "${!name:-}" ]]; then
            launcher+=(-x "$name")
        fi
    done
fi

exec "${launcher[@]}" "$PYTHON" -m dist_consolidate "$@"
