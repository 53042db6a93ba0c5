#!/usr/bin/env bash
# Runs an experiment on spot machines by SkyPilot, which moves it when they are taken away:
#
#   BUCKET=gs://my-bucket launch/sky.sh wikipedia.search --workdir=/shared/runs/first
#   BUCKET=... SKY='--num-nodes=2 --gpus=A100:8' launch/sky.sh ...
#
# In the place of an experiment's name the path of a script (*.py) may stand, of the checkout
# (which is copied) or in /shared. BUCKET is mounted at /shared on all machines: --workdir has
# to be there, or what is moved begins anew. SKY holds options of `sky jobs launch`; what it
# runs is in sky.yaml. Name, flags and workdir are checked here first (CHECK=no skips this).
set -euo pipefail
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/dry_run.sh
source launch/place.sh
: "${BUCKET:?is not set; BUCKET=gs://my-bucket, say, is the storage for /shared}"

place "${1:?an experiment, or a script (*.py)}" "$caller"
check /shared "$@"
printf -v experiment '%q ' "$there" "${@:2}"
read -ra options <<<"${SKY:-}"
run sky jobs launch --yes --detach-run "--env=BUCKET=$BUCKET" "--env=RUN=$experiment" \
  "${options[@]}" launch/sky.yaml
