"""What cannot be written, said so that it can be mended."""

from collections.abc import Iterator
import contextlib
import errno
import os
import pathlib
import shutil

_FULL = ('No space left on device', 'Disk quota exceeded', 'File too large')


def describe_failure(path: pathlib.Path, error: Exception) -> str:
  """Why something could not be written at `path`: 'the disk is full (0.0 MB free)'.

  To be asked before anything is cleaned up, so that the free space is what the writing
  had.
  """
  if is_full(error):
    return f'the disk is full ({_free(path) / 1e6:.1f} MB free)'
  return getattr(error, 'strerror', None) or str(error)


def is_full(error: Exception) -> bool:
  """Whether it is for want of room."""
  number = getattr(error, 'errno', None)
  return number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or any(
    text in str(error) for text in _FULL
  )


@contextlib.contextmanager
def explain_write_errors(path: str | os.PathLike, what: str) -> Iterator[None]:
  """Around the writing of a file: an error of the system names file, cause and mend.

  Args:
    path: The file.
    what: Its content, for example 'the line of step 3'.

  Raises:
    OSError: Of the same number.
  """
  try:
    yield
  except OSError as error:
    path = pathlib.Path(path)
    why = describe_failure(path, error)
    mend = 'Make room' if is_full(error) else 'Mend that'
    raise OSError(
      error.errno or errno.EIO,
      f'{what} could not be written to {path}: {why}. {mend}, and start the '
      'same command again: it goes on from its last checkpoint',
    ) from None


def append(file, data: bytes) -> None:
  """Writes all of `data` at the end of an unbuffered file, or nothing.

  A buffer would hold what a full disk refuses, and try it again with what comes later.

  Raises:
    OSError: It cannot be written; the file is as it was.
  """
  end = os.fstat(file.fileno()).st_size
  try:
    if (file.write(data) or 0) < len(data):
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
  except OSError:
    file.truncate(end)
    file.seek(end)
    raise


def _free(path: pathlib.Path) -> int:
  """Bytes that this user may still write where `path` is, or would be."""
  while not path.exists():
    path = path.parent
  return shutil.disk_usage(path).free
