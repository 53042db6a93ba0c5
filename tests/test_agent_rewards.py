"""Rewards that fit any task, by hand; shaping telescopes over real episodes."""

import asyncio

import pytest

from agent_r1_jax import types
from agent_r1_jax.agent import call_formats, scoring
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.tasks import rewards
from agent_r1_jax.tools import calculator as calculator_lib

TASK = types.Task('t', [{'role': 'user', 'content': 'What is 2 * 3?'}], answer='6')
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}</tool_call>'
BAD = '<tool_call>{'


def right(task, messages):
  return float(task.answer in messages[-1]['content'])


async def slow(task, messages):
  await asyncio.sleep(0)
  return 0.5


def said(*replies):
  messages = list(TASK.messages)
  for reply in replies:
    messages += [
      {'role': 'assistant', 'content': reply},
      {'role': 'tool', 'content': BAD},
    ]
  return messages[:-1]


async def play(env, *replies):
  await env.reset(TASK)
  return [await env.step(reply) for reply in replies]


async def test_hybrid_weighs_and_names_its_parts():
  reward = rewards.hybrid(outcome=(2.0, right), slow=(-0.5, slow))
  env = env_lib.ToolEnv([calculator_lib.calculator_tool()], reward)
  first, last = await play(env, CALL % '2 * 3', 'It is 6.')
  assert (first.reward, last.reward) == (0.0, 1.75)
  parts = {k: v for k, v in last.metrics.items() if k.startswith('reward/')}
  assert parts == {'reward/outcome': 2.0, 'reward/slow': -0.25}
  assert await reward(TASK, said('No.')) == {'outcome': 0.0, 'slow': -0.25}


async def test_the_parts_are_computed_at_the_same_time(refused):
  both, ended = asyncio.Barrier(2), asyncio.Event()

  async def meet(task, messages):
    await asyncio.wait_for(both.wait(), 60)
    return 1.0

  assert await rewards.hybrid(a=(1.0, meet), b=(2.0, meet))(TASK, said('6')) == {
    'a': 1.0,
    'b': 2.0,
  }

  async def wait(task, messages):
    try:
      await both.wait()
    finally:
      ended.set()

  async def fail(task, messages):
    raise ValueError('no reward')

  with refused('no reward'):
    await rewards.hybrid(a=(1.0, wait), b=(1.0, fail))(TASK, said('6'))
  await asyncio.wait_for(ended.wait(), 60)


async def test_parts_are_numbers(refused):
  inner = rewards.hybrid(outcome=(1.0, right))
  env = env_lib.ToolEnv([], rewards.hybrid(inner=(1.0, inner)))
  with refused('outcome'):
    await play(env, '6')


@pytest.mark.parametrize('part', [right, (1.0, 2.0), (float('nan'), right)])
def test_a_part_is_a_weight_and_a_reward(refused, part):
  with refused('outcome'):
    rewards.hybrid(outcome=part)


@pytest.mark.parametrize(
  ('replies', 'share'),
  [
    (['6'], 1.0),
    ([CALL % '1', '6'], 1.0),
    ([BAD, '6'], 0.0),
    ([CALL % '1' * 2, BAD, CALL % '1' + BAD, '6'], 3 / 5),
    ([f'<think>{BAD}</think>', '6'], 1.0),
  ],
)
def test_well_formed_is_a_share_of_the_calls(replies, share):
  assert rewards.well_formed(TASK, said(*replies)) == share


def test_what_the_task_shows_is_no_call_of_the_agent():
  shown = types.Task('t', said(BAD, BAD, '6') + TASK.messages)
  messages = [*shown.messages, {'role': 'assistant', 'content': CALL % '1'}]
  assert rewards.well_formed(shown, messages) == 1.0


async def test_the_format_is_that_of_the_chat():
  token = call_formats.chat_format.set(call_formats.LLAMA3)
  try:
    env = env_lib.ToolEnv([calculator_lib.calculator_tool()], rewards.well_formed)
    good = '{"name": "calculator", "parameters": {"expression": "2 * 3"}}'
    first, second, last = await play(env, good, '<|python_tag|>2 * 3', 'It is 6.')
  finally:
    call_formats.chat_format.reset(token)
  assert first.messages[0]['content'] == '6'
  assert second.metrics['format_errors'] == 1.0
  assert last.done and last.reward == 0.5


def length(task, messages):
  """Positive at the opening, and not bounded by the reward."""
  assert task == TASK
  return 0.25 * sum(len(m['content']) for m in messages)


async def late(task, messages):
  return length(task, messages)


REPLIES = (CALL % '2 * 3', BAD, CALL % '1' * 2, 'It is 6.')


@pytest.mark.parametrize('potential', [length, late])
@pytest.mark.parametrize('gamma', [1.0, 0.5])
async def test_shaping_telescopes(potential, gamma):
  def make(**kwargs):
    return env_lib.ToolEnv([calculator_lib.calculator_tool()], right, **kwargs)

  shaping = rewards.potential_based(potential, gamma)
  plain = await play(make(), *REPLIES)
  env = make(process_reward=shaping)
  await env.reset(TASK)
  states, steps = [length(TASK, env.messages)], []
  for reply in REPLIES:
    steps.append(await env.step(reply))
    states.append(length(TASK, env.messages))
  states[-1] = 0.0  # It is over.
  given = [s.reward - p.reward for s, p in zip(steps, plain)]
  assert given == [gamma * b - a for a, b in zip(states, states[1:])]
  assert all(given) and given[-1] == -states[-2]
  assert sum(gamma**t * f for t, f in enumerate(given)) == -states[0]
  assert not any(k.startswith('reward/') for s in steps for k in s.metrics)


async def test_an_episode_that_was_cut_keeps_the_potential_of_where_it_was():
  env = env_lib.ToolEnv(
    [calculator_lib.calculator_tool()],
    right,
    process_reward=rewards.potential_based(length),
  )
  steps = await play(env, *REPLIES[:2])
  total = sum(step.reward for step in steps)
  assert total == length(TASK, env.messages) - length(TASK, TASK.messages) > 0


async def test_a_weight_may_be_a_schedule_over_the_run():
  reward = rewards.hybrid(outcome=(1.0, right), slow=(lambda step: 1 - step / 4, slow))
  assert (await reward(TASK, said('6')))['slow'] == 0.5
  token = scoring.policy_step.set(3)
  try:
    assert (await reward(TASK, said('6'))) == {'outcome': 1.0, 'slow': 0.125}
  finally:
    scoring.policy_step.reset(token)
