"""Results of long measurements in a file of JSON lines, each written once it is known."""

from collections.abc import Mapping
import json
import os
import pathlib
from typing import Any
import warnings


def add(path: str | os.PathLike, line: Mapping[str, Any]) -> None:
  """Appends a line; several processes may write to the same file."""
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  # A kill may have truncated the line before: this one must not be joined to it. One call
  # to write appends the line as a whole, whoever else writes.
  with open(path, 'ab', buffering=0) as file:
    file.write(f'\n{json.dumps(line)}\n'.encode())
    os.fsync(file.fileno())


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Reads the lines, oldest first; skips what was truncated, with a warning."""
  path, lines = pathlib.Path(path), []
  text = path.read_text(encoding='utf-8') if path.exists() else ''
  for number, line in enumerate(text.splitlines(), 1):
    try:
      lines += [json.loads(line)] if line else []
    except ValueError:
      warnings.warn(
        f'{path}: line {number} is no JSON and is left out; the process that wrote it '
        'was probably killed, and what the line held is measured again.',
        stacklevel=2,
      )
  return lines


def contains(path: str | os.PathLike, key: Mapping[str, Any]) -> bool:
  """Returns whether a line has all fields of `key`."""
  return any(key.items() <= line.items() for line in read(path))
