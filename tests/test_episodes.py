"""Logs of episodes hold what happened, and control no terminal."""

import dataclasses
import json
import math
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import mounts
import numpy as np
import pytest

from agent_r1_jax import types
from agent_r1_jax.report import episodes

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


def write(path, trajectories, **given) -> list[dict[str, Any]]:
  """Writes a log; returns its lines, as any reader of JSON sees them."""
  episodes.write(path, trajectories, **({'step': 8} | given))
  lines = path.read_text(encoding='utf-8').split('\n')
  assert lines.pop() == ''
  return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def failed(group=9):
  """An episode whose first tool call raised: nothing was sampled to the end."""
  return trajectory(
    group, status='error', error='ValueError: no', segments=[], turns=[], metrics={}
  )


class TestLines:
  def test_a_line_has_the_whole_episode_and_the_columns_of_the_first(self, tmp_path):
    columns = {'tokens': [1, 2], 'old_logprobs': [-0.5, 0.0]}
    log = tmp_path / 'logs' / 'a.jsonl'
    first, second = lines = write(log, [trajectory(3, 1), failed()], columns=[columns])
    assert episodes.read(log) == lines
    assert [path.name for path in log.parent.iterdir()] == ['a.jsonl']
    assert 'columns' not in second and first.pop('columns') == columns
    assert (second['reward'], second['error']) == (None, 'ValueError: no')
    messages = first.pop('messages')
    numbers = {'tokens': 9, 'action_tokens': 5, 'segments': 1, 'mean_logprob': -0.5}
    assert first == numbers | {
      'id': 'bridge-3',
      'group': 3,
      'sample': 1,
      'step': 8,
      'status': 'done',
      'reward': 1.0,
      'turn_rewards': [0.0, 1.0],
      'turn_tokens': [3, 2],
      'turn_segments': [0, 0],
      'policy_steps': [6, 7],
      'metrics': {'em': 1.0, 'tool_calls': 1.0},
      'error': None,
      'question': 'Who built the Arden Bridge?',
      'answer': ['Corvid Works', 'Corvid'],
      'info': {'hops': 2},
    }
    added = {}, {}, {'turn': 1, 'reward': 0.0, 'tokens': 3}, {}
    added += ({'turn': 2, 'reward': 1.0, 'tokens': 2},)
    added[2]['calls'] = [{'name': 'search', 'arguments': {'query': 'Arden Bridge'}}]
    given = trajectory().messages
    assert messages == [a | b for a, b in zip(given, added, strict=True)]

  def test_examples_and_results_without_a_call_are_no_turns_and_calls(self, tmp_path):
    messages = [
      {'role': 'assistant', 'content': 'an example in the prompt'},
      {'role': 'developer', 'content': [{'type': 'text', 'text': 'x'}]},
      {'role': 'tool', 'content': 'out of the blue'},
      {'role': 'assistant', 'content': '<tool_call>{"name": </tool_call> and none'},
      {'role': 'tool', 'content': 'not JSON'},
      {'role': 'tool', 'name': 'search', 'content': 'a second one'},
    ]
    odd = trajectory(messages=messages, turns=[types.Turn(0, 2, 5)])
    (line,) = write(tmp_path / 'a', [odd])
    example, developer, first, reply, *results = line['messages']
    assert 'turn' not in example and reply['turn'] == 1
    assert developer['content'] == '[{"type": "text", "text": "x"}]'
    assert [call.keys() for call in reply['calls']] == [{'error'}]
    assert [m['name'] for m in (first, *results)] == ['tool', 'tool', 'search']

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
      (line,) = write(tmp_path / 'a', [odd])
      assert line['messages'][2]['content'] == call
      assert 'error' in line['messages'][2]['calls'][0]
    assert line['info']['b'] == {'name': 'x', 'self': ['...']}
    assert 0 < len(json.dumps(line['info']['a'])) < 1000

  def test_what_json_cannot_hold_becomes_text(self, tmp_path):
    class Hostile:
      def __str__(self):
        raise RuntimeError

    odd = trajectory(metrics={'x': math.nan})
    info = {'fn': Hostile(), 'inf': np.inf, 'path': ROOT}
    odd.task = dataclasses.replace(odd.task, answer={(0, 1): math.nan}, info=info)
    (line,) = write(tmp_path / 'a', [odd])
    assert line['answer'] == {'(0, 1)': 'nan'} and line['metrics'] == {'x': 'nan'}
    assert line['info'] == {'fn': '<Hostile>', 'inf': 'inf', 'path': str(ROOT)}

  def test_a_file_has_no_control_character_and_reading_it_loses_none(self, tmp_path):
    text = ''.join(map(chr, range(0xA1))) + 'half a \ud800 pair, é中\u2028'
    messages = [{'role': 'user', 'content': text}]
    log = tmp_path / 'a'
    (line,) = write(log, [trajectory(task_id=text, messages=messages, turns=[])])
    assert line['id'] == line['messages'][0]['content'] == text
    stored = log.read_text(encoding='utf-8')
    assert not re.search('[\0-\x09\x0b-\x1f\x7f-\x9f]', stored)
    assert stored.count('\n') == 1 and 'é中' in stored, 'what grep looks for'
    assert episodes.read(log) == [line]

  def test_a_full_disk_is_named_and_leaves_no_half_a_log(self, tmp_path):
    rng = np.random.default_rng(0)
    noise = bytes(rng.integers(33, 127, 100_000, np.uint8)).decode()
    with mounts.mounted(tmp_path, 'size=64k') as folder:
      write(folder / 'a', [trajectory()])
      long = trajectory(messages=[{'role': 'user', 'content': noise}], turns=[])
      with pytest.raises(OSError, match=r'Trajectories could .*/b: the disk is full'):
        write(folder / 'b', [long])
      assert [path.name for path in folder.iterdir()] == ['a']
      assert episodes.read(folder / 'a')


class TestCommand:
  @pytest.fixture
  def run(self, monkeypatch, capsys):
    """Runs the command here; returns what it prints."""

    def run(*arguments):
      monkeypatch.setattr('sys.argv', ['episodes', *map(str, arguments)])
      episodes.main()
      return capsys.readouterr().out

    return run

  def test_each_message_is_shown_and_what_a_reply_earned(self, tmp_path, run):
    write(tmp_path / 'a.jsonl', [trajectory(reward=0.5), failed()])
    shown = run(tmp_path / 'a.jsonl').splitlines()
    assert shown[1:7] == [
      '--- bridge-0, target: Corvid Works | Corvid, done: '
      'reward 0.5, em 0.5, tool_calls 1.0',
      'system: Tools: search',
      'user: Who built the Arden Bridge?',
      f'assistant (reward 0): {CALL}',
      'tool: It was built by Corvid Works.',
      'assistant (reward 0.5): <answer>Corvid Works</answer>',
    ]
    assert 'error: ValueError: no' in shown

  def test_a_folder_gives_the_first_of_each_log(self, tmp_path, run):
    for name in ('b', 'a'):
      write(tmp_path / f'{name}.jsonl', [trajectory(0), trajectory(1)])
    shown = run('-n', 1, tmp_path)
    heads = [line for line in shown.splitlines() if line.startswith('===')]
    assert heads == [f'=== {tmp_path / name}.jsonl' for name in ('a', 'b')]
    assert shown.count('--- bridge-0') == 2 and 'bridge-1' not in shown

  def test_no_message_controls_the_terminal(self, tmp_path, run, capsys):
    attack = '\x1b]52;c;eA==\x07\x1b]0;title\x9b2J\rhidden'
    messages = [{'role': 'user', 'content': attack}]
    write(tmp_path / 'a', [trajectory(0, messages=messages, turns=[], segments=[])])
    shown = run(tmp_path / 'a')
    assert 'user: ␛]52;c;eA==␇␛]0;title\ufffd2J␍hidden\n' in shown
    assert not {'\x1b', '\x07', '\x9b', '\r'} & set(shown)
    with pytest.raises(SystemExit):
      run(tmp_path / '\x1b]0;x\x07')
    assert '\x1b' not in capsys.readouterr().err

  @pytest.mark.parametrize(
    ('name', 'said'),
    [
      ('cut', 'cut, line 1 is no episode'),
      ('deep', 'deep, line 1 is no episode'),
      ('other', r"other, line 1 is no episode: KeyError\('messages'\)"),
      ('.', r'is a folder without logs \(\*\.jsonl\); there are some in .*/logs'),
    ],
  )
  def test_a_file_that_is_no_log_is_told_in_a_line(
    self, tmp_path, name, said, run, capsys
  ):
    write(tmp_path / 'logs' / 'a.jsonl', [trajectory()])
    (tmp_path / 'cut').write_bytes((tmp_path / 'logs' / 'a.jsonl').read_bytes()[:99])
    (tmp_path / 'deep').write_text('[' * 100_000)
    (tmp_path / 'other').write_text('{"step": 1}')
    with pytest.raises(SystemExit) as ended:
      run(tmp_path / name)
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(said, last) and 'Traceback' not in last

  def test_a_reader_may_stop_and_a_terminal_may_lack_characters(self, tmp_path):
    """The reader stops as `| head` does."""
    long = [{'role': 'assistant', 'content': 'word ' * 100_000}]
    write(tmp_path / 'a', [trajectory(task_id='é中', messages=long, turns=[])])
    with subprocess.Popen(
      [sys.executable, '-m', 'agent_r1_jax.report.episodes', tmp_path / 'a'],
      env=os.environ | {'PYTHONIOENCODING': 'ascii'},
      cwd=ROOT,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
    ) as process:
      assert process.stdout and process.stderr
      assert process.stdout.readline().startswith(b'===')
      assert process.stdout.readline().startswith(b'--- ??,')
      process.stdout.close()
      assert process.stderr.read() == b''
    assert process.returncode == 0
