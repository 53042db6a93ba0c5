#!/usr/bin/env bash
# Runs an experiment on this machine, in the project's environment (made if missing):
#
#   launch/local.sh miniwiki_search --workdir=runs/first
#
# Started again with the same workdir, a run goes on where it was.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ $# -eq 0 ]]; then
  echo "usage: launch/local.sh EXPERIMENT [FLAG...]; the experiments:" >&2
  for file in experiments/[a-z]*.py; do basename "$file" .py; done >&2
  exit 2
fi
name=$1
shift
make --silent "${VENV:=.venv}/installed"
# exec: SIGTERM and Ctrl-C reach Python, which saves a checkpoint.
exec "$VENV/bin/python" -m "experiments.$name" "$@"
