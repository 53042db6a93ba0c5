"""Writes a run's metrics to metrics.jsonl, and reads them.

with metrics.Writer(workdir, resume_step=start) as writer:
  for step in range(start, steps):
    ...
    writer.write(step, {'reward': 0.4, 'em': 0.3})
lines = metrics.read(workdir)
"""

from collections.abc import Mapping
import io
import json
import math
import os
import pathlib
from typing import Any

from agent_r1_jax.host import disk


class Writer:
  """Writes metrics to `<workdir>/metrics.jsonl`.

  A line of the file is a JSON object with 'step' and the metrics; it is on disk when
  `write` returns. JSON has no NaN and no infinity: they become the strings 'nan', 'inf'
  and '-inf', which `read` converts back.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    *,
    resume_step: int | None = None,
  ):
    """Opens the files of `workdir` and appends to them.

    Args:
      workdir: The run's directory; made if missing.
      resume_step: The next step. Lines of this step and later, which a killed run wrote
        after its last checkpoint, are dropped. None drops only an incomplete last line.
    """
    self._path = path = _file(workdir)
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk.explain_write_errors(path, 'The lines before this start'):
      _drop_lines(path, math.inf if resume_step is None else resume_step)
      self._lines = io.FileIO(path, 'a')

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes one line.

    Args:
      step: The step; it may have several lines.
      values: Metrics, as scalars of Python, NumPy or JAX. TensorBoard groups names 'a/b'
        by 'a'.

    Raises:
      ValueError: A value is no scalar, or is called 'step'.
      OSError: The line cannot be written; the file is unchanged.
    """
    if 'step' in values:
      raise ValueError("a metric cannot be called 'step': the line has one already")
    numbers = {name: _scalar(name, value) for name, value in values.items()}
    line = {name: v if math.isfinite(v) else str(v) for name, v in numbers.items()}
    text = json.dumps({'step': int(step)} | line, allow_nan=False) + '\n'
    with disk.explain_write_errors(self._path, f'The line of step {step}'):
      disk.append(self._lines, text.encode())

  def close(self) -> None:
    """Closes the file."""
    self._lines.close()


def read(workdir: str | os.PathLike) -> list[dict[str, Any]]:
  """Reads `<workdir>/metrics.jsonl`, without a last line that is incomplete.

  Raises:
    FileNotFoundError: There is no such file.
    ValueError: Another line than the last is broken; the error names its number.
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


def _drop_lines(path: pathlib.Path, resume_step: float) -> None:
  """Rewrites the file atomically, with the complete lines of earlier steps."""
  if not path.exists():
    return
  complete = path.read_bytes().splitlines()[: len(read(path.parent))]
  earlier = [line for line in complete if json.loads(line)['step'] < resume_step]
  disk.write_atomically(path, b''.join(line + b'\n' for line in earlier))


def _scalar(name: str, value: Any) -> float:
  try:
    return float(value)
  except (TypeError, ValueError):
    raise ValueError(f'metric {name}={value!r} is no scalar') from None
