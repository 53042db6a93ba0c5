"""Writes a run's metrics to metrics.jsonl, and reads them.

metrics.drop_lines(workdir, resume_step=start)
for step in range(start, steps):
  ...
  metrics.write(workdir, step, {'reward': 0.4, 'em': 0.3})
lines = metrics.read(workdir)
"""

from collections.abc import Mapping
import io
import json
import math
import os
import pathlib
from typing import Any, SupportsFloat

from agent_r1_jax.host import disk


def write(
  workdir: str | os.PathLike, step: int, values: Mapping[str, SupportsFloat]
) -> None:
  """Appends a line to `<workdir>/metrics.jsonl`; it is on disk when this returns.

  The line is a JSON object with 'step' and the metrics. JSON has no NaN and no infinity:
  they become the strings 'nan', 'inf' and '-inf', which `read` converts back. A step may
  have several lines.

  Raises:
    OSError: The line cannot be written; the file is unchanged.
  """
  path, numbers = _file(workdir), {name: float(value) for name, value in values.items()}
  line = {name: v if math.isfinite(v) else str(v) for name, v in numbers.items()}
  text = json.dumps({'step': int(step)} | line, allow_nan=False) + '\n'
  with disk.explain_write_errors(path, f'The line of step {step}'):
    with io.FileIO(path, 'a') as file:
      disk.append(file, text.encode())


def drop_lines(workdir: str | os.PathLike, resume_step: float) -> None:
  """Drops the lines of `resume_step` and later, and an incomplete last line.

  A killed run wrote them after its last checkpoint. The file is rewritten atomically, and
  created if missing.
  """
  path = _file(workdir)
  with disk.explain_write_errors(path, 'The lines before this start'):
    path.touch()
    complete = path.read_bytes().splitlines()[: len(read(path.parent))]
    earlier = [line for line in complete if json.loads(line)['step'] < resume_step]
    disk.write_atomically(path, b''.join(line + b'\n' for line in earlier))


def read(workdir: str | os.PathLike) -> list[dict[str, Any]]:
  """Reads `<workdir>/metrics.jsonl`, except an incomplete last line.

  Raises:
    FileNotFoundError: There is no such file.
    ValueError: A line before the last is broken; the error has its number.
  """
  path = _file(workdir)
  lines = path.read_text(encoding='utf-8', errors='replace').splitlines()
  rows = []
  for number, line in enumerate(lines, start=1):
    try:
      row = json.loads(line)
      rows.append({'step': int(row.pop('step'))} | {k: float(v) for k, v in row.items()})
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
      if number < len(lines):
        raise ValueError(
          f'{path}, line {number} is no line of metrics: {error}'
        ) from None
  return rows


def _file(workdir: str | os.PathLike) -> pathlib.Path:
  return pathlib.Path(workdir) / 'metrics.jsonl'
