#!/usr/bin/env bash
#SBATCH --job-name=drumline
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --output=%x-%j.log
# Train on several nodes: sbatch deploy/slurm.sh plan.toml
# Before the time limit and on preemption the ranks save and stop, and the job goes back into the queue. It then
# continues from its newest checkpoint. See docs/deploy-slurm.md.
set -euo pipefail

here=${DRUMLINE_DEPLOY:-$SLURM_SUBMIT_DIR/deploy}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export HEAD=${HEAD:-${nodes[0]}:29500}
export NUM_NODES=$SLURM_JOB_NUM_NODES
export RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
export JOB=slurm-$SLURM_JOB_ID
export CONFIG=${1:-}
export OUT=${OUT:-$SLURM_SUBMIT_DIR/out/$JOB}
shift || true

srun --kill-on-bad-exit=1 bash "$here/node.sh" "$@" &
step=$!
stopped=
# srun passes the signal on to torchrun on every node, and torchrun to its ranks.
# shellcheck disable=SC2317 # the trap calls it
stop() {
  stopped=yes
  kill -TERM "$step" 2>/dev/null || true
}
trap stop USR1 TERM
code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do # a signal ends `wait`, but not srun
  code=0
  wait "$step" || code=$?
done

if [[ -n $stopped ]]; then
  echo "Stopped to give the nodes back. The run in $OUT continues when the job starts again."
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
fi
exit "$code"
