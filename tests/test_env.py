import asyncio
import json
import math
import threading
from typing import Any

import pytest

from agent_r1_jax import testing, types
from agent_r1_jax.agent import calls as calls_lib
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.tools import calculator as calculator_lib

CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
TASK = types.Task('t1', [{'role': 'user', 'content': 'What is 2 * 3?'}], answer='6')


@tool_lib.tool
async def nap(seconds: float) -> str:
  """Sleeps.

  Args:
    seconds: How long.
  """
  await asyncio.sleep(seconds)
  return f'slept {seconds:g}'


_LET_GO = threading.Event()


@tool_lib.tool(timeout=0.05)
def hang() -> str:
  """Hangs."""
  _LET_GO.wait()
  return 'never'


@pytest.fixture(scope='module', autouse=True)
def _let_go():
  yield
  _LET_GO.set()


@tool_lib.tool
def fail() -> str:
  """Fails."""
  raise RuntimeError('no disk')


def right(task, messages):
  return float(task.answer in messages[-1]['content'])


def counts(calls=0.0, errors=0.0, timeouts=0.0, malformed=0.0):
  """The metrics of a turn's calls."""
  named = {'tool_calls': calls, 'tool_errors': errors, 'tool_timeouts': timeouts}
  return named | {'format_errors': malformed}


def make(**kwargs):
  tools = [calculator_lib.calculator_tool(), nap, hang, fail]
  return env_lib.ToolEnv(tools, kwargs.pop('reward', right), **kwargs)


def calculate(expression):
  return CALL % ('calculator', f'{{"expression": "{expression}"}}')


async def begin(**kwargs):
  env = make(**kwargs)
  assert await env.reset(TASK) == TASK.messages
  return env


async def test_a_call_is_answered_and_a_reply_without_one_ends_with_the_reward():
  env = await begin()
  step = await env.step('I compute. ' + calculate('2 * 3'))
  assert step == types.Step(
    messages=[{'role': 'tool', 'name': 'calculator', 'content': '6'}],
    metrics=counts(calls=1.0),
  )
  step = await env.step('It is 6.')
  assert (step.messages, step.reward, step.done, step.fresh) == ([], 1.0, True, False)
  assert step.metrics == counts()
  assert [m['role'] for m in env.messages] == ['user', 'assistant', 'tool', 'assistant']
  assert env.messages[-1]['content'] == 'It is 6.'


async def test_a_tool_env_passes_check_env():
  replies = [calculate('1+1') + CALL % ('fail', '{}'), '<tool_call>{', 'It is 6.']
  steps = await testing.check_env(make, TASK, replies)
  assert [step.reward for step in steps] == [0.0, 0.0, 1.0]


async def test_failed_late_malformed_and_unknown_calls_are_answered_with_error_texts():
  env = await begin()
  reply = '\n'.join(
    [
      calculate('1 / 0'),
      CALL % ('hang', '{}'),
      CALL % ('fail', '{}'),
      CALL % ('calculator', '{"x": 1}'),
      CALL % ('no\\"body', '{}'),
      '<tool_call>{oops</tool_call>',
      calculate('1 + 1'),
    ]
  )
  step = await env.step(reply)
  texts = [message['content'] for message in step.messages]
  assert texts == [
    'Error: calculator: ZeroDivisionError: division by zero',
    'Error: hang gave no answer within 0.05 seconds',
    'Error: fail: RuntimeError: no disk',
    "Error: calculator: unknown argument 'x'; it takes expression",
    'Error: there is no tool "no\\"body"; there are: calculator, nap, hang, fail',
    'Error: invalid tool call: Expecting property name enclosed in double quotes',
    '2',
  ]
  assert all(message['role'] == 'tool' for message in step.messages)
  assert [m.get('name') for m in step.messages][4:] == ['no"body', None, 'calculator']
  # The tool is told from the call, and of its errors those that no argument explains.
  raised = {'tool_failures': 3.0, 'tool_error/calculator/ZeroDivisionError': 1.0}
  raised |= {'tool_outages': 2.0, 'outage/fail/RuntimeError': 1.0}
  raised |= {'outage/hang/CallTimeoutError': 1.0}
  found = counts(calls=6.0, errors=5.0, timeouts=1.0, malformed=1.0)
  assert step.metrics == found | raised
  for name in raised.keys() - {'tool_failures', 'tool_outages'}:
    tool = name.split('/')[1]
    (text,) = (x for x in texts[:3] if tool in x)
    assert env_lib.find_tool_error(step.messages, name) == text
  assert not step.done
  assert (await env.step('6')).reward == 1.0


async def test_calls_run_at_the_same_time_and_answer_in_order():
  ended = [asyncio.Event() for _ in range(4)]
  ended[3].set()

  @tool_lib.tool
  async def follow(i: int) -> int:
    """Ends after the call that follows it has ended.

    Args:
      i: The call's number.
    """
    await ended[i + 1].wait()
    ended[i].set()
    return i

  env = env_lib.ToolEnv([follow], right)
  await env.reset(TASK)
  step = await env.step(''.join(CALL % ('follow', f'{{"i": {i}}}') for i in range(3)))
  assert [message['content'] for message in step.messages] == ['0', '1', '2']


async def test_too_many_calls_are_refused_in_one_message():
  ran = []

  @tool_lib.tool
  def count(i: int) -> int:
    """Counts.

    Args:
      i: A number.
    """
    ran.append(i)
    return i

  env = env_lib.ToolEnv([count], right, max_parallel_calls=3)
  await env.reset(TASK)
  step = await env.step(''.join(CALL % ('count', f'{{"i": {i}}}') for i in range(1000)))
  assert sorted(ran) == [0, 1, 2]
  texts = [message['content'] for message in step.messages]
  assert texts == ['0', '1', '2', 'Error: 997 more calls were not run; at most 3 a turn.']
  assert step.metrics == counts(calls=1000.0, errors=997.0)


@pytest.mark.parametrize('in_order', [False, True])
async def test_calls_begin_at_once_or_one_after_another(in_order):
  log = []

  @tool_lib.tool
  async def look(i: int) -> int:
    """Looks.

    Args:
      i: A number.
    """
    log.append(i)
    for _ in range(20):  # Others can begin meanwhile.
      await asyncio.sleep(0)
    log.append(-i)
    return i

  env = env_lib.ToolEnv([], right, in_order=in_order)
  env.set_tools([look])  # As an environment does whose tasks have tools of their own.
  await env.reset(TASK)
  step = await env.step(''.join(CALL % ('look', f'{{"i": {i}}}') for i in (1, 2)))
  assert [message['content'] for message in step.messages] == ['1', '2']
  assert log == ([1, -1, 2, -2] if in_order else [1, 2, -1, -2])


async def test_an_overridden_process_reward_is_that_of_each_turn():
  class Strict(env_lib.ToolEnv):
    def process_reward(self, calls, results):
      assert len(calls) == len(results)
      malformed = [isinstance(call, calls_lib.CallError) for call in calls]
      return 0.1 * sum(result.ok for result in results) - sum(malformed)

  env = Strict([calculator_lib.calculator_tool()], right, max_parallel_calls=2)
  await env.reset(TASK)
  assert (await env.step(calculate('1') * 2)).reward == pytest.approx(0.2)
  assert (await env.step('<tool_call>{' + calculate('1') * 2)).reward == pytest.approx(
    -0.9
  )
  assert (await env.step('6')).reward == 1.0


@tool_lib.tool
def play(move: str) -> tool_lib.Report:
  """Plays.

  Args:
    move: Where to.
  """
  return tool_lib.Report({'went': move}, reward={'left': 0.25, 'right': -1}[move])


@tool_lib.tool
async def report(worth: Any) -> tool_lib.Report:
  """Reports.

  Args:
    worth: A number, or not.
  """
  numbers = {'nan': float('nan'), 'inf': float('inf'), 'huge': 10**400}
  return tool_lib.Report('x' * 250_000, numbers.get(worth, worth))


def move(where):
  return CALL % ('play', f'{{"move": "{where}"}}')


async def test_tools_report_rewards_and_a_turn_sums_them():
  env = env_lib.ToolEnv([play, report, nap], right, max_parallel_calls=3)
  await env.reset(TASK)
  step = await env.step(move('left') + CALL % ('nap', '{"seconds": 0}') + move('left'))
  assert step.messages[0]['content'] == '{"went": "left"}'
  assert (step.reward, step.done) == (0.5, False)
  assert step.metrics == counts(calls=3.0) | {'reward/process': 0.5}
  step = await env.step(move('right') + CALL % ('report', '{"worth": 3}'))
  assert step.reward == 2.0
  assert step.messages[1]['content'].endswith('x\n[cut: 250,000 characters in all]')
  assert (await env.step(move('right') + move('up'))).reward == -1.0
  # What is not run is not paid.
  assert (await env.step(move('left') * 5)).reward == 0.75
  assert (await env.step('6')).reward == 1.0


@pytest.mark.parametrize(
  'worth, said', [('nan', 'nan'), ('huge', '1000'), (None, 'None'), ('much', "'much'")]
)
async def test_a_reported_reward_that_is_no_number_is_the_tools_failure(worth, said):
  env = env_lib.ToolEnv([report], right)
  await env.reset(TASK)
  step = await env.step(CALL % ('report', json.dumps({'worth': worth})))
  message = f'Error: report: RuntimeError: the reported reward is {said}'
  assert step.messages[0]['content'].startswith(message)
  assert (step.reward, step.done, step.metrics['tool_outages']) == (0.0, False, 1.0)


async def test_a_process_reward_may_be_a_function_with_parts():
  seen = []

  async def both(env, calls, results):
    seen.append((len(calls), [r.reward for r in results], env.messages[-1]['content']))
    return {'play': sum(r.reward for r in results), 'turn': -0.125}

  def final(task, messages):
    return {'right': 1.0, 'turn': 0.5}

  env = env_lib.ToolEnv([play], final, process_reward=both, max_parallel_calls=1)
  await env.reset(TASK)
  step = await env.step(move('left'))
  assert step.reward == 0.125
  parts = {'reward/play': 0.25, 'reward/turn': -0.125}
  assert step.metrics == counts(calls=1.0) | parts
  assert (await env.step(move('right') * 2)).reward == -1.125
  step = await env.step('6')
  assert step.reward == 1.375
  parts = {'reward/play': 0.0, 'reward/turn': 0.375, 'reward/right': 1.0}
  assert step.metrics == counts() | parts
  assert [n for n, _, _ in seen] == [1, 1, 0]
  assert [r for _, r, _ in seen] == [[0.25], [-1.0], []]
  assert seen[0][2] == '{"went": "left"}' and seen[2][2] == '6'
  assert seen[1][2] == 'Error: 1 more calls were not run; at most 1 a turn.'


@pytest.mark.parametrize(
  ('name', 'value'),
  [
    *(('reward', value) for value in (None, 'good', {'em': None}, math.nan)),
    ('process_reward', {'a': 1.0, 'b': math.inf}),
    ('metrics', 1.0),
  ],
)
async def test_a_score_that_is_no_finite_number_raises_with_its_task(
  refused, name, value
):
  env = await begin(**{name: lambda *_: value})
  with refused(f"{name.replace('_', ' ')} of task 't1'"):
    await env.step('6')


async def test_parse_replaces_the_format_of_calls():
  def parse(reply):
    words = reply.split()
    return [calls_lib.ToolCall('nap', {'seconds': 0})] if 'NAP' in words else []

  env = await begin(parse=parse)
  assert (await env.step('a NAP please')).messages[0]['content'] == 'slept 0'
  assert (await env.step(calculate('1'))).done


async def test_steps_belong_between_reset_and_done(refused):
  with refused('reset'):
    await make().step('6')
  env = await begin()
  await env.step('6')
  with refused('episode'):
    await env.step('6')
  await env.reset(TASK)
  assert (await env.step('7')).reward == 0.0


@pytest.mark.parametrize(
  ('name', 'value'), [('max_parallel_calls', 0), ('metrics', 'em')]
)
def test_wrong_constructor_arguments_are_refused(refused, name, value):
  with refused(name):
    env_lib.ToolEnv([], right, **{name: value})


async def test_an_unfinished_reply_is_the_last_message_that_is_judged():
  def judge(task, messages, status):
    judged.append((status, [message['content'] for message in messages]))
    return 0.5

  judged, question = [], TASK.messages[0]['content']
  for reply in ('6, beca', '', None):
    env = env_lib.ToolEnv([], judge)
    await env.reset(TASK)
    step = await env.finish('truncated', reply)
    assert step.done and step.reward == 0.5 and step.messages == []
  assert judged == [
    ('truncated', [question, '6, beca']),
    ('truncated', [question, '']),
    ('truncated', [question]),
  ]


async def test_retries_and_calls_of_an_isolated_tool_are_counted(monkeypatch):
  monkeypatch.setattr(tool_lib, '_PAUSES', (0.0,))

  @tool_lib.tool(idempotent=True)
  def lost() -> str:
    """Fails."""
    raise OSError

  env = env_lib.ToolEnv([lost], right)
  await env.reset(TASK)
  call = CALL % ('lost', '{}')
  for _ in range(20):
    step = await env.step(call)
  raised = {'tool_retries': 1.0, 'outage/lost/OSError': 1.0}
  raised |= {'tool_failures': 1.0, 'tool_outages': 1.0}
  assert step.metrics == counts(calls=1.0, errors=1.0) | raised
  step = await env.step(call + call)
  isolated = {'isolated/lost': 2.0, 'isolated_calls': 2.0}
  isolated |= {'tool_failures': 2.0, 'tool_outages': 2.0}
  assert step.metrics == counts(calls=2.0, errors=2.0) | isolated
