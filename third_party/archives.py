"""Extracts archives that come from outside, and nothing out of their own folders.

It needs Python's standard library only, as fetch.py does.
"""

import gzip
import lzma
import os
import pathlib
import shutil
import stat
import sys
import tarfile
import zipfile
import zlib

SUFFIXES = ('.zip', '.tar', '.tar.gz', '.tgz')
# What the standard library raises for bytes that are no archive that it can read.
_DAMAGES = (
  *(zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, lzma.LZMAError),
  # RuntimeError is raised for an encrypted one, and for an unknown compression.
  *(EOFError, LookupError, RuntimeError, UnicodeError),
)


def find_folder(archive: pathlib.Path) -> pathlib.Path:
  """Returns where an archive is extracted to."""
  name = archive.name
  for suffix in SUFFIXES:
    name = name.removesuffix(suffix)
  return archive.with_name(name + '.extracted')


def extract(archive: pathlib.Path) -> bool:
  """Extracts an archive, all of it or nothing.

  Returns:
    Whether it was not extracted already.

  Raises:
    ValueError: It is damaged, or holds a link, a device, a file without a name or a path
      that leaves the folder.
    OSError: It cannot be read, or what it holds cannot be written.
  """
  folder = find_folder(archive)
  if folder.exists():
    return False
  part = folder.with_name(folder.name + '.part')
  shutil.rmtree(part, ignore_errors=True)
  try:
    part.mkdir()
    if archive.name.endswith('.zip'):
      with zipfile.ZipFile(archive) as zipped:
        for member in zipped.infolist():
          kind = stat.S_IFMT(member.external_attr >> 16)
          name, plain = member.filename, kind in (0, stat.S_IFREG, stat.S_IFDIR)
          _check(archive, name, plain, name.endswith('/'))
        _check_room(archive, part, sum(m.file_size for m in zipped.infolist()))
        zipped.extractall(part)
    else:
      with tarfile.open(archive) as tarred:
        # Python’s own check, too, where it has one: from 3.12 on it asks for a choice.
        if check := getattr(tarfile, 'data_filter', None):
          tarred.extraction_filter = check
        members = tarred.getmembers()
        for member in members:
          plain = member.isreg() or member.isdir()
          _check(archive, member.name, plain, member.isdir())
        _check_room(archive, part, sum(m.size for m in members))
        for member in members:  # Neither owners nor rights are taken over.
          member.mode = 0o755 if member.isdir() else 0o644
          member.uid, member.gid = os.getuid(), os.getgid()
          tarred.extract(member, part)
  except _DAMAGES as error:
    text = str(error) or type(error).__name__
    raise ValueError(f'{archive} is damaged ({text}): delete it and run again') from None
  except OSError as error:
    raise OSError(f'{archive} cannot be extracted: {error}') from None
  finally:
    if sys.exc_info()[0]:
      shutil.rmtree(part, ignore_errors=True)
  part.replace(folder)
  return True


def _check(archive: pathlib.Path, name: str, plain: bool, folder: bool) -> None:
  """Raises ValueError for a member that is no plain file in the archive's own folder."""
  path = pathlib.PurePosixPath(name.replace('\\', '/'))
  outside = path.is_absolute() or '..' in path.parts or ':' in path.parts[:1]
  # A folder may be '.', the archive's own; a file without a name has no place.
  if not plain or outside or not (folder or path.parts):
    raise ValueError(
      f'{archive}: nothing is extracted, for {name!r} is a link, a device, a file '
      'without a name or a path out of the folder'
    )


def _check_room(archive: pathlib.Path, folder: pathlib.Path, size: int) -> None:
  free = shutil.disk_usage(folder).free
  if size > free:
    raise OSError(f'{archive} holds {size:,} bytes, and the disk has {free:,} free')
