"""The files of a saved index, replaced one by one and read together."""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import shutil
import tempfile

# Exists while files are replaced; if it remains, a save was cut off halfway.
_UNFINISHED = 'unfinished'
_NEW = '.new-'  # The prefix of folders with new files.


@contextlib.contextmanager
def replace(directory: str | os.PathLike) -> Iterator[pathlib.Path]:
  """Yields a folder for new files, which at the end replace files of the same names.

  Files that another index has memory-mapped stay valid, without a name.
  """
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  for left in directory.glob(f'{_NEW}*'):  # From a killed save.
    shutil.rmtree(left, ignore_errors=True)
  with tempfile.TemporaryDirectory(prefix=_NEW, dir=directory) as folder:
    yield pathlib.Path(folder)
    mark = directory / _UNFINISHED
    mark.touch()
    for path in pathlib.Path(folder).iterdir():
      os.replace(path, directory / path.name)
    mark.unlink()


def check(directory: str | os.PathLike) -> None:
  """Raises ValueError if the files are from different saves."""
  if pathlib.Path(directory, _UNFINISHED).exists():
    raise ValueError(f'{directory}: a save of this index was cut off; save it again.')
