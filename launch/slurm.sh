#!/usr/bin/env bash
# Runs an experiment as a Slurm job, one process a node with all its GPUs:
#
#   SBATCH='--nodes=2' launch/slurm.sh wikipedia.search --workdir=/shared/runs/first
#   sbatch --nodes=2 launch/slurm.sh wikipedia.search --workdir=/shared/runs/first
#
# The first checks name and flags here, and then submits the same job (CHECK=no only submits).
# In the place of an experiment's name the path of a script (*.py) may stand, seen from the
# checkout. Checkout, script and --workdir have to be on storage that all nodes see. Five
# minutes before the time limit, and when it is preempted with grace, the run gets SIGTERM and
# saves; Slurm puts the job into the queue again, under its number, until it has ended by
# itself.
#SBATCH --job-name=agent_r1
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
[[ -f launch/run.sh ]] || { echo "submit the job from the checkout, not from $PWD" >&2; exit 2; }
source launch/dry_run.sh

if [[ ! ${SLURM_JOB_ID:-} ]]; then
  source launch/place.sh
  there=${1:?an experiment, or a script (*.py)}
  # The job uses the environment that this makes: with the same EXTRA.
  EXTRA=${EXTRA-cuda} check '' "$@"
  read -ra options <<<"${SBATCH:-}"
  run sbatch "${options[@]}" launch/slurm.sh "$@"
  exit
fi

run make --silent "EXTRA=${EXTRA-cuda}" .venv/installed
# JAX finds the processes by Slurm's variables, but would give the one process of a node the
# one device of its local number.
if [[ ${SLURM_GPUS_ON_NODE:-} ]]; then
  JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((SLURM_GPUS_ON_NODE - 1)))
  export JAX_LOCAL_DEVICE_IDS
fi
status=0
export AGENT_R1_PROCESSES=auto
run srun "--cpus-per-task=${SLURM_CPUS_PER_TASK:-1}" launch/run.sh "$@" || status=$?
# SIGTERM goes to the processes, not to this script. scancel ends it too, and nothing returns.
if [[ $status -eq 75 || ${DRY_RUN:-} ]]; then
  run scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
