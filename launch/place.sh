# Sourced by the launchers of other machines, in the checkout. `place NAME CALLER` sets
# `there` to what NAME, said in the folder CALLER, is called on those machines, whose
# launch/run.sh starts in their copy of the checkout: an experiment by its name, a script
# (*.py) of this checkout by its path in it, any other script by its absolute path.
# `committed` and `check FOLDER "$@"` then refuse here what would fail there.
# shellcheck shell=bash
place() {
  there=$1
  [[ $1 == *.py ]] || return 0
  local file=$1 root folder
  [[ $file == /* ]] || file=$2/$file
  if [[ -f $file ]]; then
    root=$(pwd -P)
    folder=$(cd "${file%/*}" && pwd -P)
    there=$folder/${file##*/}
    if [[ $there == "$root"/* ]]; then
      there=${there#"$root"/}
      return 0
    fi
  fi
  if [[ $1 != /* ]]; then
    echo "launch: $file is no file of this checkout, which is all that is copied. Put it" \
      "there, or give the absolute path at which every machine has it" >&2
    return 2
  fi
  echo "launch: $1 is outside the checkout and is not copied: every machine has to have it" \
    "at this path" >&2
  there=$1
}

# Checks that a script of the checkout is in the last commit, where that is what is copied.
committed() {
  [[ $there == *.py && $there != /* ]] || return 0
  run git cat-file -e "HEAD:$there" 2>/dev/null && return 0
  echo "launch: $there is not in the last commit, which is what is copied: commit it" >&2
  return 2
}

# Checks the experiment or script `there`, its flags, and that its workdir is in FOLDER if
# that is not empty. The environment is made here if it is missing. CHECK=no skips this.
check() {
  [[ ${CHECK:-yes} != no ]] || return 0
  if [[ $there == /* && ! -f $there ]]; then
    echo "launch: $there is not on this machine: its flags and --workdir are not checked" >&2
    return 0
  fi
  RESTARTS=0 launch/local.sh "--check=$1" "$there" "${@:3}" && return 0
  local status=$?
  echo "launch: nothing was started. CHECK=no starts without this check" >&2
  return "$status"
}
