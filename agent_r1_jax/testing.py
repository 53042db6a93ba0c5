"""A conformance test that every environment should pass."""

from collections.abc import Callable, Sequence
import contextlib
import copy
import dataclasses
import json
import math

from agent_r1_jax import types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.host import workers


async def check_env(
  make_env: Callable[[], env_lib.Env], task: types.Task, replies: Sequence[str]
) -> list[types.Step]:
  """Plays `replies`; exactly the last must end the episode.

  Checks the types of messages and steps; that the task is not changed; that the same
  replies get the same answers, even while a second instance plays; that `finish`, if
  defined, scores truncated episodes repeatably; and that `close` works before `reset` and
  during an episode, and disturbs no other instance.

  There must be at least one reply.

  Returns:
    The steps, for further checks.

  Raises:
    AssertionError: The message says what the environment does wrong. The environments are
      closed in this case too.
  """
  assert replies, 'give at least one reply'
  made = []

  def make_and_keep():
    made.append(make_env())
    return made[-1]

  try:
    return await _check_env(make_and_keep, task, replies)
  except BaseException:
    for env in made:
      with contextlib.suppress(Exception):
        await env_lib.call_optional(env, 'close')
    raise


async def _check_env(make_env, task, replies) -> list[types.Step]:
  untouched = copy.deepcopy(task)
  alone, first, second = make_env(), make_env(), make_env()
  for item in getattr(alone, 'tools', ()):
    assert isinstance(item, tool_lib.Tool), f'tools holds {item!r}, which is not a Tool'
  opening = await workers.call(alone.reset, task)
  _check_messages(opening, 'reset')
  assert opening, 'reset returned no messages'
  steps = [await workers.call(alone.step, reply) for reply in replies]
  for i, step in enumerate(steps):
    _check_step(step, f'step {i}', last=i == len(steps) - 1)

  for env in (first, second):
    again = await workers.call(env.reset, task)
    assert again == opening, 'reset is not repeatable'
  for closed in (alone, make_env(), amid := make_env()):
    if closed is amid:
      await workers.call(amid.reset, task)
    await _close(closed)
  for i, (reply, step) in enumerate(zip(replies, steps, strict=True)):
    for env in (first, second):
      again = await workers.call(env.step, reply)
      assert again == step, f'step {i} differs beside another instance: {again} != {step}'
  await _close(first, second)
  await _check_finish(make_env, task, replies[0])
  for message in opening:
    message.clear()
  assert task == untouched, 'the environment changed the task'
  return steps


async def _check_finish(make_env, task, reply):
  """Checks that two environments give a truncated episode the same score."""
  for status, unfinished in (
    ('truncated', reply),
    ('truncated', None),
    ('max_turns', None),
  ):
    scored = []
    for env in (make_env(), make_env()):
      await workers.call(env.reset, task)
      scored.append(await env_lib.call_optional(env, 'finish', status, unfinished))
      await _close(env)
    where = f'finish({status!r}, ...)'
    if scored[0] is not None:
      assert isinstance(scored[0], types.Step), f'{where} returned no Step: {scored[0]}'
      step = dataclasses.replace(scored[0], messages=[], done=True)
      _check_step(step, where, last=True)
    assert scored[0] == scored[1], f'{where} is not repeatable: {scored}'


async def _close(*envs):
  for env in envs:
    try:
      await env_lib.call_optional(env, 'close')
    except Exception as error:
      raise AssertionError(f'close: {workers.describe_error(error)}') from error


def _check_step(step: types.Step, where: str, *, last: bool) -> None:
  assert isinstance(step, types.Step), f'{where} returned {type(step)}, not a Step'
  _check_messages(step.messages, where)
  for name in ('done', 'fresh'):
    value = getattr(step, name)
    assert type(value) is bool, f'{where}: {name} is {value!r}, not a bool'
  assert step.done == last, f'{where}: done is {step.done}, but last reply is {last}'
  if step.done:
    assert not step.messages, f'{where}: messages after the end are never seen'
  else:
    assert step.messages, f'{where}: an agent that is not done must see something'
  for name, value in {'reward': step.reward, **step.metrics}.items():
    assert isinstance(value, int | float), f'{where}: {name} is {value!r}, not a number'
    assert math.isfinite(value), f'{where}: {name} is {value}'


def _check_messages(messages: list[types.Message], where: str) -> None:
  assert isinstance(messages, list), f'{where}: messages are {type(messages)}, not a list'
  for message in messages:
    assert isinstance(message, dict), f'{where}: the message {message!r} is not a dict'
    for key in ('role', 'content'):
      assert isinstance(message.get(key), str), f'{where}: no text under {key!r}'
    assert json.loads(json.dumps(message)) == message, f'{where}: not JSON: {message!r}'
