"""experiments/bench measures what it says."""

import json

import script


def test_sampling_an_update_and_a_step_are_measured():
  sizes = ['--rows=8', '--prompt=24', '--reply=80', '--microbatch=4', '--repeats=1']
  done = script.run('-m', 'experiments.bench', '--shape=tiny', *sizes)
  assert done.returncode == 0, done.stderr
  lines = {x['measurement']: x for x in map(json.loads, done.stdout.splitlines())}
  assert [*lines] == ['sampling', 'update', 'group_step']
  sampled = lines['sampling']
  assert abs(sampled['tokens_per_second'] - 8 * 80 / sampled['seconds']) < 1
  assert lines['update']['reply/cpu_seconds'] > 0 < lines['update']['all/cpu_seconds']
  assert 0 < lines['group_step']['seconds'] <= lines['group_step']['median_seconds']
