"""Lets tests use the packages of an environment of its own, made by `make test-with-X`.

They come after this environment's packages, so that what both have is this one's.
"""

import os
import subprocess
import sys

PYTHON = os.environ.get('PACKAGE_PYTHON')
_RUN = 'import sys; sys.path.append(sys.argv.pop(1)); import pytest; '
_RUN += 'sys.exit(pytest.main(sys.argv[1:]))'


def has(name: str) -> bool:
  """Whether there is such an environment, and it has the package.

  Some packages want a newer Python than this one: their environment is then empty.
  """
  command = [str(PYTHON), '-c', f'import {name}']
  return bool(PYTHON) and not subprocess.run(command, capture_output=True).returncode


def site_packages() -> str:
  """Returns the folder of the packages."""
  code = 'import sysconfig; print(sysconfig.get_path("purelib"))'
  return subprocess.check_output([str(PYTHON), '-c', code], text=True).strip()


def run_tests(*arguments: str) -> str:
  """Runs tests in a process that has the packages; returns pytest's last line."""
  command = [sys.executable, '-c', _RUN, site_packages(), '-q', *arguments]
  done = subprocess.run(command, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
  return done.stdout.strip().splitlines()[-1]
