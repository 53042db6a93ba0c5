"""utilization.py of experiments/bench runs, and speaks of the schedule that trains."""

import json

import script


def test_each_mode_has_a_speed_and_tokens_of_the_age_it_allows():
  command = ['-m', 'experiments.bench.utilization', '--steps=9', '--tails=1']
  sizes = ['--episodes=16', '--mean=32', '--segment=0.002']
  done = script.run(*command, *sizes)
  assert done.returncode == 0, done.stderr
  found = {c['mode']: c for c in map(json.loads, done.stdout.splitlines())}
  assert list(found) == [
    'in turn',
    'one step off-policy',
    'partial, ahead 1',
    'partial, ahead 2',
    'partial, ahead 4',
  ]
  ages = [(c['age'], c['oldest']) for c in found.values()]
  # One step off-policy: eight of nine steps are of the policy before.
  assert ages[0] == (0, 0) and 0.7 < ages[1][0] < 1 and ages[1][1] == 1
  assert [oldest <= 2**n for n, (_, oldest) in enumerate(ages[2:])] == [True] * 3
  assert all(0 < c['used'] < 1 for c in found.values())
