"""Starts programs from a process that has imported what most of them import.

A start of Python with the package costs 2 to 3 seconds of a processor, a fork some
hundredths of one. What comes over the socket is [command after `python`, folder,
environment] with three files: standard output, standard error, and a pipe that gets a
line with the program's number and, at its end, a line with its exit status. The program
runs at this file's top level, so that it ends as any other does.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import socket
import sys
import types
import warnings

_PRELOADED = (
  'agent_r1_jax.agent.chat',
  'agent_r1_jax.train',
  'jinja2.sandbox',
  'jsonschema',
  'matplotlib.figure',
  'ml_collections.config_flags',
  'scipy.stats',
  'transformers.models.auto.tokenization_auto',
)


def serve(server: socket.socket):
  """Returns in each program's process with what it was asked for; None at the end."""
  sockets = [server]
  while True:
    for ready in select.select(sockets, [], [])[0]:
      if ready is server:
        sockets.append(server.accept()[0])
        continue
      request, files, *_ = socket.recv_fds(ready, 1 << 20, 3)
      if request:
        preload()
        if asked := _fork(request, files, sockets):
          return asked
        continue
      sockets.remove(ready)
      ready.close()
      if sockets == [server]:
        with contextlib.suppress(ChildProcessError):
          while True:
            os.wait()
        return None


@functools.cache
def preload():
  """Imports what programs import; not before there is one."""
  for name in _PRELOADED:
    importlib.import_module(name)
  gc.freeze()  # What was imported stays: no collection of a fork looks at it.


def _fork(request: bytes, files: list[int], sockets: list[socket.socket]):
  """Returns in the program's process with what it was asked for, else None."""
  with warnings.catch_warnings():
    # Threads of libraries wait for work at a fork, and hold nothing.
    warnings.simplefilter('ignore', DeprecationWarning)
    if os.fork() == 0:
      if (program := os.fork()) == 0:
        for each in sockets:
          each.close()
        os.dup2(files[0], 1)
        os.dup2(files[1], 2)
        for file in files:
          os.close(file)
        return json.loads(request)
      for file in files[:2]:
        os.close(file)
      _report(program, files[2])
  for file in files:
    os.close(file)
  return None


def _report(program: int, file: int):
  os.closerange(0, 3)
  os.write(file, b'%d\n' % program)
  status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
  os.write(file, b'%d\n' % status)
  os._exit(0)


def prepare(command: list[str], folder: str, environment: dict[str, str], before: list):
  """Makes this process what `python command` would have been."""
  import jax

  os.chdir(folder)
  told = {k: v for k, v in environment.items() if os.environ.get(k) != v}
  os.environ.clear()
  os.environ.update(environment)
  for name, text in told.items():
    # JAX has read its environment when it was imported.
    if name.startswith('JAX_') and (option := name.lower()) in jax.config.values:
      convert = {bool: lambda x: bool(int(x)), int: int, float: float}
      kind = type(jax.config.values[option])
      jax.config.update(option, convert.get(kind, str)(text))
  sys.argv = command[1:] if command[0] in ('-m', '-c') else command
  first = folder if command[0] == '-m' else os.path.dirname(command[0])
  paths = environment.get('PYTHONPATH', '').split(os.pathsep)
  sys.path[:] = ['' if command[0] == '-c' else first, *filter(None, paths), *before]


if __name__ == '__main__':
  _paths = os.environ['PYTHONPATH'].split(os.pathsep)
  _before = [path for path in sys.path[1:] if path not in _paths]
  os.environ['TRANSFORMERS_NO_ADVISORY_WARNINGS'] = '1'
  _asked = serve(socket.socket(fileno=int(sys.argv[1])))
  if _asked:
    prepare(*_asked, _before)
    if _asked[0][0] == '-m':
      runpy.run_module(_asked[0][1], run_name='__main__', alter_sys=True)
    elif _asked[0][0] == '-c':
      sys.argv[0] = '-c'
      sys.modules['__main__'] = types.ModuleType('__main__')
      exec(compile(_asked[0][1], '<string>', 'exec'), vars(sys.modules['__main__']))
    else:
      runpy.run_path(_asked[0][0], run_name='__main__')
