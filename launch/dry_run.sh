# Sourced by the launchers. `run COMMAND ARG...` runs it, or prints it where DRY_RUN is set:
# to the script's own standard output, also where the command's is captured.
# shellcheck shell=bash
exec 3>&1
run() {
  if [[ ${DRY_RUN:-} ]]; then
    local words
    printf -v words '%q ' "$@" # echoed whole: commands in the background print here too
    echo "${words% }" >&3
  else
    "$@"
  fi
}
