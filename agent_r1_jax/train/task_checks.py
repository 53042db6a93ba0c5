"""Checks tasks before a run: their fields, their answers, and the time they need.

Limits must leave tasks the time that their environment asks for: late episodes are not
learned from, so with tighter limits, code that hangs a task's tests would escape its bad
reward.
"""

import asyncio
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import threading
from typing import Any

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import messages as messages_lib
from agent_r1_jax.host import records, thread_pool
from agent_r1_jax.train import fingerprint

_FORMS = '{}', '<answer>{}</answer>', '\\boxed{{{}}}'


def check_sets(tasks: Any, evals: Any) -> None:
  """Checks training tasks and evaluation sets: types, ids, messages and answers.

  Raises:
    ValueError: A set is empty or not a sequence of tasks, or a task's field is wrong.
  """
  _check_tasks(tasks, 'tasks', 'give at least one task to train on')
  if evals is not None and not isinstance(evals, Mapping):
    raise ValueError(
      f'evals is {evals!r:.100}; it must be a dict of sets by their names, such as '
      "{'held_out': [...]}."
    )
  for name, held_out in (evals or {}).items():
    _check_tasks(held_out, f'evals[{name!r}]', 'give tasks to evaluate, or drop it')


def _check_tasks(tasks: Any, name: str, remedy: str):
  """Raises ValueError unless a value is a non-empty sequence of tasks.

  Only a sample of a large data set is read. `remedy` says what to do if it is empty.
  """
  seen: dict[str, types.Task] = {}
  listed = hasattr(tasks, '__len__') and hasattr(tasks, '__getitem__')
  if isinstance(tasks, str) or not listed:
    raise ValueError(f'{name} is {tasks!r:.100}; it must be a list of types.Task.')
  for number, task in fingerprint.sample_tasks(tasks):
    if not isinstance(task, types.Task):
      raise ValueError(
        f'{name}[{number}] is {task!r:.100}; it must be a types.Task, such as '
        "types.Task('1', [{'role': 'user', 'content': 'the question'}], 'the answer')."
      )
    if not isinstance(task.messages, list | tuple):
      raise ValueError(
        f'{name}[{number}] ({task.id!r}): messages is {task.messages!r:.100}; it must be '
        "a list: [{'role': 'user', 'content': 'the question'}]."
      )
    try:
      _check_task(task, seen if isinstance(tasks, list | tuple) else {})
    except ValueError as error:
      raise ValueError(f'{name}[{number}] ({task.id!r}): {error}') from None
  if len(tasks) == 0:
    raise ValueError(f'{name} is empty: {remedy}.')


def _check_task(task: types.Task, seen: dict[str, types.Task]):
  """Raises ValueError for a wrong field; `seen` has the earlier tasks by id."""
  if not isinstance(task.id, str) or not task.id.strip():
    raise ValueError('id must be a string that is not blank.')
  first = seen.setdefault(task.id, task)
  if first is not task and first.messages != task.messages:
    raise ValueError('id is that of another task; give each task its own.')
  for message in task.messages:
    messages_lib.check(message)
  try:
    records.pack(task.answer)
  except ValueError as error:
    raise ValueError(f'answer is {task.answer!r:.80}, which {error}.') from None


def check_answers(
  env: Any, tasks: Sequence[types.Task], limits: config_lib.Limits
) -> None:
  """Raises ValueError for numeric answers if a ToolEnv's reward compares strings.

  Scores the first numeric answer as a reply: it gets less reward than if the task's
  answer were a string. A reward that is late decides nothing.
  """
  while getattr(env, 'keeps_opening', False):
    env = env.env
  numbers = (
    t for _, t in fingerprint.sample_tasks(tasks) if type(t.answer) in (int, float)
  )
  if not isinstance(env, env_lib.ToolEnv) or (task := next(numbers, None)) is None:
    return
  as_text = dataclasses.replace(task, answer=str(task.answer))

  async def compare():
    for form in _FORMS:
      reply = form.format(task.answer)
      with contextlib.suppress(Exception):  # The reward may reject either type.
        if await env.score(task, reply) < await env.score(as_text, reply):
          return reply

  call, reply = thread_pool.POOL.submit(lambda: asyncio.run(compare())), None
  try:
    reply = call.result(min(limits.step_seconds, threading.TIMEOUT_MAX))
  except TimeoutError:
    call.cancel()
  if reply:
    raise ValueError(
      f'tasks: the answer of {task.id!r} is {task.answer!r}, and the reply {reply!r} '
      'gets a higher reward where it is text: make answers strings, or compare numbers.'
    )


def check_times(
  env: Any, sets: Mapping[str, Sequence[types.Task]], limits: config_lib.Limits
) -> None:
  """Raises ValueError for limits below a task's `env.least_limits`, if env has it.

  `sets` has the tasks by the name of their set in messages.

  Raises:
    ValueError: Names the field and the task.
  """
  least_limits = env_lib.find_method(env, 'least_limits')
  if not least_limits:
    return
  for name, tasks in sets.items():
    for number, task in fingerprint.sample_tasks(tasks):
      for field, least in least_limits(task).items():
        if getattr(limits, field) < least:
          raise ValueError(
            f'limits.{field} is {getattr(limits, field):g}, and {name}[{number}] '
            f'({task.id!r}) needs {least:g}: raise it. Nothing is learned from an '
            'episode that is late, so the agent could escape a bad reward.'
          )
