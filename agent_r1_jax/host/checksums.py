"""Checksums of a folder's files, which detect damaged files.

Checksums are over files, not arrays, so that sharding does not matter, all files are
covered, and no device waits. CRC-32 detects single flipped bits and bursts of up to 32
bits, at gigabytes per second. It does not detect deliberate changes.
"""

from collections.abc import Callable, Collection, Sequence
import json
import pathlib
import zlib

from agent_r1_jax.host import disk

_NAME = 'checksums.json'


def write(folder: pathlib.Path, exclude: Collection[str] = ()) -> None:
  """Writes the sizes and checksums of all files in a folder to checksums.json in it."""
  sums = {}
  for path in sorted(folder.rglob('*')):
    name = str(path.relative_to(folder))
    if path.is_file() and name not in exclude:
      sums[name] = _checksum(path)
  disk.write_atomically(folder / _NAME, json.dumps(sums).encode())


def find_mismatch(
  folder: pathlib.Path, share: Callable[[int], Sequence[int]] = range
) -> str:
  """Describes the first file that differs from its checksum, or returns ''.

  A folder without checksums counts as different. Files that were added later are ignored.

  `share` maps the number of files to the indices of the files that this process checks.
  """
  if not (folder / _NAME).exists():
    return f'{_NAME} is missing, so it is not known whether the other files are intact'
  try:
    sums = json.loads((folder / _NAME).read_text())
    # The largest first, so that all processes read about the same amount.
    names = sorted(sums, key=lambda name: (-sums[name][0], name))
    for i in share(len(names)):
      if not (folder / names[i]).is_file():
        return f'{names[i]} is missing'
      if _checksum(folder / names[i]) != sums[names[i]]:
        return f'{names[i]} is not what was written: its checksum differs'
  except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
    return f'{_NAME} cannot be read: {error}'
  return ''


def _checksum(path: pathlib.Path) -> list[int]:
  """Returns the size and the CRC-32 of a file."""
  size = checksum = 0
  with path.open('rb') as file:
    while block := file.read(1 << 22):
      size, checksum = size + len(block), zlib.crc32(block, checksum)
  return [size, checksum]
