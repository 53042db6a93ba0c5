"""Checksums of a folder's files: whether they are what was written, to the last bit.

They are of files and not of arrays. So they hold for every layout of the arrays over
devices and processes, and for what lies beside the arrays; and no device waits for them.
CRC-32 sees each flipped bit and each burst of up to 32, at gigabytes a second; it is no
protection from someone who changes the checksums too.
"""

from collections.abc import Callable, Collection, Sequence
import json
import logging
import os
import pathlib
import zlib

_NAME = 'checksums.json'


def write(folder: pathlib.Path, but: Collection[str] = ()) -> None:
  """Writes the sizes and checksums of all files in a folder into it.

  Args:
    folder: With folders in it, or without.
    but: Files that will still change.
  """
  found = [path for path in sorted(folder.rglob('*')) if path.is_file()]
  sums = {str(path.relative_to(folder)): _sum(path) for path in found}
  sums = {name: value for name, value in sums.items() if name not in but}
  with (folder / _NAME).open('w') as file:
    file.write(json.dumps(sums))
    file.flush()
    os.fsync(file.fileno())


def find_mismatch(
  folder: pathlib.Path, share: Callable[[int], Sequence[int]] = range
) -> str:
  """What differs in a folder from what `add` found there, or ''.

  A folder without checksums, of an earlier version, is taken as it is, and the log says
  so. Files that came later are not looked at.

  Args:
    folder: Of `add`.
    share: The number of files -> the places of those to read here, where several
      processes share the work.
  """
  if not (folder / _NAME).exists():
    logging.getLogger(__name__).warning(
      '%s has no checksums: nobody can say whether it is as it was written', folder
    )
    return ''
  try:
    sums = json.loads((folder / _NAME).read_text())
    # The largest first, so that all processes have as much to read.
    names = sorted(sums, key=lambda name: (-sums[name][0], name))
    for i in share(len(names)):
      if not (folder / names[i]).is_file():
        return f'{names[i]} is missing'
      if _sum(folder / names[i]) != sums[names[i]]:
        return f'{names[i]} is not what was written: its checksum differs'
  except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
    return f'{_NAME} cannot be read: {error}'
  return ''


def _sum(path: pathlib.Path) -> list[int]:
  """The size and the CRC-32 of a file."""
  size = checksum = 0
  with path.open('rb') as file:
    while block := file.read(1 << 22):
      size, checksum = size + len(block), zlib.crc32(block, checksum)
  return [size, checksum]
