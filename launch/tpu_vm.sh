#!/usr/bin/env bash
# Runs an experiment on all workers of a Cloud TPU slice, asked for as a queued resource:
#
#   NAME=first ZONE=us-west4-a TYPE=v5litepod-16 RUNTIME=v2-alpha-tpuv5-lite \
#     launch/tpu_vm.sh wikipedia.search --workdir=/shared/runs/first
#
# In the place of an experiment's name the path of a script (*.py) may stand, of the checkout
# or an absolute one on all workers. The last commit is copied to each worker and the
# environment made there; the workers find
# each other by the slice's metadata. --workdir has to be on storage that all of them mount
# at this place: SETUP is a command that each runs first, to mount it and, where the image
# has no Python 3.11 or 3.12, to install one. PRICE=--spot (default), --reserved, --guaranteed.
#
# A slice that is taken away is asked for again until the run ends: leave this running (tmux).
# The output is agent_r1_jax/run.log on each worker. The slice stays until you delete it:
#
#   gcloud compute tpus queued-resources delete NAME --zone=ZONE --force
set -euo pipefail
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/dry_run.sh
source launch/place.sh
: "${NAME:?of the slice}" "${ZONE:?}" "${TYPE:?such as v5litepod-16}" "${RUNTIME:?image}"

tpus() { run gcloud compute tpus "$@" "--zone=$ZONE"; }
state() { tpus queued-resources describe "$NAME" --format='value(state.state)' 2>/dev/null || true; }

# Returns when there is a slice.
provide() {
  while :; do
    case $(state) in
      ACTIVE) return ;;
      '')
        tpus queued-resources create "$NAME" "--node-id=$NAME" "--accelerator-type=$TYPE" \
          "--runtime-version=$RUNTIME" "${PRICE:---spot}"
        [[ ${DRY_RUN:-} ]] && return
        ;;
      SUSPENDED) tpus queued-resources delete "$NAME" --force --quiet ;;
      FAILED) echo 'the request failed: see queued-resources describe' >&2; exit 1 ;;
      *) sleep 30 ;;
    esac
  done
}

place "${1:?an experiment, or a script (*.py)}" "$caller"
committed
checkout=$(mktemp --suffix=.tar)
trap 'rm "$checkout"' EXIT
run git archive --output="$checkout" HEAD
printf -v experiment '%q ' "$there" "${@:2}"
command="${SETUP:-true} && mkdir -p agent_r1_jax && cd agent_r1_jax && \
tar -xf ../checkout.tar && AGENT_R1_PROCESSES=auto EXTRA=tpu RESTARTS=${RESTARTS:-3} \
launch/local.sh $experiment>>run.log 2>&1"
while :; do
  provide
  tpus tpu-vm scp "$checkout" "$NAME:checkout.tar" --worker=all &&
    tpus tpu-vm ssh "$NAME" --worker=all "--command=$command" && exit
  sleep 120 # a slice that is being taken away is called ACTIVE for a while yet
  [[ $(state) == ACTIVE ]] && exit 1
done
