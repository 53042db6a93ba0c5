import asyncio
import itertools
import json
import math
import pathlib
import re
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
  'worth, message',
  [
    ('nan', 'ValueError: the reported reward is nan; make it finite.'),
    ('huge', 'OverflowError: '),
    (None, 'TypeError: '),
  ],
)
async def test_a_reported_reward_that_is_no_number_is_a_failed_call(worth, message):
  env = env_lib.ToolEnv([report], right)
  await env.reset(TASK)
  step = await env.step(CALL % ('report', json.dumps({'worth': worth})))
  assert step.messages[0]['content'].startswith(f'Error: report: {message}')
  assert (step.reward, step.done, step.metrics['tool_errors']) == (0.0, False, 1.0)


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
  'kwargs, message',
  [
    ({'reward': lambda *_: None}, "reward of task 't1' is None; make it a number, or a"),
    ({'reward': lambda *_: 'good'}, "reward of task 't1' is 'good'; make it a number"),
    ({'reward': lambda *_: {'em': None}}, r"'t1' is \{'em': None\}; make it a number"),
    ({'metrics': lambda *_: 1.0}, "metrics of task 't1' are 1.0; make them a dict of"),
    ({'reward': lambda *_: float('nan')}, "^the reward of task 't1' is nan; make it fin"),
    (
      {'process_reward': lambda *_: {'a': 1.0, 'b': math.inf}},
      'process reward of .* inf',
    ),
  ],
)
async def test_a_score_that_is_no_finite_number_raises_with_its_task(kwargs, message):
  env = await begin(**kwargs)
  with pytest.raises(ValueError, match=message):
    await env.step('6')


async def test_parse_replaces_the_format_of_calls():
  def parse(reply):
    words = reply.split()
    return [calls_lib.ToolCall('nap', {'seconds': 0})] if 'NAP' in words else []

  env = await begin(parse=parse)
  assert (await env.step('a NAP please')).messages[0]['content'] == 'slept 0'
  assert (await env.step(calculate('1'))).done


async def test_steps_belong_between_reset_and_done():
  with pytest.raises(ValueError, match='call reset first'):
    await make().step('6')
  env = await begin()
  await env.step('6')
  with pytest.raises(ValueError, match='the episode is over'):
    await env.step('6')
  await env.reset(TASK)
  assert (await env.step('7')).reward == 0.0


@pytest.mark.parametrize(
  'kwargs, message',
  [
    ({'tools': [], 'max_parallel_calls': 0}, 'must be at least 1'),
    ({'tools': [], 'metrics': 'em'}, "metrics is 'em'; it must be a function"),
  ],
)
def test_wrong_constructor_arguments_are_refused(kwargs, message):
  with pytest.raises(ValueError, match=message):
    env_lib.ToolEnv(**{'reward': right} | kwargs)


class Guess:
  """A guessing game, with one fault."""

  shared = 0
  left = 0

  def __init__(self, fault=''):
    self.fault = fault

  async def reset(self, task):
    self.left = Guess.left = 2
    if self.fault == 'task':
      task.info['x'] = 1
    if self.fault == 'alias':
      return task.messages
    if self.fault == 'shallow':
      return list(task.messages)
    if self.fault == 'opening':
      return []
    if self.fault == 'reset':
      Guess.shared += 1
      return [{'role': 'user', 'content': str(Guess.shared)}]
    return [dict(message) for message in task.messages]

  async def step(self, reply):
    self.left -= 1
    Guess.shared += 1
    if self.fault == 'class':
      Guess.left = self.left = Guess.left - 1
    step = types.Step([{'role': 'user', 'content': 'No.'}])
    if not self.left:
      step = types.Step([], reward=1.0, done=True)
    match self.fault:
      case 'shared':
        step.reward = float(Guess.shared)
      case 'endless':
        step = types.Step([{'role': 'user', 'content': 'No.'}])
      case 'silent':
        step.messages = []
      case 'chatty':
        step.messages = [{'role': 'user', 'content': 'Bye.'}]
      case 'none':
        return None
      case 'nan':
        step.reward = float('nan')
      case 'metric':
        step.metrics = {'x': '1'}
      case 'done':
        step.done = int(step.done)
      case 'content':
        step.messages = [{'role': 'user', 'content': None}] if self.left else []
      case 'json':
        message = {'role': 'user', 'content': 'x', 'pair': (1, 2)}
        step.messages = [message] if self.left else []
      case 'tuple':
        step.messages = tuple(step.messages)
    return step


async def test_check_env_passes_a_good_environment():
  steps = await testing.check_env(Guess, TASK, ['a', 'b'])
  assert [step.reward for step in steps] == [0.0, 1.0]


@pytest.mark.parametrize(
  'fault, message',
  [
    ('task', 'changed the task'),
    ('alias', 'changed the task'),
    ('shallow', 'changed the task'),
    ('opening', 'reset returned no messages'),
    ('reset', 'reset is not repeatable'),
    ('shared', 'step 0 differs beside another instance'),
    ('class', 'step 0 differs beside another instance'),
    ('endless', 'step 1: done is False, but last reply is True'),
    ('silent', 'must see something'),
    ('chatty', 'messages after the end'),
    ('none', 'not a Step'),
    ('nan', 'reward is nan'),
    ('metric', "x is '1', not a number"),
    ('done', 'done is 0, not a bool'),
    ('content', "no text under 'content'"),
    ('json', 'not JSON'),
    ('tuple', 'not a list'),
  ],
)
async def test_check_env_finds_faults(fault, message):
  task = types.Task('t', [{'role': 'user', 'content': 'Guess.'}])
  with pytest.raises(AssertionError, match=message):
    await testing.check_env(lambda: Guess(fault), task, ['a', 'b'])


@pytest.mark.parametrize(
  'finish, message',
  [
    (
      lambda status, reply: types.Step([], reward=float(next(_counter)), done=True),
      'rep',
    ),
    (lambda status, reply: 'x', r"finish\('truncated', ...\) returned no Step"),
    (lambda status, reply: types.Step([], float('nan'), done=True), 'reward is nan'),
  ],
)
async def test_check_env_finds_faults_of_finish(finish, message):
  def make():
    env = Guess()
    env.finish = finish
    return env

  with pytest.raises(AssertionError, match=message):
    await testing.check_env(make, TASK, ['a', 'b'])


_counter = itertools.count()


def test_the_environment_of_the_docs_is_played():
  page = pathlib.Path(__file__).parents[1] / 'docs/environments.md'
  block, *_ = re.findall(r'```python\n(.*?)```', page.read_text(), re.S)
  names = {}
  exec(block, names)
  assert [step.reward for step in names['steps']] == [0.0, 0.0, 1.0]
  assert names['steps'][1].messages == [{'role': 'user', 'content': 'Lower.'}]


async def test_check_env_closes_what_it_made():
  closed = []

  class Closes(Guess):
    async def close(self):
      closed.append(self)
      if fails:
        raise ValueError('was never reset')

  fails = False
  await testing.check_env(Closes, TASK, ['a', 'b'])
  assert len(closed) == len({id(env) for env in closed}) > 3
  closed.clear()
  with pytest.raises(AssertionError, match='reward is nan'):
    await testing.check_env(lambda: Closes('nan'), TASK, ['a', 'b'])
  assert len(closed) == 3
  fails = True
  with pytest.raises(AssertionError, match='close: ValueError: was never reset'):
    await testing.check_env(Closes, TASK, ['a', 'b'])


async def test_check_env_takes_methods_that_are_not_async():
  class Plain(Guess):
    def reset(self, task):
      return asyncio.run(super().reset(task))

    def step(self, reply):
      return asyncio.run(super().step(reply))

    def finish(self, status, reply):
      return types.Step([], reward=0.5)

  steps = await testing.check_env(Plain, TASK, ['a', 'b'])
  assert [step.reward for step in steps] == [0.0, 1.0]


async def test_check_env_wants_the_episode_to_end_with_the_replies():
  with pytest.raises(AssertionError, match='step 1: done is True'):
    await testing.check_env(Guess, TASK, ['a', 'b', 'c'])
  with pytest.raises(AssertionError, match='at least one reply'):
    await testing.check_env(Guess, TASK, [])


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


class Example(env_lib.BaseEnv):
  """The example of BaseEnv."""

  def reset(self, task):
    self.answer = task.answer
    return [dict(message) for message in task.messages]

  def step(self, reply):
    return types.Step([], reward=float(reply == self.answer), done=True)


async def test_of_a_base_env_only_what_a_class_overrides_is_called():
  class Closes(Example):
    def close(self):
      self.answer = 'closed'

  task = types.Task('x', [{'role': 'user', 'content': 'Guess.'}], '7')
  (step,) = await testing.check_env(Example, task, ['7'])
  assert step.reward == 1.0
  names = 'finish', 'set_seed', 'close', 'clone', 'least_limits'
  assert not any(env_lib.find_method(Example(), name) for name in names)
  closes = Closes()
  assert env_lib.find_method(closes, 'close') == closes.close
  assert env_lib.find_method(object(), 'close') is None
  with pytest.raises(TypeError, match='abstract'):
    type('Half', (env_lib.BaseEnv,), {'reset': Example.reset})()
