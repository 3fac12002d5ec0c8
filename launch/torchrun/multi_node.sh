#!/usr/bin/env bash
# Consolidates a checkpoint on several nodes with torchrun. Run it on every node, with the same
# arguments, in one of two ways:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 bash launch/torchrun/multi_node.sh CKPT_DIR [OPTION...]
#       each node is told its number, NODE_RANK; number 0 is MASTER_ADDR
#   NNODES=2 bash launch/torchrun/multi_node.sh --rdzv node0:29500 CKPT_DIR [OPTION...]
#       the nodes number themselves; they meet at that host and port, of one of them
#
# Arguments go to dist_consolidate as they are.
#
# Environment:
#   NNODES       number of nodes
#   NODE_RANK    this node's number, from 0 on (not with --rdzv)
#   MASTER_ADDR  a name or address of node 0 that all nodes reach (not with --rdzv)
#   MASTER_PORT  a free port there (default: 29500)
#   RDZV_ID      with --rdzv, the run's name where several runs meet at one place (default:
#                dist_consolidate)
#   NPROC        processes on this node (default: one for each GPU, else 2)
#   PYTHON       interpreter (default: python3)
# Where nodes have several networks, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose one.
set -euo pipefail

PYTHON="${PYTHON:-python3}"
: "${NNODES:?set it to the number of nodes}"

if [[ -z "${NPROC:-}" ]]; then
    NPROC="$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)"
    ((NPROC > 0)) || NPROC=2
fi

if [[ "${1:-}" == --rdzv ]]; then
    : "${2:?--rdzv HOST:PORT}"
    meeting=(--rdzv_backend=c10d --rdzv_endpoint="$2" --rdzv_id="${RDZV_ID:-dist_consolidate}")
    shift 2
else
    : "${NODE_RANK:?set it to the number of this node, from 0 on, or use --rdzv HOST:PORT}"
    : "${MASTER_ADDR:?set it to the name or address of node 0, or use --rdzv HOST:PORT}"
    meeting=(--node_rank="$NODE_RANK" --master_addr="$MASTER_ADDR")
    meeting+=(--master_port="${MASTER_PORT:-29500}")
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m torch.distributed.run --nnodes="$NNODES" --nproc_per_node="$NPROC" \
    "${meeting[@]}" -m dist_consolidate "$@"
