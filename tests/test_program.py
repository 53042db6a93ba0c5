"""Programs that play episodes through an endpoint: their tokens, and how they may end."""

import asyncio
import collections
import functools
import json
import os
import sys
import threading

import httpx2
import numpy as np
import openai
import pytest
import serving
import tiny
import waiting

from agent_r1_jax import types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.rl import table
from agent_r1_jax.serve import program
from agent_r1_jax.tasks import qa
from experiments.miniwiki import agents

USER = {'role': 'user', 'content': 'Who is it?'}
TASK = types.Task('who', [USER])
# It asks once and prints what it got as its last line; '-' is replaced by further code.
SCRIPT = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
url, key = os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY']
body = json.dumps({'messages': task['messages']}).encode()
asked = urllib.request.Request(url + '/chat/completions', body)
answer = json.load(urllib.request.urlopen(asked))
print('a line\\n{"reward": 2, "length": 0.5}', flush=True)
-
"""


def _collect(make_env, tasks=None, *, samples=1, **limits):
  limits = serving.replace(serving.LIMITS, **limits)
  return serving.collect(make_env, tasks, samples=samples, limits=limits)


def _play(run, **limits):
  """The trajectory of the first task."""
  make_env = lambda: program.Program(run)
  return _collect(make_env, serving.tasks()[:1], **limits)[0]


def _client(url):
  return openai.AsyncOpenAI(base_url=url, api_key='none', max_retries=0)


async def _ask(client, messages, **more):
  answer = await client.chat.completions.create(
    model='policy', messages=messages, max_tokens=12, **more
  )
  return [choice.message.model_dump(exclude_none=True) for choice in answer.choices]


@functools.cache
def _native():
  tool = serving.search_tool()
  make_env = lambda: env_lib.ToolEnv([tool], qa.paper_reward, metrics=qa.metrics)
  return _collect(make_env, samples=2)


def _assert_same(played, expected):
  for one, other in zip(played, expected, strict=True):
    for s, t in zip(one.segments, other.segments, strict=True):
      np.testing.assert_array_equal(s.tokens, t.tokens)
      np.testing.assert_array_equal(s.action_mask, t.action_mask)
      np.testing.assert_allclose(s.behaviour_logprobs, t.behaviour_logprobs, atol=2e-5)
      np.testing.assert_array_equal(s.policy_steps, t.policy_steps)
    for name in ('turns', 'messages', 'status'):
      assert getattr(one, name) == getattr(other, name)
    own = {'forks': 0.0, 'rewritten': 0.0, 'tool_calls': 0.0, 'format_errors': 0.0}
    assert one.metrics.items() <= (own | other.metrics).items()


def _assert_on_policy(trajectories):
  model, params, _ = serving.policy()
  segments = [s for t in trajectories for s in t.segments]
  tiny.assert_on_policy(params, segments, shape=model)


@pytest.mark.parametrize('make', [agents.with_openai, agents.with_pydantic_ai])
def test_an_agent_of_others_plays_what_the_native_environment_plays(make):
  run = make(serving.search_tool())
  make_env = lambda: program.Program(run, qa.paper_reward, qa.metrics)
  played = _collect(make_env, samples=2)
  assert {len(t.turns) for t in played} > {1} and {t.reward for t in played} > {1.0}
  same = [not t.metrics.get('format_errors') for t in _native()]
  assert sum(same) > len(same) / 2
  pairs = [p for p, is_same in zip(zip(played, _native()), same) if is_same]
  _assert_same(*zip(*pairs))
  _assert_on_policy(played)


def _branches(delays):
  """Goes on, in two ways, anew, with a rewritten past; and some requests are dropped."""

  async def run(task, url):
    async with _client(url) as client:
      first = [*task.messages, *await _ask(client, task.messages)]

      async def go_on(name, messages, **more):
        await asyncio.sleep(delays.get(name, 0))
        return [*messages, *await _ask(client, messages, **more)]

      left = await go_on('left', [*first, USER])
      await go_on('right', [*first, {'role': 'user', 'content': 'right'}])
      # Nothing goes on from it: where one does, what comes first depends on when the
      # endpoint sees that its client has gone.
      dropped = [{'role': 'system', 'content': 'dropped'}, USER]
      hasty = client.with_options(timeout=1e-4)
      with pytest.raises(openai.APITimeoutError):
        await hasty.chat.completions.create(model='policy', messages=dropped, n=2)
      another, third = ([{'role': 'system', 'content': c}, USER] for c in 'ab')
      await asyncio.gather(
        go_on('on', [*left, USER]),
        go_on('another', another),
        go_on('third', third),
        go_on('twice', [USER], n=2),
      )
      changed = {'role': 'assistant', 'content': 'No'}
      await go_on('rewritten', [*first[:-1], changed, USER])
      stripped = {**first[-1], 'content': f'  {first[-1]["content"]}\n'}
      await go_on('stripped', [*first[:-1], stripped, {**USER, 'content': 'again'}])

  return run


def test_branches_are_segments_whatever_comes_first():
  plain = _play(_branches({}), max_turns=20)
  other = _play(_branches({'another': 0.1, 'on': 0.2}), max_turns=20)
  assert plain.error is None and other.error is None
  key = lambda s: (s.tokens.tolist(), s.action_mask.tolist())
  assert sorted(map(key, plain.segments)) == sorted(map(key, other.segments))
  _assert_on_policy([plain])
  # The first one, left and on; right; another; third; twice two; rewritten; stripped.
  counts = collections.Counter(turn.segment for turn in plain.turns)
  assert sorted(counts.values()) == [1] * 7 + [3]
  assert plain.metrics['rewritten'] == 1 and plain.metrics['forks'] == 2
  # Each sampled token is trained once.
  table.build([plain])
  sampled = sum(int(s.action_mask.sum()) for s in plain.segments)
  assert sampled == sum(turn.stop - turn.start for turn in plain.turns)


@pytest.mark.parametrize('count', [1, 1000])
def test_what_fits_no_row_truncates_before_it_is_encoded(monkeypatch, count):
  async def run(task, url):
    async with _client(url) as client:
      await _ask(client, [{**USER, 'content': 'x' * (4_000_000 // count)}] * count)

  chat, lengths = serving.policy()[2], []
  plain = chat._control._encode_plain
  monkeypatch.setattr(
    chat._control, '_encode_plain', lambda text: lengths.append(len(text)) or plain(text)
  )
  played = _play(run)
  assert played.status == 'truncated' and f'{serving.SLOTS} tokens' in played.error
  assert sum(lengths) < 100


def test_rewards_add_up():
  async def run(task, url):
    async with _client(url) as client, httpx2.AsyncClient() as http:
      report = functools.partial(http.post, f'{url}/reward')
      assert (await report(json={'reward': 1})).status_code == 400  # No reply yet.
      first = [*task.messages, *await _ask(client, task.messages)]
      assert (await report(json={'reward': 1, 'metrics': {'tool_calls': 7}})).is_success
      assert (await report(json={'reward': 'much'})).status_code == 400
      await _ask(client, [*first, USER])
      assert (await report(json={'reward': {'form': 0.25, 'style': 0.5}})).is_success
    return {'form': 4.0}

  def reward(task, messages, status):
    assert messages[-1]['role'] == 'assistant' and status == 'done'
    return 8.0

  make_env = lambda: program.Program(run, reward, lambda task, messages: {'forks': 5.0})
  (played,) = _collect(make_env, serving.tasks()[:1], max_turn_tokens=64)
  if played.status == 'done':
    assert [turn.reward for turn in played.turns] == [1.0, 12.75]
    named = {'tool_calls': 7.0, 'forks': 5.0, 'rewritten': 0.0}
    named |= {'reward/form': 4.25, 'reward/style': 0.5}
    assert named.items() <= played.metrics.items()
  assert played.error is None


async def _once(task, url):
  async with _client(url) as client:
    return await _ask(client, task.messages) and None


def _blocking(task, url):
  with openai.OpenAI(base_url=url, api_key='none') as client:
    client.chat.completions.create(model='policy', messages=task.messages)
  return 1


async def _raise_after(task, url):
  await _once(task, url)
  raise KeyError('out of luck')


async def _never_ask(task, url):
  return 1.0


async def _for_ever(task, url):
  messages = [*task.messages]
  async with _client(url) as client:
    while True:
      messages += [*await _ask(client, messages), USER]


async def _at_length(task, url):
  async with _client(url) as client:
    await _ask(client, [{'role': 'user', 'content': 'long ' * serving.SLOTS}])


async def _exit(task, url):
  sys.exit(3)


async def _wrong_reward(task, url):
  await _once(task, url)
  return float('nan')


async def _hang(task, url):
  await _once(task, url)
  await asyncio.Event().wait()


def _script(code='', **options):
  command = [sys.executable, '-c', SCRIPT.replace('\n-', f'\n{code}')]
  return program.process(command, **options)


_SLEEP = program.process(['sleep', '600'])


@pytest.mark.parametrize(
  ('run', 'limits', 'status', 'error', 'turns', 'reward'),
  [
    (_blocking, {}, 'done', None, 1, 1.0),
    (_raise_after, {}, 'error', 'KeyError', 1, 0.0),
    (_never_ask, {}, 'error', 'ended without a reply', 0, 0.0),
    (_for_ever, {'max_turns': 3}, 'max_turns', None, 3, 0.0),
    (_for_ever, {'max_turns': 99}, 'truncated', None, None, 0.0),
    (_at_length, {}, 'truncated', 'and a row 320', 0, 0.0),
    (_once, {'max_turn_tokens': 2}, 'truncated', None, 1, 0.0),
    (_exit, {}, 'error', 'SystemExit: 3', 0, 0.0),
    (_wrong_reward, {}, 'error', 'make it finite', 1, 0.0),
    (_hang, {'episode_seconds': 0.5}, 'error', 'episode_seconds', None, 0.0),
    (_SLEEP, {'episode_seconds': 0.5}, 'error', 'episode_seconds', 0, 0.0),
    (_script(), {}, 'done', None, 1, 2.5),
    (_script('sys.exit(4)'), {}, 'error', 'ended with status 4', 1, 0.0),
    (_script('sys.exit(4)', read=lambda *_: 0.5), {}, 'done', None, 1, 0.5),
    (program.process(['/nowhere']), {}, 'error', 'FileNotFoundError', 0, 0.0),
  ],
)  # fmt: skip
def test_how_programs_end(run, limits, status, error, turns, reward):
  played = _play(run, **{'max_turn_tokens': 64} | limits)
  assert played.status == status, played.error
  assert turns in (None, len(played.turns)) and played.reward == reward
  assert (error is None) == (played.error is None) and (error or '') in f'{played.error}'
  assert turns is None or len(played.segments) == min(turns, 1)


def test_a_process_gets_no_variable_of_the_trainer_that_is_not_named(monkeypatch):
  kept = {'HOME': '/home', 'LANG': 'C.UTF-8', 'PATH': os.environ['PATH'], 'GIVEN': 'x'}
  for name, value in ({'API_KEY': 'secret', 'WANDB_API_KEY': 'secret'} | kept).items():
    monkeypatch.setenv(name, value)
  for name in ('LOGNAME', 'SHELL', 'TERM', 'TMPDIR', 'USER'):
    monkeypatch.delenv(name, raising=False)
  found = {}

  def read(status, text):
    found.update(json.loads(text))

  code = 'print(json.dumps({"environ": dict(os.environ)}))'
  command = [sys.executable, '-c', f'import json, os; {code}']
  run = program.process(command, read=read, env=['GIVEN'])
  asyncio.run(run(TASK, 'http://here/v1'))
  found['environ'].pop('LC_CTYPE', None)  # Python sets it in a locale without a name.
  address = {'OPENAI_BASE_URL': 'http://here/v1', 'OPENAI_API_KEY': 'none'}
  address |= {'ANTHROPIC_BASE_URL': 'http://here', 'ANTHROPIC_API_KEY': 'none'}
  assert found['environ'] == kept | address
  with pytest.raises(ValueError, match=r"env: \['NOT_SET_HERE'\] are not set"):
    program.process(command, env=['NOT_SET_HERE', 'GIVEN'])


def test_what_a_program_prints_is_bounded():
  """Its start is dropped, and nothing of it is kept in a file."""
  code = "print('x' * (1 << 21)); print(os.fstat(1).st_size, flush=True)"

  def read(status, text):
    assert len(text) < 1 << 18
    return float(text.split()[-1])

  assert _play(_script(code, read=read), max_turn_tokens=64).reward == 0.0


def test_what_is_asked_too_late_is_refused(gate):
  """The episode is over when its program has ended, whatever it has left behind."""
  found, asked = [], threading.Event()

  def ask_again(url):
    gate.wait()
    body = {'messages': [USER]}
    for path in ('chat/completions', 'reward'):
      found.append(httpx2.post(f'{url}/{path}', json=body).status_code)
    asked.set()

  async def leave_behind(task, url):
    await _once(task, url)
    threading.Thread(target=ask_again, args=(url,), daemon=True).start()

  with serving.engine().open():
    assert _play(leave_behind).status in ('done', 'truncated')
    gate.set()
    assert asked.wait(60)
  assert found == [410, 410]


def test_what_a_process_leaves_behind_is_killed(tmp_path):
  path = tmp_path / 'pid'
  code = (
    'import subprocess; left = subprocess.Popen(["sleep", "600"]); '
    f'open({str(path)!r}, "w").write(str(left.pid)); '
    # It has left the group, and so holds the pipe of the output open.
    'subprocess.Popen(["sleep", "20"], start_new_session=True)'
  )
  played = _play(_script(code), max_turn_tokens=64)
  assert (played.error, played.reward) == (None, 2.5)
  dead = lambda: waiting.has_ended(int(path.read_text()))
  waiting.until(dead, 'the end of what the program started')


def test_messages_keep_control_text_of_the_task():
  text = types.ControlText('Answer in <answer> and </answer>: {q}').format(q='<answer>')
  task = types.Task('marked', [{'role': 'user', 'content': text}])
  make_env = lambda: program.Program(_once)
  (played,) = _collect(make_env, [task])
  chat = serving.policy()[2]
  ids = chat.encode_prompt(task.messages)
  np.testing.assert_array_equal(played.segments[0].tokens[: len(ids)], ids)
  assert json.dumps(played.messages[0]['content']) == json.dumps(str(text))


def test_a_last_line_that_is_nested_too_deeply_is_no_score():
  for line in ('[' * 100_000, '{"a":' * 100_000, '[' * 900 + ']' * 900):
    assert program.read_last_line(0, f'{line}\n') is None
