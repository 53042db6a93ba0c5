"""Tables in Markdown and LaTeX, and the intervals of the numbers in them."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
  """Computes the 95 % confidence interval of a proportion (Wilson, 1927).

  Unlike p̂ ± 1.96 σ it stays inside [0, 1] and is right for few trials and for p̂ near 0
  or 1.

  Args:
    successes: Number of trials that succeeded.
    n: Number of trials; without any, the interval is (0, 1).

  Raises:
    ValueError: `successes` is not in [0, n].
  """
  from scipy import stats  # It takes a second.

  if not 0 <= successes <= n:
    raise ValueError(f'{successes} successes of {n} trials')
  if n == 0:
    return 0.0, 1.0
  low, high = stats.binomtest(successes, n).proportion_ci(method='wilson')
  return float(low), float(high)


def mean_interval(values: Any) -> tuple[Any, Any]:
  """Computes x̄ and t · s / √n, the half width of its 95 % interval (Student's t).

  Args:
    values: Numbers [n, ...], such as one of each seed; with n = 1 the width is NaN.
  """
  from scipy import stats  # It takes a second.

  values = np.asarray(values, float)
  n = len(values)
  if n < 2:
    return values.mean(0), values.mean(0) * np.nan
  return values.mean(0), stats.t.ppf(0.975, n - 1) * values.std(0, ddof=1) / n**0.5


class Interval(NamedTuple):
  """A cell of a table: a mean, and the half width of its interval or NaN."""

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
  lines += [[name, *(_cell(r.get(c, '-')) for c in columns)] for name, r in rows.items()]
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  text = [
    '| ' + ' | '.join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + ' |'
    for r in lines
  ]
  text.insert(1, '|' + '|'.join('-' * (width + 2) for width in widths) + '|')
  return '\n'.join(text)


def format_latex(
  rows: Mapping[str, Mapping[str, Cell]], columns: Iterable[str], corner: str = 'method'
) -> str:
  """Formats the same table for LaTeX with the package booktabs."""
  columns = list(columns)
  lines = [[name, *(_cell(r.get(c, '-')) for c in columns)] for name, r in rows.items()]
  join = lambda cells: ' & '.join(map(_escape, cells)) + r' \\'
  return '\n'.join(
    [
      rf'\begin{{tabular}}{{l{"r" * len(columns)}}}',
      r'\toprule',
      join([corner, *columns]),
      r'\midrule',
      *map(join, lines),
      r'\bottomrule',
      r'\end{tabular}',
    ]
  )


def _escape(text: str) -> str:
  for mark in '_%&#$':
    text = text.replace(mark, f'\\{mark}')
  return text.replace('±', r'$\pm$')


def _cell(cell: Cell) -> str:
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
