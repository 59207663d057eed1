#!/usr/bin/env bash
# One node's part of a run: torchrun with this node's ranks. Start it on every node; the nodes meet at HEAD.
# The same command starts a run and continues it after a preemption: see docs/deploy-slurm.md.
#
#   HEAD             name or address of the first node, with a port: node0:29500, [fd00::1]:29500
#   NUM_NODES        nodes in all
#   RANKS_PER_NODE   ranks on each of them, one for each GPU
#   JOB              a name that only this run has, the same on all nodes and after a preemption
#   CONFIG           the config of the run; without it, settings come from the flags alone
#   OUT              folder of the run, on a disk that all nodes share
#   RESTARTS         how often torchrun starts the ranks again after a failure (default 3)
#   INTERFACE        network interface between the nodes (default: the one towards HEAD)
#
# Further arguments go to `drumline train`.
set -euo pipefail
: "${HEAD:?}" "${NUM_NODES:?}" "${RANKS_PER_NODE:?}" "${JOB:?}" "${OUT:?}"

meeting=(--rdzv-backend drumline --rdzv-endpoint "$HEAD" --rdzv-id "$JOB")
train=(--ranks "$((NUM_NODES * RANKS_PER_NODE))" --out "$OUT")
if [[ -n ${INTERFACE:-} ]]; then
  meeting+=(--rdzv-conf "interface=$INTERFACE")
  train+=(--interface "$INTERFACE")
fi
if compgen -G "$OUT/checkpoints/step-*" >/dev/null; then
  train+=(--resume "$OUT")
fi
exec torchrun --nnodes "$NUM_NODES" --nproc-per-node "$RANKS_PER_NODE" --max-restarts "${RESTARTS:-3}" \
  "${meeting[@]}" -m drumline train ${CONFIG:+"$CONFIG"} "${train[@]}" "$@"
