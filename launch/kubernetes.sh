#!/usr/bin/env bash
# Runs an experiment on Kubernetes as a JobSet (jobset.yaml), one pod a host:
#
#   NAME=first IMAGE=my/agent_r1_jax HOSTS=2 CLAIM=shared DEVICES='{nvidia.com/gpu: 8}' \
#     launch/kubernetes.sh wikipedia.search --workdir=/shared/runs/first
#
# In the place of an experiment's name the path of a script (*.py) may stand, in IMAGE's
# checkout or on CLAIM. IMAGE is built from launch/Containerfile. CLAIM is a volume that all
# pods may write (ReadWriteMany), mounted at /shared: --workdir has to be there. Name, flags
# and workdir are checked here first, with this checkout (CHECK=no skips this).
#
# On TPUs DEVICES is '{google.com/tpu: 4}' and NODES the selector, such as
# '{cloud.google.com/gke-tpu-accelerator: tpu-v5-lite-podslice,
#   cloud.google.com/gke-tpu-topology: 4x4}'; other accelerators are tpu-v5p-slice,
# tpu-v6e-slice and tpu7x (2x2x1 is one host of four chips).
#
# A pod that has to go gets SIGTERM, all of them save, and the JobSet starts them again.
# DRY_RUN=1 prints what kubectl would be given; `kubectl delete jobset NAME` stops a run, saved.
set -euo pipefail
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/dry_run.sh
source launch/place.sh
: "${NAME:?is not set; it names the JobSet}" "${IMAGE:?is not set; it is what a pod runs}"
: "${CLAIM:?is not set; it names the volume}" "${DEVICES:?is not set; it counts those of a pod}"
: "${HOSTS:=1}" "${RESTARTS:=3}" "${NODES:={\}}"

# JSON's strings are YAML's.
ARGS=''
place "${1:?an experiment, or a script (*.py)}" "$caller"
check /shared "$@"
for arg in "$there" "${@:2}"; do
  arg=${arg//\\/\\\\}
  ARGS+="${ARGS:+, }\"${arg//\"/\\\"}\""
done
ARGS="[$ARGS]"

jobset=$(<launch/jobset.yaml)
for field in NAME RESTARTS HOSTS NODES IMAGE ARGS DEVICES CLAIM; do
  jobset=${jobset//"\${$field}"/"${!field}"}
done
run kubectl apply --filename=- <<<"$jobset"
if [[ ${DRY_RUN:-} ]]; then echo "$jobset"; fi
