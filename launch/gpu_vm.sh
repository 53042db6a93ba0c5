#!/usr/bin/env bash
# Runs an experiment over GPU machines that answer to ssh, one process a machine:
#
#   HOSTS='gpu-0 gpu-1' launch/gpu_vm.sh wikipedia.search --workdir=/shared/runs/first
#
# In the place of an experiment's name the path of a script (*.py) may stand. The last commit
# is copied to each machine and the environment made there; a script that is not in it has to
# be on every machine, under the absolute path that is given. --workdir has to be on
# storage that all of them mount at this place, such as NFS. The first host coordinates:
# the others reach it by its name in HOSTS, on PORT (8476). RESTARTS (3) and SETUP, a command
# that each host runs first, such as a mount, are optional. Name, flags and workdir are checked
# here first (CHECK=no skips this).
#
# The run does not need this terminal: its output is agent_r1_jax/run.log on each host, and
# the same command starts it again where it was. To stop it, saved:
#
#   for host in $HOSTS; do ssh "$host" "pkill -TERM -f 'launch/[r]un.sh'"; done
set -euo pipefail
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/dry_run.sh
source launch/place.sh
read -ra hosts <<<"${HOSTS:?is not set; HOSTS=\'gpu-0 gpu-1\', say, names the machines}"

place "${1:?an experiment, or a script (*.py)}" "$caller"
committed
check "$([[ ${#hosts[@]} -eq 1 ]] || echo /)" "$@"
checkout=$(mktemp --suffix=.tar)
trap 'rm "$checkout"' EXIT
run git archive --output="$checkout" HEAD
printf -v experiment '%q ' "$there" "${@:2}"
for i in "${!hosts[@]}"; do
  command="${SETUP:-true} && mkdir -p agent_r1_jax && cd agent_r1_jax && \
tar -xf ../checkout.tar && JAX_COORDINATOR_ADDRESS=${hosts[0]#*@}:${PORT:-8476} \
JAX_NUM_PROCESSES=${#hosts[@]} JAX_PROCESS_ID=$i EXTRA=cuda RESTARTS=${RESTARTS:-3} \
launch/local.sh $experiment>>run.log 2>&1"
  run scp -q "$checkout" "${hosts[i]}:checkout.tar"
  run ssh "${hosts[i]}" "$command" &
done
status=0
for _ in "${hosts[@]}"; do wait -n || status=$?; done
exit "$status"
