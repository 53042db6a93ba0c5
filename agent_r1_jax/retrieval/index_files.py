"""The files of a saved index, which are replaced one by one and read as a whole."""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import shutil
import tempfile

# There while files are replaced: where it stays, a save was cut off between two of them.
_UNFINISHED = 'unfinished'
_NEW = '.new-'  # How the names of folders with new files begin.


@contextlib.contextmanager
def replace(directory: str | os.PathLike) -> Iterator[pathlib.Path]:
  """Gives a folder for new files, which at the end replace those of their names.

  Files that another index has mapped into memory stay as they are, without a name.
  """
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  for left in directory.glob(f'{_NEW}*'):  # By a save that was killed.
    shutil.rmtree(left, ignore_errors=True)
  with tempfile.TemporaryDirectory(prefix=_NEW, dir=directory) as folder:
    yield pathlib.Path(folder)
    mark = directory / _UNFINISHED
    mark.touch()
    for path in pathlib.Path(folder).iterdir():
      os.replace(path, directory / path.name)
    mark.unlink()


def check(directory: str | os.PathLike) -> None:
  """Raises ValueError if some of the files are old ones."""
  if pathlib.Path(directory, _UNFINISHED).exists():
    raise ValueError(f'{directory}: a save of this index was cut off; save it again.')
