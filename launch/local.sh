#!/usr/bin/env bash
# Runs an experiment, or a script of yours, on this machine, in the project's environment
# (made if missing):
#
#   launch/local.sh miniwiki.search --workdir=runs/first
#   launch/local.sh path/to/mine.py --workdir=runs/mine
#   EXTRA=cuda launch/local.sh miniwiki.search --workdir=runs/first   # or tpu
#
# Started again with the same workdir, a run goes on where it was. `launch/local.sh --check
# NAME FLAG...` checks the flags only. What else can be said: launch/run.sh.
set -euo pipefail
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
checkout=$PWD
source launch/dry_run.sh

VENV=${VENV:-.venv}
run make --silent "VENV=$VENV" "EXTRA=${EXTRA:-}" "$VENV/installed"
cd "$caller"
PYTHON=$VENV/bin/python exec "$checkout/launch/run.sh" "$@"
