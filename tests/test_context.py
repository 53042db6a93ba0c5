"""Context strategies: what is in the prompt after each turn, by hand."""

import pytest

from agent_r1_jax import testing, types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.tasks import context

TASK = types.Task(
  't',
  [{'role': 'system', 'content': 'Count.'}, {'role': 'user', 'content': 'To four.'}],
  answer='4',
)
COUNTS = {
  'tool_calls': 1.0,
  'tool_errors': 0.0,
  'tool_timeouts': 0.0,
  'format_errors': 0.0,
}


@tool_lib.tool
def add(n: int) -> tool_lib.Report:
  """Adds 10.

  Args:
    n: To this.
  """
  return tool_lib.Report(str(n + 10), reward=n / 8)


def call(n):
  return f'{n} <tool_call>{{"name": "add", "arguments": {{"n": {n}}}}}</tool_call>'


def make():
  return env_lib.ToolEnv([add], lambda task, m: float(task.answer in m[-1]['content']))


def turn(n):
  """A turn as messages."""
  answer = {'role': 'tool', 'name': 'add', 'content': str(n + 10)}
  return [{'role': 'assistant', 'content': call(n)}, answer]


def user(text):
  return {'role': 'user', 'content': text}


async def play(env, *replies):
  assert await env.reset(TASK) == TASK.messages
  return [await env.step(reply) for reply in replies]


async def test_a_sliding_window_forgets_the_first_turns():
  env = context.SlidingWindow(make(), turns=2)
  steps = await play(env, *map(call, range(4)), 'It is 4.')
  assert [step.fresh for step in steps] == [False, False, True, True, False]
  assert [step.messages for step in steps] == [
    turn(0)[1:],
    turn(1)[1:],
    [*TASK.messages, *turn(1), *turn(2)],
    [*TASK.messages, *turn(2), *turn(3)],
    [],
  ]
  assert [step.reward for step in steps] == [0.0, 0.125, 0.25, 0.375, 1.0]
  assert [step.done for step in steps] == [False] * 4 + [True]
  for step in steps:
    calls = {'tool_calls': 0.0 if step.done else 1.0}
    paid = {'reward/process': step.reward} if step.reward and not step.done else {}
    assert step.metrics == COUNTS | calls | paid | {'context/fresh': float(step.fresh)}
  # What is forgotten is not lost: the reward saw all of it.
  assert len(env.env.messages) == 2 + 2 * 4 + 1


async def test_a_summary_is_asked_for_and_goes_on_alone():
  env = context.Summary(make(), turns=2, prompt='Sum up!')
  thought = f'<think>{call(5)}</think>\n\nAt {{11}}. {call(6)}\n'
  steps = await play(env, call(0), call(1), thought, call(2), call(3), 'x', 'It is 4.')
  recall = 'What you wrote down of the work so far:\n\n'
  assert [step.messages for step in steps] == [
    turn(0)[1:],
    [*turn(1)[1:], user('Sum up!')],
    [*TASK.messages, user(f'{recall}At {{11}}. {call(6)}')],
    turn(2)[1:],
    [*turn(3)[1:], user('Sum up!')],
    [*TASK.messages, user(f'{recall}x')],
    [],
  ]
  assert [i for i, step in enumerate(steps) if step.fresh] == [2, 5]
  assert [step.reward for step in steps] == [0.0, 0.125, 0.0, 0.25, 0.375, 0.0, 1.0]
  assert [step.done for step in steps] == [False] * 6 + [True]
  assert steps[1].metrics == COUNTS | {'reward/process': 0.125, 'context/fresh': 0.0}
  assert steps[2].metrics == {'context/fresh': 1.0}
  # The environment saw neither the request nor the summary, and ran no call of it.
  contents = [m['content'] for m in env.env.messages]
  assert 'Sum up!' not in contents and thought not in contents
  assert len(contents) == 2 + 2 * 4 + 1


async def test_a_reply_that_a_budget_cut_is_judged_and_a_summary_is_not():
  def judge(task, messages):
    judged.append(messages[-1]['content'])
    return 1.0

  judged = []
  env = context.Summary(env_lib.ToolEnv([add], judge), turns=1)
  await play(env, call(0))  # Its answer ends with the request for a summary.
  await env.finish('truncated', 'So far it is 4')
  await play(env, call(0), 'a summary')
  await env.finish('truncated', 'So it is 4')
  assert judged == [turn(0)[1]['content'], 'So it is 4']


def last_sum(env):
  sums = [m['content'] for m in env.messages if m['role'] == 'tool']
  return [env.task.messages[0], user(f'{len(sums)} sums, the last {sums[-1:]}')]


async def test_a_rebuilt_context_is_the_rendered_state():
  env = context.Rebuilt(make(), last_sum)
  opening = [TASK.messages[0], user('0 sums, the last []')]
  assert await env.reset(TASK) == opening
  steps = [await env.step(reply) for reply in (call(0), call(1) * 2, 'It is 4.')]
  assert [step.messages for step in steps] == [
    [TASK.messages[0], user("1 sums, the last ['10']")],
    [TASK.messages[0], user("3 sums, the last ['11']")],
    [],
  ]
  assert [step.fresh for step in steps] == [True, True, False]
  assert [step.reward for step in steps] == [0.0, 0.25, 1.0]
  assert [step.metrics['context/fresh'] for step in steps] == [1.0, 1.0, 0.0]


async def test_a_rendering_that_is_no_prompt_is_refused(refused):
  for messages, shown in (([], r'\[\]'), (turn(0), r"\[\{'role': 'assistant'")):
    env = context.Rebuilt(make(), lambda env, messages=messages: messages)
    with pytest.raises(ValueError, match=f'render gave {shown}.*begins with a system'):
      await env.reset(TASK)
  env = context.Rebuilt(make(), lambda env: env.messages[2:] or env.messages)
  await env.reset(TASK)
  with refused('begins with a system'):
    await env.step(call(0))


STRATEGIES = {
  'window': lambda make: context.SlidingWindow(make(), turns=2),
  'summary': lambda make: context.Summary(make(), turns=1),
  'rebuilt': lambda make: context.Rebuilt(make(), last_sum),
}


@pytest.mark.parametrize('name', STRATEGIES)
async def test_it_conforms_and_has_the_tools(name):
  replies = [call(0), call(1), '<tool_call>{', call(2), 'It is 4.']
  steps = await testing.check_env(lambda: STRATEGIES[name](make), TASK, replies)
  assert any(step.fresh for step in steps)
  assert STRATEGIES[name](make).tools == (add,)
  closed = []
  env = STRATEGIES[name](make)
  env.env.close = lambda: closed.append(True)
  await env.close()
  assert closed == [True]


@pytest.mark.parametrize('name', STRATEGIES)
async def test_its_messages_belong_to_the_caller(name):
  """Whoever changes them changes no later prompt."""
  env, other = STRATEGIES[name](make), STRATEGIES[name](make)
  (await env.reset(TASK)).clear()
  await other.reset(TASK)
  for n in range(5):
    step = await env.step(call(n))
    assert step == await other.step(call(n))
    for message in step.messages:
      message['content'] = 'changed'


@pytest.mark.parametrize('strategy', [context.SlidingWindow, context.Summary])
def test_it_remembers_something(refused, strategy):
  with refused('turns'):
    strategy(make(), turns=0)


class Levels:
  """Has no tools, and begins a context of its own at every third turn."""

  async def reset(self, task):
    self.turn = 0
    return list(task.messages)

  async def step(self, reply):
    self.turn += 1
    return types.Step([user(f'level {self.turn}')], fresh=self.turn % 3 == 0)


async def test_a_new_context_of_the_environment_is_the_opening_from_then_on():
  env = context.SlidingWindow(Levels(), turns=1)
  steps = await play(env, *'abcdef')
  assert env.tools == ()
  assert [step.fresh for step in steps] == [False, True, True, False, True, True]
  said = {'role': 'assistant', 'content': 'e'}
  assert steps[2].messages == [user('level 3')]
  assert steps[3].messages == [user('level 4')]
  assert steps[4].messages == [user('level 3'), said, user('level 5')]
  assert steps[5].messages == [user('level 6')]

  steps = await play(context.Summary(Levels(), turns=2, prompt='?'), *'abcdefgh')
  asked = [i for i, step in enumerate(steps) if user('?') in step.messages]
  assert asked == [1, 5]
  assert [i for i, step in enumerate(steps) if step.fresh] == [2, 3, 6, 7]
  recall = user(context.RECALL.format(summary='g'))
  assert steps[6].messages == [user('level 3'), recall]
