#!/usr/bin/env bash
# Runs an experiment on this machine, in the project's environment (made if missing):
#
#   launch/local.sh miniwiki_search --workdir=runs/first
#   EXTRA=cuda launch/local.sh miniwiki_search --workdir=runs/first   # or tpu
#
# Started again with the same workdir, a run goes on where it was. What else can be said:
# launch/run.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/dry_run.sh

VENV=${VENV:-.venv}
run make --silent "VENV=$VENV" "EXTRA=${EXTRA:-}" "$VENV/installed"
PYTHON=$VENV/bin/python exec launch/run.sh "$@"
