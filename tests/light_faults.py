"""Parts of first light that go wrong, for test_first_light.py; --part says how.

They import no JAX, so that they begin at once.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys

_FLAGS = dict(flag.removeprefix('--').split('=', 1) for flag in sys.argv[1:])


def write(**line) -> None:
  with pathlib.Path(_FLAGS['out'], 'lines.jsonl').open('a') as file:
    print(json.dumps({'part': _FLAGS['part']} | line), file=file)


write(what='before', measured=1.0, unit='s')
if _FLAGS['part'] == 'crashes':
  os.kill(os.getpid(), signal.SIGSEGV)
elif _FLAGS['part'] == 'hangs':
  # With a child, which must not outlive its part.
  child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])
  write(what='child', pid=child.pid)
  signal.pause()
elif _FLAGS['part'] == 'raises':
  raise RuntimeError('the driver is gone')
