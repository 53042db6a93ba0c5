"""Runs a script several times in one process, which imports, traces and compiles once.

  python tests/in_turn.py MODULE '[["--flag=1"], ["--flag=2"]]'

Its flags have their defaults again each time. After each run, a line on standard output
and one on standard error have a zero byte and the exit status.
"""

import json
import runpy
import sys

from absl import flags


def forget():
  """Gives flags of modules their defaults again; the script will define its own anew."""
  modules = {
    f.name: m for m, own in flags.FLAGS.flags_by_module_dict().items() for f in own
  }
  for name in [*flags.FLAGS]:
    if modules.get(name.partition('.')[0]) in sys.modules and '.' not in name:
      flags.FLAGS[name].unparse()
    else:
      delattr(flags.FLAGS, name)


def run(module: str, arguments: list[str]) -> int:
  """Returns the exit status of `python -m module ...`."""
  sys.argv[1:] = arguments
  try:
    runpy.run_module(module, run_name='__main__', alter_sys=True)
    return 0
  except SystemExit as end:
    if isinstance(end.code, str):
      print(end.code, file=sys.stderr)
    return int(end.code is not None) if isinstance(end.code, str) else end.code or 0
  except BaseException:
    sys.excepthook(*sys.exc_info())
    return 1
  finally:
    forget()


if __name__ == '__main__':
  _module, _commands = sys.argv[1:]
  for _command in json.loads(_commands):
    status = run(_module, _command)
    for file in (sys.stdout, sys.stderr):
      print(f'\0{status}', file=file, flush=True)
