"""The numbers and the table of a task that was played by several methods."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.report import tables
from agent_r1_jax.rollout import evaluate
from experiments import tables as tables_lib
from experiments import task_list

# Method -> set -> trajectories, those of a task side by side.
Played = Mapping[str, Mapping[str, Sequence[types.Trajectory]]]
# What an episode costs, by the names of evaluate.summarize.
COSTS = ('tokens', 'action_tokens', 'turns', 'status/error')


def summarize(
  played: Played, benchmark: task_list.Benchmark, n: int
) -> dict[str, dict[str, Any]]:
  """Returns the numbers of each method and set; see tables.estimate."""
  numbers: dict[str, dict[str, Any]] = {}
  for method, sets in played.items():
    for name, episodes in sets.items():
      right = [t.metrics.get(benchmark.score, 0.0) for t in episodes]
      groups = [episodes[i : i + n] for i in range(0, len(episodes), n)]
      answers = benchmark.answers and [
        benchmark.answers([_get_last_reply(t) for t in group]) for group in groups
      ]
      found = tables_lib.estimate(np.reshape(right, (-1, n)), answers)
      costs = evaluate.summarize(episodes)
      rest = {m: costs.get(m, 0.0) for m in (*benchmark.rest, *COSTS)}
      numbers.setdefault(method, {})[name] = {'tasks': len(groups), **found, **rest}
  return numbers


def _get_last_reply(episode: types.Trajectory) -> str:
  """Returns the text that the answer is in."""
  replies = [m['content'] for m in episode.messages if m['role'] == 'assistant']
  return replies[-1] if replies and episode.turns else ''


def format_table(
  numbers: Mapping[str, Mapping[str, Any]], benchmark: task_list.Benchmark, n: int
) -> str:
  """Formats the table: a row for each method and set, with 95 % intervals."""
  rows = {}
  for method, sets in numbers.items():
    for name, found in sets.items():
      mean: Any = f'{found["mean"]:.3f} ± {1.96 * found.get("error", np.nan):.3f}'
      if n == 1:
        if found['mean'] == found['pass@1']:  # All scores are 0 or 1.
          mean = tables.Count(round(found['mean'] * found['tasks']), found['tasks'])
        row = {benchmark.score: mean}
      else:
        row = {f'mean@{n}': mean, f'best@{n}': found['best']}
        row |= {f'majority@{n}': found['majority']} if 'majority' in found else {}
        row |= {key: value for key, value in found.items() if key.startswith('pass@')}
      row |= {key: found[key] for key in benchmark.rest}
      row |= {key.split('/')[-1]: found[key] for key in COSTS}
      rows[f'{method}, {name}' if name else method] = row
  return tables.format_table(rows, next(iter(rows.values())))
