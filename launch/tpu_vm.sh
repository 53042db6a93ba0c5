#!/usr/bin/env bash
# Runs an experiment on all workers of a Cloud TPU slice, asked for as a queued resource:
#
#   NAME=first ZONE=us-west4-a TYPE=v5litepod-16 \
#     launch/tpu_vm.sh wikipedia.search --workdir=/shared/runs/first
#
# In the place of an experiment's name the path of a script (*.py) may stand, of the checkout
# or an absolute one on all workers. Name, flags and workdir are checked here before a slice is
# asked for (CHECK=no skips this). The last commit is copied to each worker and the environment
# made there; the workers find each other by the slice's metadata. --workdir has to be on
# storage that all of them mount at this place: SETUP is a command that each runs first, to
# mount it and, where the image has no Python 3.11 to 3.13, to install one.
#
# PRICE=--spot        the default; or --reserved, --guaranteed.
# FLEX_START=8h       in place of PRICE: Flex-start, for at most so long at a time (7d at most).
# SLICES=2            several slices of this TYPE, connected by the data centre's network.
# RUNTIME=...         the image; by default the one that Google names for the TYPE:
#                     v5litepod-N (v5e), v5p-N, v6e-N, v4-N. Cloud TPU's API has no TPU7x:
#                     launch/kubernetes.sh on GKE has.
#
# A slice that is taken away, or whose time is over, is asked for again until the run ends:
# leave this running (tmux). A request that fails is deleted. The output is
# agent_r1_jax/run.log on each worker. The slice stays until you delete it:
#
#   gcloud compute tpus queued-resources delete NAME --zone=ZONE --force
set -euo pipefail
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/dry_run.sh
source launch/place.sh
: "${NAME:?is not set; NAME=first, say, names the slice}"
: "${ZONE:?is not set; ZONE=us-west4-a, say}" "${TYPE:?is not set; TYPE=v5litepod-16, say}"
if [[ ! ${RUNTIME:-} ]]; then
  case $TYPE in
    v5litepod-*) RUNTIME=v2-alpha-tpuv5-lite ;;
    v5p-*) RUNTIME=v2-alpha-tpuv5 ;;
    v6e-*) RUNTIME=v2-alpha-tpuv6e ;;
    v4-*) RUNTIME=tpu-ubuntu2204-base ;;
    tpu7x*) echo "launch: Cloud TPU's API has no $TYPE; launch/kubernetes.sh on GKE has" >&2; exit 2 ;;
    *) echo "launch: which image has a $TYPE? Set RUNTIME" >&2; exit 2 ;;
  esac
fi
if [[ ${SLICES:-1} -gt 1 ]]; then
  nodes=("--node-count=$SLICES" "--node-prefix=$NAME")
  group=queued-resources
  workers=(--node=all --worker=all)
else
  nodes=("--node-id=$NAME")
  group=tpu-vm
  workers=(--worker=all)
fi
track=() # of gcloud: only alpha has Flex-start
price=("${PRICE:---spot}")
if [[ ${FLEX_START:-} ]]; then
  track=(alpha)
  price=(--provisioning-model=flex-start "--max-run-duration=$FLEX_START")
fi

tpus() { run gcloud "${track[@]}" compute tpus "$@" "--zone=$ZONE"; }
describe() { tpus queued-resources describe "$NAME" "--format=value($1)" 2>/dev/null || true; }

# Returns when there is a slice.
provide() {
  while :; do
    case $(describe state.state) in
      ACTIVE) return ;;
      '')
        tpus queued-resources create "$NAME" "${nodes[@]}" "--accelerator-type=$TYPE" \
          "--runtime-version=$RUNTIME" "${price[@]}"
        [[ ${DRY_RUN:-} ]] && return
        ;;
      SUSPENDED) tpus queued-resources delete "$NAME" --force --quiet ;;
      FAILED)
        echo "launch: the request failed and is deleted: $(describe state.failedData.error)" >&2
        tpus queued-resources delete "$NAME" --force --quiet
        exit 1
        ;;
      *) sleep 30 ;;
    esac
  done
}

place "${1:?an experiment, or a script (*.py)}" "$caller"
committed
check / "$@"
checkout=$(mktemp --suffix=.tar)
trap 'rm "$checkout"' EXIT
run git archive --output="$checkout" HEAD
printf -v experiment '%q ' "$there" "${@:2}"
command="${SETUP:-true} && mkdir -p agent_r1_jax && cd agent_r1_jax && \
tar -xf ../checkout.tar && AGENT_R1_PROCESSES=auto EXTRA=tpu RESTARTS=${RESTARTS:-3} \
launch/local.sh $experiment>>run.log 2>&1"
while :; do
  provide
  tpus "$group" scp "$checkout" "$NAME:checkout.tar" "${workers[@]}" &&
    tpus "$group" ssh "$NAME" "${workers[@]}" "--command=$command" && exit
  sleep 120 # a slice that is being taken away is called ACTIVE for a while yet
  [[ $(describe state.state) == ACTIVE ]] && exit 1
done
