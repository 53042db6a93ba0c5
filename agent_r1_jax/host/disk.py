"""Explains errors of writing to disk, with remedies for users."""

from collections.abc import Iterator
import contextlib
import errno
import os
import pathlib
import shutil

_FULL = ('No space left on device', 'Disk quota exceeded', 'File too large')


def describe_failure(path: pathlib.Path, error: BaseException) -> str:
  """Returns why `path` could not be written, such as 'the disk is full (0.0 MB free)'.

  Call it before cleaning up, so that it reports the free space that the writer had.
  """
  if is_full(error):
    return f'the disk is full ({_free(path) / 1e6:.1f} MB free)'
  return getattr(error, 'strerror', None) or str(error)


def is_full(error: BaseException) -> bool:
  """Whether the error means that a disk or quota is full."""
  number = getattr(error, 'errno', None)
  return number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or any(
    text in str(error) for text in _FULL
  )


@contextlib.contextmanager
def explain_write_errors(path: str | os.PathLike, subject: str) -> Iterator[None]:
  """Gives an OSError inside `with` a message with the file, the cause and a remedy.

  `subject` is the first words of the message, such as 'The configuration'.

  Raises:
    OSError: An error with the same errno and that message.
  """
  try:
    yield
  except OSError as error:
    path = pathlib.Path(path)
    why = describe_failure(path, error)
    remedy = 'Make room' if is_full(error) else 'Remove the cause'
    raise OSError(
      error.errno or errno.EIO,
      f'{subject} could not be written to {path}: {why}. {remedy}, and start the '
      'same command again: it goes on from its last checkpoint',
    ) from None


def append(file, data: bytes) -> None:
  """Appends all of `data` to an unbuffered file, or nothing.

  A buffer would keep data that a full disk rejected, and write it again later.

  Raises:
    OSError: The data cannot be written; the file is unchanged.
  """
  end = os.fstat(file.fileno()).st_size
  try:
    if (file.write(data) or 0) < len(data):
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
  except OSError:
    file.truncate(end)
    file.seek(end)
    raise


def write_atomically(path: pathlib.Path, data: bytes) -> None:
  """Writes a file completely or not at all, even if the process is killed.

  Raises:
    OSError: The data cannot be written; an older file is unchanged.
  """
  unfinished = path.with_name(f'{path.name}.part')
  try:
    with unfinished.open('wb') as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    unfinished.replace(path)
  finally:
    unfinished.unlink(missing_ok=True)


def _free(path: pathlib.Path) -> int:
  """Returns the free bytes for this user on the disk of `path`."""
  while not path.exists():
    path = path.parent
  return shutil.disk_usage(path).free
