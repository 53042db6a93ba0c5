r"""Results of experiments: their file, statistics of scores, and tables over seeds.

  for s in 0 1 2; do
    agent-r1-jax quickstart --workdir=runs/seed$s --config.seed=$s
  done
  python -m experiments.tables --out=runs/seeds runs/seed0 runs/seed1 runs/seed2
  python -m experiments.plot 'GRPO=runs/seed*' --out=runs/seeds_curves

The arguments are directories with a table.json, such as the workdirs of
experiments.miniwiki.search, or runs/lake*/grpo of experiments.worlds.learn. A method has
one row per run and their mean, or one row if its numbers are the same in all runs.
"""

import collections
from collections.abc import Hashable, Iterable, Mapping, Sequence
import json
import math
import os
import pathlib
from typing import Any
import warnings

from absl import app, flags
from jaxtyping import Bool, Float
import numpy as np

from agent_r1_jax.host import terminal
from agent_r1_jax.report import tables
from experiments import comparison


def main(argv):
  terminal.install()
  workdirs = [pathlib.Path(name) for name in argv[1:]]
  if not workdirs:
    raise app.UsageError('name the working directories of the runs')
  if unfinished := [w for w in workdirs if not (w / 'table.json').is_file()]:
    raise ValueError(
      f'{unfinished[0]} has no table.json: it is no workdir of '
      'experiments.miniwiki.search or of an algorithm in experiments.worlds.learn, or '
      'the run has not ended.'
    )
  found = [json.loads((w / 'table.json').read_text()) for w in workdirs]
  runs = dict(zip(name_runs(workdirs), found, strict=True))
  if len(runs) < len(workdirs) or any(table.keys() != found[0].keys() for table in found):
    raise ValueError(
      'a run is named twice, or the runs have other methods; name seeds of one command.'
    )
  text = '\n'.join(
    f'### {kind}\n\n{format_kind(runs, kind)}\n' for kind in list_kinds(runs)
  )
  out = pathlib.Path(f'{flags.FLAGS.out}.md')
  out.parent.mkdir(parents=True, exist_ok=True)
  out.write_text(text)
  print(text)


def name_runs(workdirs: Sequence[pathlib.Path]) -> list[str]:
  """Returns the first part of the paths that distinguishes them, or the paths."""
  if len(workdirs) == 1:
    return [workdirs[0].name]
  parts = zip(*(workdir.parts for workdir in workdirs), strict=False)
  whole = [str(workdir) for workdir in workdirs]
  return next(([*part] for part in parts if len({*part}) == len(part)), whole)


def list_kinds(runs: Mapping[str, Any]) -> list[str]:
  """Returns the kinds of tasks of the first run, in order."""
  table = next(iter(runs.values()))
  return list(dict.fromkeys(k for row in table.values() for s in row.values() for k in s))


def format_kind(runs: Mapping[str, Any], kind: str) -> str:
  """Formats the table of one kind of tasks."""
  first = next(iter(runs.values()))
  cells: dict[str, dict[str, tables.Cell]] = {}
  for method, row in first.items():
    sets = [s for s in row if row[s][kind]['count']]
    if all(table.get(method) == row for table in runs.values()):
      cells[method] = {s: comparison.count(row[s][kind]) for s in sets}
      continue
    for run, table in runs.items():
      found = table[method]
      cells[f'{method}, {run}'] = {s: comparison.count(found[s][kind]) for s in sets}
    means = {s: [table[method][s][kind]['mean'] for table in runs.values()] for s in sets}
    cells[f'{method}, mean'] = {s: sum(m) / len(m) for s, m in means.items()}
  return tables.format_table(cells, list(next(iter(first.values()))))


def add_line(path: str | os.PathLike, line: Mapping[str, Any]) -> None:
  """Appends a line; several processes may write to the same file."""
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  # A kill may have truncated the previous line: do not join this one to it. A single call
  # to write appends the line atomically, whoever else writes.
  with open(path, 'ab', buffering=0) as file:
    file.write(f'\n{json.dumps(line)}\n'.encode())
    os.fsync(file.fileno())


def read_lines(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Reads the lines, oldest first; skips truncated ones with a warning."""
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
  return any(key.items() <= line.items() for line in read_lines(path))


def estimate(
  scores: Float[np.ndarray, 'tasks n'],
  answers: Sequence[Sequence[Hashable | None]] | None = None,
) -> dict[str, float]:
  """Computes statistics of n samples of each task.

  Args:
    scores: The score of each sample; 1 is right.
    answers: The answer of each sample, None if there is none. Equivalent answers must be
      equal.

  Returns:
    'mean', 'best' (the mean of each task's best score) and 'pass@k' for k = 1, 2, 4, ...
    up to n; 'majority' if there are answers; with two tasks or more also 'error', the
    standard error of the mean. It is over tasks, because the samples of one task are not
    independent.
  """
  tasks, n = scores.shape
  right = (scores >= 1.0).sum(axis=1)
  estimates = {'mean': float(scores.mean()), 'best': float(scores.max(axis=1).mean())}
  if tasks > 1:
    estimates['error'] = float(scores.mean(axis=1).std(ddof=1) / tasks**0.5)
  if answers is not None:
    votes = [majority(*pair) for pair in zip(scores, answers, strict=True)]
    estimates['majority'] = float(np.mean(votes))
  for k in (2**i for i in range(n.bit_length())):
    estimates[f'pass@{k}'] = float(np.mean([pass_at_k(n, int(c), k) for c in right]))
  return estimates


def majority(scores: Sequence[float], answers: Sequence[Hashable | None]) -> float:
  """Returns the score of the most frequent answer; 0 if there is none.

  If several are equally frequent, this returns the expected score of a random one. So
  majority@1 is mean@1, and majority@2 is mean@2 if every sample has an answer.

  Args:
    scores: The score of each sample.
    answers: The answer of each sample; samples without one (None) do not vote.
  """
  votes = collections.Counter(answer for answer in answers if answer is not None)
  most = max(votes.values(), default=0)
  chosen = [
    score
    for score, answer in zip(scores, answers, strict=True)
    if answer is not None and votes[answer] == most
  ]
  # Tied answers are equally frequent, so all have the same weight.
  return float(np.mean(chosen)) if chosen else 0.0


def pass_at_k(n: int, correct: int, k: int) -> float:
  """Estimates the chance that one of k samples is right: 1 - C(n - c, k) / C(n, k).

  The unbiased estimator of the Codex paper (arXiv 2107.03374, section 2.1).

  Args:
    n: Samples of a task.
    correct: The number of right samples.
    k: At most n.
  """
  if not 1 <= k <= n or not 0 <= correct <= n:
    raise ValueError(f'k={k} must be in [1, n={n}], correct={correct} in [0, n={n}].')
  return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def auc(scores: Float[np.ndarray, 'n'], success: Bool[np.ndarray, 'n']) -> float:
  """Returns the probability that a success scores above a failure; ties count as half.

  The area under the ROC curve is Mann and Whitney's U over the number of pairs. NaN if
  there are only successes or only failures.
  """
  from scipy import stats

  wins, losses = int(success.sum()), int((~success).sum())
  if not wins * losses:
    return float('nan')
  ranks = stats.rankdata(scores)[success].sum()
  return float((ranks - wins * (wins + 1) / 2) / (wins * losses))


def pair_margins(scores, rewards, groups) -> Float[np.ndarray, 'pairs']:
  """Returns sᵢ - sⱼ for each pair in a group with rᵢ > rⱼ."""
  better = (groups[:, None] == groups) & (rewards[:, None] > rewards)
  return (scores[:, None] - scores)[better]


def calibration(
  probabilities: Float[np.ndarray, 'n'], success: Bool[np.ndarray, 'n'], bins: int = 10
) -> tuple[float, list[tuple[float, float, int]]]:
  """Compares probabilities of success with frequencies, in bins of equal width.

  Returns:
    The expected calibration error, Σ_b n_b/n |mean probability - share of successes| (Guo
    et al. 2017, arXiv 1706.04599, with the probability of success as the confidence), and
    for each non-empty bin both numbers and n_b.
  """
  bin_of = np.minimum((probabilities * bins).astype(int), bins - 1)
  rows = [
    (
      float(probabilities[inside].mean()),
      float(success[inside].mean()),
      int(inside.sum()),
    )
    for inside in (bin_of == b for b in np.unique(bin_of))
  ]
  error = sum(n * abs(mean - share) for mean, share, n in rows) / max(len(success), 1)
  return error, rows


def mean_interval(values: Any) -> tuple[Any, Any]:
  """Computes x̄ and t · s / √n, the half-width of its 95 % interval (Student's t).

  Args:
    values: Numbers [n, ...], such as one per seed; with n = 1 the width is NaN.
  """
  from scipy import stats  # Takes a second.

  values = np.asarray(values, float)
  n = len(values)
  if n < 2:
    return values.mean(0), values.mean(0) * np.nan
  return values.mean(0), stats.t.ppf(0.975, n - 1) * values.std(0, ddof=1) / n**0.5


def format_latex(
  rows: Mapping[str, Mapping[str, tables.Cell]],
  columns: Iterable[str],
  corner: str = 'method',
) -> str:
  """Formats the same table for LaTeX with the package booktabs."""
  columns = list(columns)
  lines = [
    [name, *(tables.format_cell(r.get(c, '-')) for c in columns)]
    for name, r in rows.items()
  ]
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


if __name__ == '__main__':
  flags.DEFINE_string('out', 'runs/seeds', 'Prefix of the .md written.')
  app.run(main)
