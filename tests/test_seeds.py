"""Tables of several seeds side by side."""

import pathlib

from experiments import tables


def cell(mean, count=100):
  return {'mean': mean, 'count': count}


def table(before, after):
  none = cell(0.0, 0)
  return {
    'Base': {'easy': {'all': cell(before), 'long': none}},
    'GRPO': {'easy': {'all': cell(after), 'long': none}},
  }


def test_runs_are_named_by_what_differs():
  paths = [pathlib.Path(p) for p in ('runs/lake0/grpo', 'runs/lake1/grpo')]
  assert tables.name_runs(paths) == ['lake0', 'lake1']
  assert tables.name_runs([pathlib.Path('runs/seed0')]) == ['seed0']
  # No single part tells these apart.
  paths = [pathlib.Path(f'a/{p}') for p in ('lake0/grpo', 'lake0/ppo', 'lake1/grpo')]
  assert tables.name_runs(paths) == ['a/lake0/grpo', 'a/lake0/ppo', 'a/lake1/grpo']


def test_a_row_for_each_run_and_their_mean_or_one_if_they_are_equal():
  runs = {'a': table(0.1, 0.5), 'b': table(0.1, 0.7)}
  text = tables.format_kind(runs, 'all')
  names = [line.split('|')[1].strip() for line in text.splitlines()[2:]]
  assert names == ['Base', 'GRPO, a', 'GRPO, b', 'GRPO, mean']
  assert '.100 [' in text and '70/100' in text and '| .600' in text
  assert tables.list_kinds(runs) == ['all', 'long']
  # What no task has is no number.
  assert '/0' not in tables.format_kind(runs, 'long')
