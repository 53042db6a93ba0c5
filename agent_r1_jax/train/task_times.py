"""Checks of tasks that need the environment: their times, and their answers.

Limits must leave tasks the time that their environment says they need: nothing is learned
from an episode that is late, so code that hangs the tests of a task would escape a bad
reward, if the limits were below the task's own times.
"""

import asyncio
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
from typing import Any

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.host import thread_pool
from agent_r1_jax.train import identity

_FORMS = '{}', '<answer>{}</answer>', '\\boxed{{{}}}'


def check_answers(env: Any, tasks: Sequence[types.Task]) -> None:
  """Raises ValueError for numbers as answers where a ToolEnv's reward compares text.

  The first of them, given as a reply, gets less then than if it were text.
  """
  while getattr(env, 'keeps_opening', False):
    env = env.env
  numbers = (t for _, t in identity.sample_tasks(tasks) if type(t.answer) in (int, float))
  if not isinstance(env, env_lib.ToolEnv) or (task := next(numbers, None)) is None:
    return
  as_text = dataclasses.replace(task, answer=str(task.answer))

  async def compare():
    for form in _FORMS:
      reply = form.format(task.answer)
      with contextlib.suppress(Exception):  # Of either kind of answer.
        if await env.score(task, reply) < await env.score(as_text, reply):
          return reply

  if reply := thread_pool.POOL.submit(lambda: asyncio.run(compare())).result():
    raise ValueError(
      f'tasks: the answer of {task.id!r} is {task.answer!r}, and the reply {reply!r} '
      'gets a higher reward where it is text: make answers strings, or compare numbers.'
    )


def check(
  env: Any, sets: Mapping[str, Sequence[types.Task]], limits: config_lib.Limits
) -> None:
  """Refuses limits below what `env.least_limits` says of a task, if it has that method.

  `sets` has the tasks by the name of their set in messages.

  Raises:
    ValueError: The message names the field and the task.
  """
  if not hasattr(env, 'least_limits'):
    return
  for name, tasks in sets.items():
    for number, task in identity.sample_tasks(tasks):
      for field, least in env.least_limits(task).items():
        if getattr(limits, field) < least:
          raise ValueError(
            f'limits.{field} is {getattr(limits, field):g}, and {name}[{number}] '
            f'({task.id!r}) needs {least:g}: raise it. Nothing is learned from an '
            'episode that is late, so the agent could escape a bad reward.'
          )
