"""Plays an environment with scripted replies, and checks its rewards and answers."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
import dataclasses
import re
import time
from typing import Any, NamedTuple

from agent_r1_jax import config as config_lib
from agent_r1_jax import testing, types
from agent_r1_jax.agent import call_formats, calls
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.host import thread_pool, workers
from agent_r1_jax.rollout import rollout
from agent_r1_jax.serve import program
from agent_r1_jax.train import preflight, task_checks

# A call that blocks the event loop longer is reported: all other agents wait for it.
_BLOCKED_SECONDS = 0.3
_TICK_SECONDS = 0.02
# A step that takes longer is reported.
_SLOW_SECONDS = 2.0
_MASKED = 'In training such episodes are masked, and count in max_error_rate.'
_WRONG = 'I do not know.'
# The forms that a task may expect its answer in.
_FORMS = ('{}', '<answer>{}</answer>', '\\boxed{{{}}}', 'Answer: {}')
_EXAMPLES = {'integer': 1, 'number': 1.0, 'boolean': True, 'array': [], 'object': {}}


class Finding(NamedTuple):
  """The result of one check.

  Attributes:
    name: The name of the check.
    status: 'ok', 'warn' or 'fail'.
    text: The result in words.
    remedy: What the user can do, unless the status is 'ok'.
  """

  name: str
  status: str
  text: str
  remedy: str = ''


class _ScriptedEpisode(NamedTuple):
  """A played script; `replies` are the replies passed to the environment."""

  kind: str  # 'right', 'wrong' or 'nothing': the kind of the replies.
  task: types.Task
  replies: list[str]
  reward: float
  done: bool


class _ScriptPlayer:
  """Plays episodes one after the other, and times them.

  Attributes:
    call: The current call, for the message of a time-out.
    slowest: The longest call of each method, in seconds.
    blocked: The longest time that the event loop was blocked, in seconds.
  """

  def __init__(self, make_env: rollout.MakeEnv, limits: config_lib.Limits):
    self.make_env, self.limits = make_env, limits
    self.call, self.slowest = 'make_env', {'reset': 0.0, 'step': 0.0}
    self.blocked = 0.0

  async def play_all(self, scripts: Sequence[tuple[str, types.Task, Sequence[str]]]):
    """Plays all scripts; returns the episodes."""
    ticker = asyncio.ensure_future(self._tick())
    try:
      return [await self._play(*script) for script in scripts]
    finally:
      ticker.cancel()

  async def _play(self, kind, task, replies) -> _ScriptedEpisode:
    env = await workers.call(self.make_env, seconds=self.limits.reset_seconds)
    try:
      await self._call('reset', env.reset, task, seconds=self.limits.reset_seconds)
      reward, used, seconds = 0.0, [], self.limits.step_seconds
      for reply in replies:
        step = await self._call('step', env.step, reply, seconds=seconds)
        used.append(reply)
        reward += step.reward
        if step.done:
          return _ScriptedEpisode(kind, task, used, reward, True)
      self.call = f'finish of task {task.id!r}'
      step = await env_lib.call_optional(env, 'finish', 'max_turns', None)
      return _ScriptedEpisode(
        kind, task, used, reward + (step.reward if step else 0.0), False
      )
    finally:
      await env_lib.call_optional(env, 'close')

  async def _call(self, method: str, fn: Callable, argument: Any, seconds: float) -> Any:
    shown = argument.id if isinstance(argument, types.Task) else argument
    self.call, start = f'{method}({shown!r:.60})', time.monotonic()
    value = await workers.call(fn, argument, name=method, seconds=seconds)
    self.slowest[method] = max(self.slowest[method], time.monotonic() - start)
    return value

  async def _tick(self):
    """Sleeps repeatedly, and measures how late each wake-up is."""
    while True:
      start = time.monotonic()
      await asyncio.sleep(_TICK_SECONDS)
      self.blocked = max(self.blocked, time.monotonic() - start - _TICK_SECONDS)


def check_env(
  tasks: Sequence[types.Task],
  make_env: rollout.MakeEnv,
  *,
  solve: Callable[[types.Task], Sequence[str]] | None = None,
  limits: config_lib.Limits | None = None,
  seconds: float = 120.0,
) -> list[Finding]:
  """Plays the first tasks with scripted replies: right, wrong, empty, and a tool call.

  Finds environments that raise or hang; rewards that are all equal, slow or block the
  event loop; answers in the agent's first messages; and everything that
  testing.check_env rejects. A program.Program is not played, since it needs an endpoint;
  its reward and metrics are called with an empty answer.

  Plays the first four tasks, within `seconds` in total. `solve` returns the replies that
  solve a task; by default they are guessed: the task's answer in several forms.
  """
  limits = limits or config_lib.Limits()
  try:
    task_checks.check_sets(tasks, None)
    reset_seconds = min(seconds, limits.reset_seconds)
    bounds = dataclasses.replace(limits, reset_seconds=reset_seconds)
    with preflight.open_environment(make_env, bounds) as env:
      task_checks.check_times(env, {'tasks': tasks}, limits)
      if isinstance(env, program.Program):
        return [_check_program(env, tasks[:4], seconds)]
      scripts = list(_write_scripts(tasks[:4], env, solve))
  except Exception as error:
    return [Finding('environment', 'fail', workers.describe_error(error))]
  player = _ScriptPlayer(make_env, limits)
  try:
    episodes = _run(lambda: player.play_all(scripts), seconds)
  except Exception as error:
    return [_describe_fault(player.call, error, seconds)]
  return [
    _check_times(player, episodes),
    _check_rewards(episodes, known=solve is not None),
    _check_openings(tasks[:100], make_env, seconds),
    _check_conformance(episodes, make_env, seconds),
  ]


def _run(fn: Callable[[], Coroutine[Any, Any, Any]], seconds: float) -> Any:
  """Runs a coroutine function in a thread; raises TimeoutError if it takes longer."""
  return thread_pool.POOL.submit(lambda: asyncio.run(fn())).result(seconds)


def _describe_fault(call: str, error: Exception, seconds: float) -> Finding:
  text = f'{call}: {workers.describe_error(error)}{workers.locate_error(error)}'
  if not isinstance(error, TimeoutError):
    return Finding('environment', 'fail', text, _MASKED)
  text = f'{call} gave no answer; {seconds:g} seconds were left for all episodes'
  remedy = 'Give what it waits for a time-out; what blocks must be no coroutine.'
  return Finding('environment', 'fail', text, remedy)


def _check_program(
  env: program.Program, tasks: Sequence[types.Task], seconds: float
) -> Finding:
  """Scores an empty answer to each task with the program's reward and metrics."""
  text = 'a program is not played with a scripted policy'
  if env.reward is program.Program.reward and env.metrics is None:
    return Finding('environment', 'ok', f'{text}, and has no reward of its own')

  async def judge_all():
    empty = {'role': 'assistant', 'content': ''}
    return [await env.judge(t, [*t.messages, empty], 'done', None) for t in tasks]

  try:
    rewards = {step.reward for step in _run(judge_all, seconds)}
  except Exception as error:
    return _describe_fault('the reward of an empty answer', error, seconds)
  shown = ', '.join(f'{reward:g}' for reward in sorted(rewards))
  return Finding('environment', 'ok', f'{text}; an empty answer gets {shown}')


def _write_scripts(tasks, env, solve) -> Iterator[tuple[str, types.Task, Sequence[str]]]:
  """Yields (kind, task, replies) for every episode to play."""
  for task in tasks:
    yield 'nothing', task, ['']
    yield 'wrong', task, [_WRONG]
    for tool in getattr(env, 'tools', ()):
      yield 'wrong', task, [_call_of(tool.schema['function']), _WRONG]
    if solve is not None:
      yield 'right', task, list(solve(task))
    else:
      answers = _list_answers(task)[:1]
      yield from (('right', task, [form.format(a)]) for a in answers for form in _FORMS)


def _list_answers(task: types.Task) -> list[str]:
  """Returns a task's right answers, if they are texts or numbers."""
  answers = task.answer if isinstance(task.answer, list | tuple) else [task.answer]
  return [str(answer) for answer in answers if isinstance(answer, str | int | float)]


def _call_of(schema: dict[str, Any]) -> str:
  """Writes a call with an argument of the right type for each required parameter."""
  parameters = schema.get('parameters', {})
  kinds = parameters.get('properties', {})
  arguments = {}
  for name in parameters.get('required', ()):
    known = sorted(calls.list_types(kinds.get(name)) & _EXAMPLES.keys())
    arguments[name] = _EXAMPLES[known[0]] if known else 'test'
  return call_formats.HERMES.render(calls.ToolCall(schema['name'], arguments))


def _check_times(player: _ScriptPlayer, episodes: Sequence[_ScriptedEpisode]) -> Finding:
  times = ', '.join(f'{k} at most {v:.3f} s' for k, v in player.slowest.items())
  text = f'{len(episodes)} episodes played: {times}, rewards included'
  if player.blocked > _BLOCKED_SECONDS:
    return Finding(
      'environment',
      'warn',
      f'{text}; the event loop was held for {player.blocked:.2f} s: all agents wait then',
      'Make what computes or blocks a plain function, which runs in a thread; a grader '
      'that holds the interpreter belongs into isolated.in_subprocess.',
    )
  if player.slowest['step'] > _SLOW_SECONDS:
    remedy = (
      'Cache, batch or bound what it waits for; engine.width helps with slow tools.'
    )
    return Finding('environment', 'warn', text, remedy)
  return Finding('environment', 'ok', text)


def _check_rewards(episodes: Sequence[_ScriptedEpisode], *, known: bool) -> Finding:
  """Compares the rewards of right and wrong replies.

  `known` is True if the right replies come from `solve`, not from guesses.
  """
  rewards = {
    kind: [e.reward for e in episodes if e.kind == kind] for kind in ('right', 'wrong')
  }
  nothing = [e.reward for e in episodes if e.kind == 'nothing']
  different = sorted({round(e.reward, 6) for e in episodes})
  shown = ', '.join(f'{reward:g}' for reward in different[:6])
  if len(different) == 1:
    return Finding(
      'rewards',
      'fail' if known else 'warn',
      f'all {len(episodes)} episodes got {shown}: nothing can be learned from that',
      'Look at the reward.'
      if known
      else 'Look at the reward, or give solve= with replies that solve a task.',
    )
  best = max(rewards['right'], default=different[-1])
  if known and best <= max(rewards['wrong']):
    text = f'replies that solve a task get at most {best:g}, others as much'
    return Finding('rewards', 'fail', text, 'Look at the reward.')
  if max(nothing) >= different[-1]:
    text = f'an empty reply gets {max(nothing):g}, the most that any reply got'
    return Finding('rewards', 'warn', text, 'Reward what was done, not what was not.')
  return Finding('rewards', 'ok', f'{len(different)} different ones: {shown}')


def _check_openings(tasks, make_env, seconds) -> Finding:
  """Looks for answers in the agent's first messages."""

  async def open_all():
    return [await _open(task, make_env) for task in tasks]

  try:
    openings = _run(open_all, seconds)
  except Exception as error:
    return Finding('leaks', 'fail', f'reset: {workers.describe_error(error)}')
  leaking = [
    task
    for task, messages in zip(tasks, openings, strict=True)
    if any(_contains(messages, answer) for answer in _list_answers(task))
  ]
  if not leaking:
    text = f'no answer is in the first messages of {len(tasks)} tasks'
    return Finding('leaks', 'ok', text)
  return Finding(
    'leaks',
    'warn',
    f'{len(leaking)} of {len(tasks)} tasks show their answer in the first messages, such '
    f'as {leaking[0].answer!r:.40} of task {leaking[0].id!r:.40}',
    'Leave it out, unless the agent is to choose among what it is shown.',
  )


async def _open(task, make_env) -> list[types.Message]:
  env = await workers.call(make_env)
  try:
    return await workers.call(env.reset, task)
  finally:
    await env_lib.call_optional(env, 'close')


def _contains(messages: Sequence[types.Message], answer: str) -> bool:
  """Whether an answer of at least three characters is in the messages, as whole words."""
  if len(answer.strip()) < 3:
    return False  # 'no' and '7' are in many texts.
  text = '\n'.join(str(message.get('content')) for message in messages)
  return bool(re.search(rf'(?<!\w){re.escape(answer.strip())}(?!\w)', text, re.I))


def _check_conformance(episodes, make_env, seconds) -> Finding:
  """Runs the conformance test on the longest episode that ended by itself."""
  ended = [e for e in episodes if e.done]
  if not ended:
    remedy = 'Give solve= with replies that end an episode.'
    return Finding('conformance', 'warn', 'no script ended an episode', remedy)
  longest = max(ended, key=lambda e: len(e.replies))
  try:
    test = lambda: testing.check_env(make_env, longest.task, longest.replies)
    _run(test, seconds)
  except Exception as error:
    text = str(error) or workers.describe_error(error)
    remedy = 'testing.check_env says what an environment must keep to.'
    return Finding('conformance', 'fail', f'{text:.300}', remedy)
  return Finding('conformance', 'ok', 'repeatable, and instances do not disturb another')
