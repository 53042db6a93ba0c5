"""Inspect reads logs of episodes that were converted: `make test-with-inspect`."""

import json
import math
import os
import subprocess

import pytest
from test_episodes import ROOT, failed, trajectory, write

from agent_r1_jax import types

INSPECT = os.environ.get('PACKAGE_PYTHON')

# What inspect_ai, in an environment of its own, says of a log and of its folder.
READER = """
import json, sys
from inspect_ai import log
path, folder = sys.argv[1:]
whole = log.read_eval_log(path).model_dump(mode='json')
summaries = log.read_eval_log_sample_summaries(path)
whole['errors'] = [summary.error for summary in summaries]
whole['listed'] = len(log.list_eval_logs(folder))
print(json.dumps(whole))
"""


@pytest.mark.skipif(not INSPECT, reason='`make test-with-inspect` installs inspect_ai')
def test_inspect_reads_a_log_that_was_converted(tmp_path):
  group = [trajectory(0, s, status) for s, status in enumerate([*types.Status][:3])]
  same = [trajectory(g, task_id='same') for g in (5, 6)]
  odd = [
    {'role': 'tool', 'content': 'out of the blue'},
    {'role': 'assistant', 'content': 'half a \ud800 pair \x00\x9b'},
    {'role': 'tool', 'content': 'no call'},
    {'role': 'developer', 'content': 'x'},
  ]
  odd = trajectory(7, task_id='odd', messages=odd, turns=[], metrics={'em': math.nan})
  columns = {'tokens': [1, 2], 'old_logprobs': [-0.5, 0.0]}
  log = tmp_path / 'trajectories' / 'step-00008-dev.jsonl'
  write(log, [*group, failed(), *same, odd], columns=[columns] * 3)
  (tmp_path / 'config.json').write_text('{"model": {"path": "base"}}')
  run = lambda *command: subprocess.run(
    [INSPECT, *command], cwd=ROOT, capture_output=True, timeout=300, check=True
  )
  run('-m', 'experiments.convert_episodes', '--to=inspect', log.parent)
  (made,) = (log.parent / 'inspect').iterdir()
  read = json.loads(run('-c', READER, made, made.parent).stdout)
  assert read['status'] == 'success' and read['eval']['task'] == log.stem
  assert read['eval']['model'] == 'base' and read['listed'] == 1
  means = {s['name']: s['metrics']['mean']['value'] for s in read['results']['scores']}
  assert [*means] == ['reward', 'em'] and means['reward'] == 5 / 6
  assert read['errors'] == [None] * 3 + ['ValueError: no'] + [None] * 3
  samples = {(sample['id'], sample['epoch']): sample for sample in read['samples']}
  ids = {('bridge-0', epoch) for epoch in (1, 2, 3)} | {('bridge-9', 1)}
  assert samples.keys() == ids | {('same#5', 1), ('same#6', 1), ('odd', 1)}
  sample = samples['bridge-0', 2]
  assert sample['limit']['type'] == 'token'
  assert sample['metadata']['action_tokens'] == 5
  assert sample['metadata']['columns'] == columns
  *_, call, result, _ = sample['messages']
  assert call['tool_calls'][0]['id'] == result['tool_call_id']
  assert call['tool_calls'][0]['arguments'] == {'query': 'Arden Bridge'}
  assert samples['bridge-9', 1]['scores'] is None
  roles = [message['role'] for message in samples['odd', 1]['messages']]
  assert roles == ['user', 'assistant', 'tool', 'user']
