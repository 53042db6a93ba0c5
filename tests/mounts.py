"""Small file systems of their own, to be filled."""

from collections.abc import Iterator
import contextlib
import pathlib
import subprocess

import pytest


@contextlib.contextmanager
def mounted(path: pathlib.Path, options: str) -> Iterator[pathlib.Path]:
  """A file system in memory at `path`; the test skips where none can be mounted."""
  path.mkdir(parents=True, exist_ok=True)
  command = ['mount', '-t', 'tmpfs', '-o', options, 'tmpfs', str(path)]
  try:
    subprocess.run(command, check=True, capture_output=True)
  except (OSError, subprocess.CalledProcessError) as error:
    pytest.skip(f'no file system can be mounted here: {error}')
  try:
    yield path
  finally:
    subprocess.run(['umount', '--lazy', str(path)], check=True)


def fill(folder: pathlib.Path) -> pathlib.Path:
  """Leaves no room where `folder` is; whoever deletes the file makes room again."""
  path = folder / 'filler'
  with open(path, 'wb', buffering=0) as file, contextlib.suppress(OSError):
    while file.write(bytes(4096)):
      pass
  return path
