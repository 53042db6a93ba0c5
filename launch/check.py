"""Checks the flags and the workdir of a run on this machine, and runs nothing.

  launch/run.sh --check=/shared wikipedia.search --workdir=/shared/runs/first

run.sh calls it as `check.py --check=FOLDER SCRIPT.py FLAG...`, or with `-m MODULE`
instead of the script. The script parses its flags as it would in the run and ends where
absl would call its main. Then the values of its configuration are checked, and that
--workdir, if the script has such a flag, is in the folder; without a folder it may be
anywhere.
"""

import os
import pathlib
import runpy
import sys

from absl import flags


def main(folder: str, *command: str) -> None:
  """Ends with a message for what the run would refuse, or its machines would lose."""
  is_module = command[0] == '-m'
  name, *arguments = command[is_module:]
  sys.path[0] = os.getcwd() if is_module else str(pathlib.Path(name).parent)
  if not is_module and 'app.run(' not in pathlib.Path(name).read_text():
    # Without absl nothing would stop it before its work.
    print(f'launch: {name} does not call absl.app.run: its flags are not checked')
    return
  sys.argv = [name, '--only_check_args', *arguments]
  try:
    if is_module:
      runpy.run_module(name, run_name='__main__', alter_sys=True)
    else:
      runpy.run_path(name, run_name='__main__')
  except SystemExit as end:
    if end.code:
      raise
  for flag in flags.FLAGS:
    check = getattr(flags.FLAGS[flag].value, 'check', None)
    try:
      if check:
        check()
    except ValueError as error:
      sys.exit(f'{flag}: {error}')
  if folder and 'workdir' in flags.FLAGS:
    _check_workdir(flags.FLAGS['workdir'].value or '', folder)


def _check_workdir(workdir: str, folder: str) -> None:
  path = pathlib.Path(os.path.normpath(workdir))
  if path.is_absolute() and path.is_relative_to(folder):
    return
  where = 'an absolute path' if folder == '/' else f'in {folder}'
  sys.exit(
    f'--workdir is {workdir!r}; it has to be {where}, on storage that all machines of '
    'the run see and that stays when they are taken away.'
  )


if __name__ == '__main__':
  main(sys.argv[1].removeprefix('--check').removeprefix('='), *sys.argv[2:])
