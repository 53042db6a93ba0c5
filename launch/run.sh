#!/usr/bin/env bash
# Runs an experiment, or a script of yours; every launcher ends here, on each of its hosts:
#
#   launch/run.sh miniwiki.search --workdir=runs/first   # in the checkout
#   launch/run.sh path/to/mine.py --workdir=runs/mine    # in the folder where you are
#
# A name that ends in .py is the path of a script, seen from the folder where you are; as
# with `python path/to/mine.py`, relative paths in its flags are too. It imports this
# checkout's agent_r1_jax.
#
# RESTARTS=3  start it again, at most so often, when it ends with 75 (preempted and saved:
#             start me again) or fails: with the same workdir it goes on. Default: 0.
# PAUSE=5     seconds before that.
# --check     before the name: check the name and the flags on this machine, and run nothing.
#             --check=/shared: the workdir has to be in that folder, too.
# PYTHON=...  the interpreter; default: the checkout's .venv if it has one, else python3.
# DRY_RUN=1   print the command, run nothing.
#
# SIGTERM and Ctrl-C reach Python as SIGTERM: it saves and ends, and is not started
# again. Never `exec`s, so that it also serves as a container's PID 1: the kernel keeps from
# a PID 1 every signal that it has no handler for, and orphans are left to it to reap.
set -uo pipefail
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
source launch/dry_run.sh

usage() {
  echo "usage: launch/run.sh [--check] EXPERIMENT|SCRIPT.py [FLAG...]; the experiments:" >&2
  grep --files-with-matches '^  app\.run(' experiments/*.py experiments/*/*.py |
    sed 's|^experiments/||; s|/__main__||; s|\.py$||; s|/|.|g' >&2
  exit 2
}
[[ $# -gt 0 ]] || usage
only_check=''
if [[ $1 == --check || $1 == --check=* ]]; then
  only_check=$1
  shift
  [[ $# -gt 0 ]] || usage
fi
checker=$PWD/launch/check.py
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
name=$1
shift
if [[ $name == *.py ]]; then
  script=$name
  [[ $script == /* ]] || script=$caller/$script
  [[ -f $script ]] || { echo "launch/run.sh: there is no file $script" >&2; exit 2; }
  [[ $python == */* && $python != /* ]] && python=$PWD/$python
  export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
  cd "$caller" || exit
  target=("$script")
else
  path=experiments/${name//.//}
  [[ -f $path.py || -f $path/__main__.py ]] || { echo "no experiment is called $name" >&2; usage; }
  target=(-m "experiments.$name")
fi
command=("$python")
[[ $only_check ]] && command+=("$checker" "$only_check")
command+=("${target[@]}" "$@")
if [[ ${DRY_RUN:-} ]]; then
  run "${command[@]}"
  exit
fi

stopped=''
forwarded=''
forward() { stopped=yes forwarded=yes; kill -TERM "${!:-}" 2>/dev/null; }
trap forward TERM INT

# Waits for the last background command; `wait` alone ends early when a signal comes.
finish() {
  while forwarded=''; wait "$!"; status=$?; [[ $forwarded ]]; do :; done
}

for ((left = ${RESTARTS:-0}; ; left--)); do
  "${command[@]}" <&0 & # a debugger may want the terminal
  [[ $stopped ]] && forward # the signal came before there was a child to have it
  finish
  ended=$status
  [[ $ended -eq 0 || $stopped || $left -le 0 ]] && exit "$ended"
  echo "launch/run.sh: $name ended with $ended; $left restarts left" >&2
  sleep "${PAUSE:-5}" &
  [[ $stopped ]] && forward # as above
  finish
  [[ $stopped ]] && exit "$ended"
done
