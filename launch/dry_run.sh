# Sourced by the launchers. `run COMMAND ARG...` runs it, or prints it where DRY_RUN is set:
# to the script's own standard output, also where the command's is captured.
# shellcheck shell=bash
exec 3>&1
run() {
  if [[ ${DRY_RUN:-} ]]; then
    printf '%q ' "$@" >&3
    echo >&3
  else
    "$@"
  fi
}
