"""Tables in Markdown, and confidence intervals of proportions in them."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
  """Computes the 95 % confidence interval of a proportion (Wilson, 1927).

  Unlike p̂ ± 1.96 σ it stays inside [0, 1] and is accurate for few trials and for p̂ near
  0 or 1.

  Args:
    successes: Number of successful trials.
    n: Number of trials; for 0 the interval is (0, 1).

  Raises:
    ValueError: `successes` is not in [0, n].
  """
  from scipy import stats  # Takes a second.

  if not 0 <= successes <= n:
    raise ValueError(f'{successes} successes of {n} trials')
  if n == 0:
    return 0.0, 1.0
  low, high = stats.binomtest(successes, n).proportion_ci(method='wilson')
  return float(low), float(high)


class Interval(NamedTuple):
  """A cell of a table: a mean, and its interval's half-width or NaN."""

  mean: float
  half: float


class Count(NamedTuple):
  """A cell of a table: `successes` of `n` trials."""

  successes: int
  n: int


Cell = Count | Interval | float | str


def format_table(
  rows: Mapping[str, Mapping[str, Cell]],
  columns: Iterable[str],
  corner: str = 'method',
) -> str:
  """Formats a Markdown table that reads well as plain text, like the paper's Table 3.

  Args:
    rows: Row -> column -> cell. A `Count` becomes a proportion, its 95 % interval and
      the counts, '.713 [.659, .761] 214/300'; an `Interval` becomes '.713 ± .021'; a
      number gets three decimals; a missing cell is '-'.
    columns: The columns, in order.
    corner: The title of the first column, which names the rows.

  Raises:
    ValueError: A row has a column that is not in `columns`.
  """
  columns = list(columns)
  for name, cells in rows.items():
    if unknown := cells.keys() - set(columns):
      raise ValueError(f'row {name!r} has {sorted(unknown)}, the columns are {columns}')
  lines = [[corner, *columns]]
  lines += [
    [name, *(format_cell(r.get(c, '-')) for c in columns)] for name, r in rows.items()
  ]
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  text = [
    '| ' + ' | '.join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + ' |'
    for r in lines
  ]
  text.insert(1, '|' + '|'.join('-' * (width + 2) for width in widths) + '|')
  return '\n'.join(text)


def format_cell(cell: Cell) -> str:
  """Formats a cell, as `format_table` says."""
  if isinstance(cell, str):
    return cell
  if isinstance(cell, Interval):
    half = '' if np.isnan(cell.half) else f' ± {_decimal(cell.half)}'
    return f'{_decimal(cell.mean)}{half}'
  if not isinstance(cell, Count):
    return _decimal(cell)
  low, high = wilson_interval(*cell)
  share = _decimal(cell.successes / cell.n) if cell.n else '-'
  return f'{share} [{_decimal(low)}, {_decimal(high)}] {cell.successes}/{cell.n}'


def _decimal(value: float) -> str:
  text = f'{value:.3f}'
  return text[1:] if text.startswith('0.') else text
