"""The log has the structure that Inspect asks for, and Inspect itself reads it."""

import dataclasses
import json
import math
import os
import pathlib
import re
import subprocess
import sys
from typing import Any
import zipfile

import mounts
import numpy as np
import pytest

from agent_r1_jax import types
from agent_r1_jax.report import viewer

ROOT = pathlib.Path(__file__).parents[1]

CALL = '<tool_call>{"name": "search", "arguments": {"query": "Arden Bridge"}}</tool_call>'


def trajectory(group=0, sample=0, status='done', reward=1.0, task_id=None, **kwargs):
  """Two turns: a call of 3 tokens, an answer of 2; 4 of 9 tokens are others'."""
  task = types.Task(
    id=task_id or f'bridge-{group}',
    messages=[
      {'role': 'system', 'content': 'Tools: search'},
      {'role': 'user', 'content': 'Who built the Arden Bridge?'},
    ],
    answer=['Corvid Works', 'Corvid'],
    info={'hops': 2},
  )
  messages = [
    *task.messages,
    {'role': 'assistant', 'content': CALL},
    {'role': 'tool', 'name': 'search', 'content': 'It was built by Corvid Works.'},
    {'role': 'assistant', 'content': '<answer>Corvid Works</answer>'},
  ]
  turns = [types.Turn(0, 2, 5), types.Turn(0, 7, 9, reward=reward)]
  mask = np.zeros(9, bool)
  for turn in turns:
    mask[turn.start : turn.stop] = True
  logprobs = np.where(mask, -0.5, 0.0).astype(np.float32)
  steps = np.array([0, 0, 6, 6, 6, 0, 0, 6, 7], np.int32)
  segment = types.Segment(np.arange(9, dtype=np.int32), mask, logprobs, steps)
  fields = {
    'segments': [segment],
    'turns': turns,
    'messages': messages,
    'metrics': {'em': reward, 'tool_calls': 1.0},
  }
  return types.Trajectory(task, group, sample, status=status, **(fields | kwargs))


def write(path, trajectories, **kwargs):
  arguments = {'task': 'miniwiki', 'model': 'base', 'config': {'lr': 1e-3}, 'step': 8}
  viewer.write_log(path, trajectories, **(arguments | kwargs))
  with zipfile.ZipFile(path) as archive:
    assert archive.testzip() is None
    return {name: json.loads(archive.read(name)) for name in archive.namelist()}


def failed(group=9):
  """An episode whose first tool call raised: nothing was sampled to the end."""
  return trajectory(
    group, status='error', error='ValueError: no', segments=[], turns=[], metrics={}
  )


class TestReading:
  def test_what_was_written_is_read_in_its_order(self, tmp_path):
    members = write(tmp_path / 'a.eval', [trajectory(1), trajectory(0)])
    samples = viewer.read_log(tmp_path / 'a.eval')
    assert [sample['id'] for sample in samples] == ['bridge-1', 'bridge-0']
    assert samples[0] == members['samples/bridge-1_epoch_1.json']

  def test_text_shows_each_message_and_what_a_reply_earned(self, tmp_path):
    write(tmp_path / 'a.eval', [trajectory(reward=0.5)])
    (sample,) = viewer.read_log(tmp_path / 'a.eval')
    assert viewer.format_sample(sample).splitlines() == [
      "--- bridge-0, target: Corvid Works | Corvid, done {'reward': 0.5, 'em': 0.5}",
      'system: Tools: search',
      'user: Who built the Arden Bridge?',
      f'assistant (reward 0): {CALL}',
      'tool: It was built by Corvid Works.',
      'assistant (reward 0.5): <answer>Corvid Works</answer>',
    ]

  def test_a_failed_episode_has_text_too(self, tmp_path):
    write(tmp_path / 'a.eval', [failed()])
    (sample,) = viewer.read_log(tmp_path / 'a.eval')
    assert 'error {}' in viewer.format_sample(sample)

  def test_the_command_prints_the_first_of_each_log(self, tmp_path, monkeypatch, capsys):
    logs = [str(tmp_path / name) for name in ('a.eval', 'b.eval')]
    for log in logs:
      write(log, [trajectory(0), trajectory(1)])
    monkeypatch.setattr('sys.argv', ['viewer', '-n', '1', *logs])
    viewer.main()
    shown = capsys.readouterr().out
    assert shown.count('--- bridge-0') == 2 and 'bridge-1' not in shown

  def test_no_message_controls_the_terminal(self, tmp_path, monkeypatch, capsys):
    attack = '\x1b]52;c;eA==\x07\x1b]0;title\x9b2J\rhidden'
    messages = [{'role': 'user', 'content': attack}]
    write(tmp_path / 'a.eval', [trajectory(0, messages=messages, turns=[], segments=[])])
    monkeypatch.setattr('sys.argv', ['viewer', str(tmp_path / 'a.eval')])
    viewer.main()
    shown = capsys.readouterr().out
    assert 'user: ␛]52;c;eA==␇␛]0;title\ufffd2J␍hidden\n' in shown
    assert not {'\x1b', '\x07', '\x9b', '\r'} & set(shown)
    monkeypatch.setattr('sys.argv', ['viewer', str(tmp_path / '\x1b]0;x\x07.eval')])
    with pytest.raises(SystemExit):
      viewer.main()
    assert '\x1b' not in capsys.readouterr().err


class TestStructure:
  def test_members_and_required_fields(self, tmp_path):
    members = write(
      tmp_path / 'logs' / 'a.eval', [trajectory(g, s) for g in (0, 1) for s in (0, 1)]
    )
    assert sorted(members) == [
      '_journal/start.json',
      'header.json',
      'samples/bridge-0_epoch_1.json',
      'samples/bridge-0_epoch_2.json',
      'samples/bridge-1_epoch_1.json',
      'samples/bridge-1_epoch_2.json',
      'summaries.json',
    ]
    header = members['header.json']
    assert header['version'] == 2 and header['status'] == 'success'
    assert members['_journal/start.json']['eval'] == header['eval']
    assert header['eval'].keys() >= {'created', 'task', 'dataset', 'model', 'config'}
    assert header['eval']['config'] == {'epochs': 2}
    assert header['eval']['dataset']['sample_ids'] == ['bridge-0', 'bridge-1']
    assert header['eval']['metadata'] == {'step': 8, 'config': {'lr': 1e-3}}
    assert [p.name for p in (tmp_path / 'logs').iterdir()] == ['a.eval']

  def test_a_sample_tells_the_whole_episode(self, tmp_path):
    members = write(tmp_path / 'a.eval', [trajectory(3, 1)], extra=[{'advantage': -0.5}])
    sample = members['samples/bridge-3_epoch_2.json']
    assert (sample['id'], sample['epoch']) == ('bridge-3', 2)
    assert sample['target'] == ['Corvid Works', 'Corvid']
    assert sample['scores']['reward']['value'] == 1.0
    assert sample['scores']['em']['value'] == 1.0
    assert sample['metadata'] == {
      'step': 8,
      'policy_steps': [6, 7],
      'status': 'done',
      'reward': 1.0,
      'turn_rewards': [0.0, 1.0],
      'turn_tokens': [3, 2],
      'tokens': 9,
      'action_tokens': 5,
      'environment_tokens': 4,
      'mean_logprob': -0.5,
      'segments': 1,
      'group': 3,
      'metrics': {'em': 1.0, 'tool_calls': 1.0},
      'info': {'hops': 2},
      'advantage': -0.5,
    }
    assert sample['output']['usage']['output_tokens'] == 5

  def test_calls_and_results_belong_together(self, tmp_path):
    sample = write(tmp_path / 'a.eval', [trajectory()])['samples/bridge-0_epoch_1.json']
    _, _, call, result, answer = sample['messages']
    assert call['content'] == CALL, 'the reply stands as it was sampled'
    (shown,) = call['tool_calls']
    assert shown['id'] == result['tool_call_id']
    assert (shown['function'], shown['arguments']) == (
      'search',
      {'query': 'Arden Bridge'},
    )
    assert call['metadata'] == {'turn': 1, 'reward': 0.0, 'tokens': 3}
    assert answer['metadata'] == {'turn': 2, 'reward': 1.0, 'tokens': 2}
    assert 'tool_calls' not in answer

  def test_results_without_a_call_that_can_be_read(self, tmp_path):
    messages = [
      {'role': 'tool', 'content': 'out of the blue'},
      {'role': 'assistant', 'content': '<tool_call>{"name": </tool_call> and none'},
      {'role': 'tool', 'content': 'not JSON'},
      {'role': 'tool', 'name': 'search', 'content': 'a second one'},
      {'role': 'developer', 'content': [{'type': 'text', 'text': 'x'}]},
    ]
    sample = write(tmp_path / 'a.eval', [trajectory(messages=messages, turns=[])])[
      'samples/bridge-0_epoch_1.json'
    ]
    first, reply, *results, last = sample['messages']
    assert first['role'] == last['role'] == 'user', 'Inspect would not show them'
    ids = [shown['id'] for shown in reply['tool_calls']]
    assert ids == [result['tool_call_id'] for result in results] and len(set(ids)) == 2
    assert 'parse_error' in reply['tool_calls'][0]

  def test_an_example_in_the_prompt_is_no_turn(self, tmp_path):
    messages = [{'role': 'assistant', 'content': 'example'}, *trajectory().messages]
    sample = write(tmp_path / 'a.eval', [trajectory(messages=messages)])[
      'samples/bridge-0_epoch_1.json'
    ]
    assert 'metadata' not in sample['messages'][0]
    assert sample['messages'][3]['metadata']['turn'] == 1

  def test_an_answer_that_json_lacks(self, tmp_path):
    odd = trajectory()
    odd.task = dataclasses.replace(odd.task, answer={(0, 1): math.nan})
    sample = write(tmp_path / 'a.eval', [odd])['samples/bridge-0_epoch_1.json']
    assert sample['target'] == '{"(0, 1)": "nan"}'

  def test_what_is_nested_too_deeply_or_in_itself_is_cut(self, tmp_path):
    """An episode that cannot be logged would end the run, at each resume again."""
    circle: dict[str, Any] = {'name': 'x'}
    deep: Any = 0
    for _ in range(5000):
      deep = [deep]
    circle['self'] = [circle]
    odd = trajectory(turns=[])
    odd.task = dataclasses.replace(odd.task, answer=deep, info={'a': deep, 'b': circle})
    for depth in (700, 985, 5000):
      inner = '[' * depth + ']' * depth
      call = f'<tool_call>{{"name": "search", "arguments": {{"x": {inner}}}}}</tool_call>'
      odd.messages[2]['content'] = call
      sample = write(tmp_path / 'a.eval', [odd])['samples/bridge-0_epoch_1.json']
      assert sample['messages'][2]['content'] == call
      assert 'parse_error' in sample['messages'][2]['tool_calls'][0]
    assert sample['metadata']['info']['b'] == {'name': 'x', 'self': ['...']}
    assert 0 < len(json.dumps(sample['metadata']['info']['a'])) < 1000

  def test_statuses(self, tmp_path):
    group = [trajectory(0, s, status) for s, status in enumerate(types.STATUSES[:3])]
    members = write(tmp_path / 'a.eval', [*group, failed()])
    limits = [members[f'samples/bridge-0_epoch_{i}.json'].get('limit') for i in (1, 2, 3)]
    assert limits == [
      None,
      {'type': 'token', 'limit': 9, 'reason': 'truncated'},
      {'type': 'turn', 'limit': 2, 'reason': 'max_turns'},
    ]
    error = members['samples/bridge-9_epoch_1.json']
    assert error['error']['message'] == 'ValueError: no'
    assert 'scores' not in error, 'an error is never scored 0'
    results = members['header.json']['results']
    assert (results['total_samples'], results['completed_samples']) == (4, 3)
    assert results['scores'][0]['metrics']['mean']['value'] == 1.0
    assert [s.get('error') for s in members['summaries.json']] == [None] * 3 + [
      'ValueError: no'
    ]

  def test_the_same_task_in_two_groups(self, tmp_path):
    members = write(
      tmp_path / 'a.eval', [trajectory(g, 0, task_id='same') for g in (0, 1)]
    )
    assert {
      'samples/same#0_epoch_1.json',
      'samples/same#1_epoch_1.json',
    } <= members.keys()

  def test_text_and_numbers_that_json_cannot_hold(self, tmp_path):
    messages = [{'role': 'assistant', 'content': 'half a \ud800 pair, \x00 and é'}]
    given = {'messages': messages, 'turns': [], 'metrics': {'x': float('nan')}}
    bad = trajectory(task_id='a\0\ud800', **given)
    sample = write(tmp_path / 'a.eval', [bad], config={'fn': print, 'inf': np.inf})[
      'samples/a??_epoch_1.json'
    ]
    assert sample['messages'][0]['content'] == 'half a ? pair, \x00 and é'
    assert sample['metadata']['metrics'] == {'x': 'nan'}

  def test_mistakes(self, tmp_path):
    with pytest.raises(ValueError, match=r'path=.*a\.json: Inspect finds logs by'):
      write(tmp_path / 'a.json', [])
    with pytest.raises(ValueError, match='two trajectories are samples/bridge-0_epoch_1'):
      write(tmp_path / 'a.eval', [trajectory(), trajectory()])
    assert not list(tmp_path.iterdir())


def view(*arguments, **kwargs):
  """The command, as people start it."""
  command = [sys.executable, '-m', 'agent_r1_jax.report.viewer', *map(str, arguments)]
  pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE} | kwargs
  return subprocess.Popen(command, cwd=ROOT, **pipes)


class TestCommand:
  @pytest.mark.parametrize(
    ('name', 'said'),
    [
      ('cut.eval', r'cut\.eval is no log of trajectories'),
      ('deep.eval', r'deep\.eval is no log of trajectories'),
      ('.', r'is a folder without logs \(\*\.eval\); there are some in .*/logs'),
    ],
  )
  def test_mistakes_are_told_in_a_line(self, tmp_path, name, said, monkeypatch, capsys):
    write(tmp_path / 'logs' / 'a.eval', [trajectory()])
    whole = (tmp_path / 'logs' / 'a.eval').read_bytes()
    (tmp_path / 'cut.eval').write_bytes(whole[: len(whole) // 2])
    with zipfile.ZipFile(tmp_path / 'deep.eval', 'w') as archive:
      archive.writestr('samples/x.json', '[' * 100_000)
    if name == '.':
      for path in tmp_path.glob('*.eval'):
        path.unlink()
    monkeypatch.setattr('sys.argv', ['viewer', str(tmp_path / name)])
    with pytest.raises(SystemExit) as ended:
      viewer.main()
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(said, last) and 'Traceback' not in last

  def test_a_folder_gives_its_logs(self, tmp_path, monkeypatch, capsys):
    for name in ('b', 'a'):
      write(tmp_path / f'{name}.eval', [trajectory()])
    monkeypatch.setattr('sys.argv', ['viewer', str(tmp_path)])
    viewer.main()
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if line.startswith('===')]
    assert heads == [f'=== {tmp_path / name}.eval' for name in ('a', 'b')]

  def test_a_reader_may_stop_reading(self, tmp_path):
    """As `| head` does."""
    long = [{'role': 'assistant', 'content': 'word ' * 100_000}]
    write(tmp_path / 'a.eval', [trajectory(messages=long, turns=[])])
    with view(tmp_path / 'a.eval') as process:
      assert process.stdout and process.stderr
      assert process.stdout.readline().startswith(b'===')
      process.stdout.close()
      assert process.stderr.read() == b''
    assert process.returncode == 0

  def test_a_terminal_of_few_characters(self, tmp_path):
    write(
      tmp_path / 'a.eval', [trajectory(messages=[{'role': 'user', 'content': 'é中'}])]
    )
    environment = os.environ | {'PYTHONIOENCODING': 'ascii'}
    with view(tmp_path / 'a.eval', env=environment) as process:
      said, errors = process.communicate()
    assert b'user: ??' in said and not errors


def test_a_full_disk_is_named_and_leaves_no_half_a_log(tmp_path):
  rng = np.random.default_rng(0)
  noise = bytes(rng.integers(33, 127, 100_000, np.uint8)).decode()
  with mounts.mounted(tmp_path, 'size=64k') as folder:
    write(folder / 'a.eval', [trajectory()])
    long = trajectory(messages=[{'role': 'user', 'content': noise}], turns=[])
    with pytest.raises(OSError, match=r'Trajectories could .*b\.eval: the disk is full'):
      write(folder / 'b.eval', [long])
    assert [path.name for path in folder.iterdir()] == ['a.eval']
    assert viewer.read_log(folder / 'a.eval')


# What inspect_ai, in an environment of its own, says of a log and of its folder.
READER = """
import json, sys
from inspect_ai import log
path, folder = sys.argv[1:]
whole = log.read_eval_log(path).model_dump(mode='json')
whole['header'] = log.read_eval_log(path, header_only=True).model_dump(mode='json')
whole['listed'] = len(log.list_eval_logs(folder))
summaries = log.read_eval_log_sample_summaries(path)
whole['summaries'] = [summary.model_dump(mode='json') for summary in summaries]
print(json.dumps(whole))
"""
INSPECT = os.environ.get('INSPECT_PYTHON')


@pytest.mark.skipif(not INSPECT, reason='`make test-inspect` installs inspect_ai')
class TestContract:
  """Only inspect_ai itself can say whether it reads a log."""

  def test_inspect_reads_what_was_written(self, tmp_path):
    path = tmp_path / 'a.eval'
    group = [trajectory(0, s, status) for s, status in enumerate(types.STATUSES[:3])]
    columns = {'columns': {'tokens': [1, 2], 'old_logprobs': [-0.5, 0.0]}}
    write(path, [*group, failed()], extra=[columns] * 4)
    command = [INSPECT, '-c', READER, path, tmp_path]
    done = subprocess.run(command, capture_output=True, timeout=300, check=True)
    log = json.loads(done.stdout)
    assert log['status'] == 'success' and log['eval']['task'] == 'miniwiki'
    assert [score['name'] for score in log['results']['scores']] == ['reward', 'em']
    samples = {(sample['id'], sample['epoch']): sample for sample in log['samples']}
    assert len(samples) == 4
    sample = samples['bridge-0', 2]
    assert sample['limit']['type'] == 'token'
    assert sample['metadata']['action_tokens'] == 5
    assert sample['metadata']['columns'] == columns['columns']
    *_, call, result, _ = sample['messages']
    assert call['tool_calls'][0]['id'] == result['tool_call_id']
    assert samples['bridge-9', 1]['error']['message'] == 'ValueError: no'
    assert samples['bridge-9', 1]['scores'] is None
    assert log['header']['results'] and log['listed'] == 1
    assert [s['error'] for s in log['summaries']] == [None] * 3 + ['ValueError: no']
