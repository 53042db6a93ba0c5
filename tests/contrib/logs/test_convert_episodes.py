"""Logs of episodes as documents of ATIF, and what is said of a log that is none."""

import base64
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from test_episodes import CALL, ROOT, failed, trajectory, write

from agent_r1_jax import types
from agent_r1_jax.agent import call_formats, calls
from agent_r1_jax.contrib.logs import atif
from agent_r1_jax.rl import table

COMMAND = sys.executable, '-m', 'experiments.convert_episodes'
PNG = b'\x89PNG\r\n\x1a\n'


def convert(*arguments):
  return subprocess.run(
    [*COMMAND, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=60
  )


def document(tmp_path, played, **changes):
  """An episode's document, by way of its line in a log."""
  columns = [table.build([played]).list_tokens()] if played.turns else ()
  (line,) = write(tmp_path / 'log', [played], columns=columns)
  path = atif.write_episode(line | changes, tmp_path, run='run', model='base')
  return json.loads(path.read_text(), parse_constant=pytest.fail)


def contexts(count):
  """An episode that played so many contexts, each with other tokens."""
  segments, turns, messages = [], [], []
  for i in range(count):
    one = trajectory(messages=trajectory().messages)
    (segment,) = one.segments
    segments.append(types.Segment(segment.tokens + 100 * i, *segment_rest(segment)))
    turns += [types.Turn(i, turn.start, turn.stop, turn.reward + i) for turn in one.turns]
    messages += one.messages
  return trajectory(segments=segments, turns=turns, messages=messages)


def segment_rest(segment):
  return segment.action_mask, segment.behaviour_logprobs, segment.policy_steps


def read_back(part):
  """The tokens, mask and log-probs of a document's context, from its last reply."""
  steps = [step['metrics'] for step in part['steps'] if 'metrics' in step]
  ids = steps[-1]['prompt_token_ids'] + steps[-1]['completion_token_ids']
  mask, logprobs = np.zeros(len(ids), bool), np.zeros(len(ids))
  for step in steps:
    start, stop = (step['prompt_tokens'] + x for x in (0, step['completion_tokens']))
    assert ids[:start] == step['prompt_token_ids']
    assert ids[start:stop] == step['completion_token_ids']
    mask[start:stop], logprobs[start:stop] = True, step['logprobs']
  return ids, mask, logprobs


def test_a_reply_has_its_calls_results_and_tokens(tmp_path):
  made = document(tmp_path, trajectory(3, 1))
  system, user, reply, last = made.pop('steps')
  assert system == {'step_id': 1, 'source': 'system', 'message': 'Tools: search'}
  question = 'Who built the Arden Bridge?'
  assert user == {'step_id': 2, 'source': 'user', 'message': question}
  call = {'tool_call_id': 'call-1-0', 'function_name': 'search'}
  result = {'source_call_id': 'call-1-0', 'content': 'It was built by Corvid Works.'}
  assert reply == {
    'step_id': 3,
    'source': 'agent',
    'message': '',
    'extra': {'text': CALL},
    'tool_calls': [call | {'arguments': {'query': 'Arden Bridge'}}],
    'observation': {'results': [result | {'extra': {'name': 'search'}}]},
    'llm_call_count': 1,
    'metrics': {
      'prompt_tokens': 2,
      'completion_tokens': 3,
      'prompt_token_ids': [0, 1],
      'completion_token_ids': [2, 3, 4],
      'logprobs': [-0.5] * 3,
      'extra': {'turn': 1, 'reward': 0.0, 'policy_steps': [6]},
    },
  }
  assert last['message'] == '<answer>Corvid Works</answer>'
  assert last['metrics']['prompt_token_ids'] == [*range(7)]
  assert made.pop('agent')['model_name'] == 'base'
  assert made.pop('extra')['answer'] == ['Corvid Works', 'Corvid']
  totals = {'total_prompt_tokens': 9, 'total_completion_tokens': 5, 'total_steps': 4}
  numbers = {'reward': 1.0, 'em': 1.0, 'tool_calls': 1.0}
  assert made == {
    'schema_version': 'ATIF-v1.8',
    'session_id': 'run',
    'trajectory_id': 'run/0',
    'final_metrics': totals | {'extra': numbers},
  }


def test_each_context_is_a_document_with_the_tokens_that_are_trained(tmp_path):
  played = contexts(3)
  root = document(tmp_path, played)
  parts = [*root.pop('subagent_trajectories'), root]
  assert [part['trajectory_id'] for part in parts] == ['run/0', 'run/1', 'run/2']
  assert 'several contexts' in root['notes'] and 'extra' not in parts[0]
  for i, (part, segment) in enumerate(zip(parts, played.segments, strict=True)):
    ids, mask, logprobs = read_back(part)
    assert (
      ids == segment.tokens.tolist() and mask.tolist() == segment.action_mask.tolist()
    )
    np.testing.assert_allclose(logprobs, segment.behaviour_logprobs)
    assert [step['step_id'] for step in part['steps']] == [1, 2, 3, 4]
    assert part['steps'][-1]['metrics']['extra']['reward'] == 1 + i


def test_an_example_in_the_prompt_begins_no_context(tmp_path):
  played = contexts(2)
  played.messages.insert(1, {'role': 'assistant', 'content': 'an example'})
  root = document(tmp_path, played)
  (first,) = root['subagent_trajectories']
  assert [len(part['steps']) for part in (first, root)] == [5, 4]


def test_what_is_odd_still_is_a_document(tmp_path):
  url = 'data:image/png;base64,' + base64.b64encode(PNG).decode()
  picture = {'type': 'image_url', 'image_url': {'url': url}}
  film = {'type': 'image_url', 'image_url': {'url': url.replace(';', ';film=2;')}}
  seen = [{'type': 'text', 'text': 'Look:'}, picture, {'type': 'text', 'text': 'Well?'}]
  messages = [
    {'role': 'assistant', 'content': 'an example in the prompt'},
    {'role': 'tool', 'content': 'out of the blue'},
    {'role': 'developer', 'content': 'x'},
    {'role': 'user', 'content': seen},
    {'role': 'user', 'content': [film, {'type': 'text', 'text': 'a [picture]'}]},
    {'role': 'assistant', 'content': '<tool_call>{"name": </tool_call> \ud800 and none'},
    {'role': 'tool', 'name': 'search', 'content': 'not JSON'},
    {'role': 'tool', 'name': 'search', 'content': 'a second one'},
  ]
  odd = trajectory(
    messages=messages,
    turns=[types.Turn(0, 2, 5)],
    metrics={'x': math.nan, 'rewritten': 1},
  )
  odd.segments[0].action_mask[7:] = False
  made = document(tmp_path, odd)
  example, developer, looks, twice, reply = made['steps']
  assert example['is_copied_context'] and 'metrics' not in example
  assert example['observation']['results'][0]['content'] == 'out of the blue'
  assert developer['source'] == 'system' and developer['extra'] == {'role': 'developer'}
  kinds = [part['type'] for part in looks['message']]
  assert kinds == ['text', 'image', 'text']
  source = looks['message'][1]['source']
  assert source['media_type'] == 'image/png'
  assert (tmp_path / source['path']).read_bytes() == PNG
  assert [part['type'] for part in twice['message']] == ['text', 'image']
  (call,), (first, second) = reply['tool_calls'], reply['observation']['results']
  assert 'error' in call['extra'] and call['arguments'] == {}
  assert first['source_call_id'] == call['tool_call_id']
  assert second['source_call_id'] is None and '? and none' in reply['message']
  assert made['final_metrics']['extra']['x'] == 'nan'
  assert 'never gave' in made['notes']


def test_an_error_has_no_reward_and_its_own_text(tmp_path):
  nothing = failed()
  nothing.messages = []
  made = document(tmp_path, nothing)
  assert [step['message'] for step in made['steps']] == ['ValueError: no']
  assert made['final_metrics']['extra']['reward'] is None
  assert made['extra']['status'] == 'error'


def test_columns_of_other_turns_are_refused(tmp_path):
  with pytest.raises(ValueError, match='do not fit its turns'):
    document(tmp_path, trajectory(), turn_tokens=[4, 2])
  with pytest.raises(ValueError, match='of an earlier version'):
    document(tmp_path, trajectory(), turn_segments=[])


def _render(name, arguments):
  call = calls.ToolCall(name, arguments)
  return call_formats.HERMES.render(call)


def test_conversations_are_read_back_for_fine_tuning(tmp_path):
  played = contexts(2)
  made = document(tmp_path, played)
  path = tmp_path / '0-0.json'
  read = atif.read_conversations(path, _render)
  messages = trajectory().messages
  assert [[m['role'] for m in given] for given, _ in read] == [
    [m['role'] for m in messages]
  ] * 2
  for before, after in zip(messages, read[1][0], strict=True):
    find = call_formats.HERMES.parse
    assert find(before['content']) == find(after['content'])
    assert after | {'content': ''} == before | {'content': ''}
  # Of another agent: a thought, tools, an observation after the last reply.
  *_, reply, last = made['steps']
  tools = [{'type': 'function', 'function': {'name': 'search'}}]
  others = {
    'schema_version': 'ATIF-v1.5',
    'agent': {'name': 'x', 'version': '1', 'tool_definitions': tools},
    'steps': [
      {'source': 'user', 'message': 'Q'},
      last | {'reasoning_content': 'hm'},
      reply,
    ],
  }
  path.write_text(json.dumps(others))
  (given, schemas), *rest = atif.read_conversations(path, _render)
  assert not rest and schemas == tools
  assert given[1]['content'] == '<think>\nhm\n</think>\n\n<answer>Corvid Works</answer>'
  assert [m['role'] for m in given] == ['user', 'assistant', 'assistant']
  others['steps'][1]['is_copied_context'] = True
  path.write_text(json.dumps(others))
  assert atif.read_conversations(path, _render) == []


@pytest.mark.parametrize(
  ('text', 'said'),
  [
    ('[' * 100_000, 'RecursionError'),
    ('{}', 'schema_version'),
    ('[]', 'TypeError'),
    ('{"schema_version": "2"}', "schema_version is '2'"),
    ('{"schema_version": "ATIF-v1.8", "steps": [{}]}', 'source'),
    (
      '{"schema_version": "ATIF-v1.8", "steps": [{"source": "user", "message": '
      '[{"type": "image"}]}]}',
      'TypeError',
    ),
  ],
)
def test_what_is_no_document_is_told(tmp_path, text, said):
  (tmp_path / 'a.json').write_text(text)
  with pytest.raises(ValueError, match='is no document of ATIF') as error:
    atif.read_conversations(tmp_path / 'a.json', _render)
  assert said in str(error.value)


def test_the_command_writes_a_document_for_each_episode(tmp_path):
  log = tmp_path / 'a_run' / 'trajectories' / 'step-00008-dev.jsonl'
  write(log, [trajectory(0, 0), trajectory(0, 1), failed()])
  (tmp_path / 'a_run' / 'config.json').write_text('{"model": {"path": "base"}}')
  done = convert('--to=atif', log.parent)
  out = log.parent / 'atif' / log.stem
  assert done.stdout == f'{out}\n' and done.returncode == 0
  assert sorted(p.name for p in out.iterdir()) == ['0-0.json', '0-1.json', '9-0.json']
  made = json.loads((out / '0-1.json').read_text())
  assert made['session_id'] == 'a_run/step-00008-dev/0-1'
  assert made['agent']['model_name'] == 'base'
  reply = made['steps'][-1]['metrics']
  assert reply == {'completion_tokens': 2, 'extra': {'turn': 2, 'reward': 1.0}}


@pytest.mark.parametrize(
  ('name', 'said'),
  [
    ('cut', 'line 2 is no episode: Unterminated'),
    ('deep', 'line 2 is no episode: maximum recursion'),
    ('nan', 'line 2 is no episode: NaN is no number of JSON'),
    ('list', 'line 2 is no episode: it is no object'),
    ('other', 'line 2 is no episode: it has no action_tokens, answer, '),
    ('number', 'line 2 is no episode: its messages is a int'),
    ('text', 'line 2 is no episode: a message has no role or no text: 7'),
    ('turn', 'line 2: IndexError'),
    ('old', "line 2: ValueError('the log is of an earlier version"),
    ('folder', 'there is no log (*.jsonl) in it'),
    ('absent', 'cannot be read: No such file'),
  ],
)
def test_what_is_no_log_is_told_in_a_line(tmp_path, name, said):
  (good,) = write(tmp_path / 'good', [trajectory()])
  line = json.dumps(good)
  old = {field: x for field, x in good.items() if field != 'turn_segments'}
  lines = {
    'cut': line[:99],
    'deep': '[' * 100_000,
    'nan': line.replace('1.0', 'NaN'),
    'list': '[1]',
    'other': '{"step": 1}',
    'number': json.dumps(good | {'messages': 7}),
    'text': json.dumps(good | {'messages': [7]}),
    'turn': json.dumps(good | {'messages': [good['messages'][2] | {'turn': 9}]}),
    'old': json.dumps(old),
  }
  (tmp_path / 'folder').mkdir()
  path = tmp_path / name
  if name in lines:
    path.write_text(f'{line}\n{lines[name]}\n')
  done = convert('--to=atif', f'--out={tmp_path / "out"}', path)
  assert done.returncode == 1 and said in done.stderr
  assert done.stderr.count('\n') == 1 and str(path) in done.stderr


def test_a_converter_without_inspect_says_what_to_install(tmp_path):
  write(tmp_path / 'a.jsonl', [trajectory()])
  done = convert('--to=inspect', tmp_path)
  assert done.returncode == 1 and 'There is no inspect_ai here' in done.stderr
