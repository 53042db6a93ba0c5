"""Plays one episode: encodes messages, samples replies, and steps the environment.

`Episode.play` fills in a types.Trajectory.
"""

import asyncio
import collections
from collections.abc import Callable
import contextlib
import copy
import dataclasses
import math
from typing import Any

import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import call_formats, rewards
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.guided import search as search_lib
from agent_r1_jax.host import records, thread_pool, workers
from agent_r1_jax.serve import conversation as conversation_lib
from agent_r1_jax.serve import endpoint, program
from agent_r1_jax.train import episode_context


class _EnvironmentError(Exception):
  """The environment or its reward raised; the trajectory is masked, not scored."""


def _name_cause(error: _EnvironmentError) -> str:
  """Returns the name of the type that was raised; 'InvalidAnswer' if nothing was."""
  cause = error.__cause__
  if isinstance(cause, workers.BaseExceptionError):
    cause = cause.__cause__ or cause
  return type(cause).__name__ if cause else 'InvalidAnswer'


@contextlib.contextmanager
def _environment_errors():
  """Raises an exception inside as an _EnvironmentError that says where it was raised."""
  try:
    yield
  except (_EnvironmentError, workers.LoopBlockedError):
    raise
  except Exception as error:
    raise _EnvironmentError(
      workers.describe_error(error) + workers.locate_error(error)
    ) from error


class Episode:
  """The state of one episode while it is played.

  Attributes:
    context: Samples the replies; holds the episode's text in the engine.
    trajectory: The record of the episode, to which each turn is added.
    env: The environment, or a program that plays the episode itself.
    made: Holds the environment from when it is made until it is closed. A list, so that
      of two threads that want to close it one gets it.
    over: Whether the episode has ended: an environment made later is closed at once.
    conversation: The requests that a program has sent; None with an environment.
    pending_ids: Token ids of the messages that will be appended before the next reply.
    schemas: The JSON schemas of the tools, for the prompt.
    pieces: The parts of the current segment: (tokens, behaviour log-probs, policy steps)
      of each prompt, reply and observation; the last two are None except for replies.
    status: One of types.STATUSES; None while the episode goes on.
    unfinished: The text of the last reply, if it ran out of tokens; else None.
    reply: The reply of the last turn; None before the first.
    sampled: Under 'tokens', how many tokens were sampled; shared with all forks.
    value: The sum of an implicit critic's values of the replies so far.
  """

  def __init__(
    self,
    chat: chat_lib.Chat,
    make_env: Callable[[], env_lib.Env | program.Program],
    limits: config_lib.Limits,
    context: episode_context.Context,
    trajectory: types.Trajectory,
  ):
    """Makes no environment yet.

    Args:
      chat: Encodes messages with the policy's tokenizer.
      make_env: Makes the environment, or a program.
      limits: The episode's budgets of tokens, turns and seconds.
      context: A new context.
      trajectory: An empty trajectory with its task and sample number.
    """
    self.chat, self.make_env, self.limits = chat, make_env, limits
    self.context, self.trajectory = context, trajectory
    self.env: Any = None
    self.made: list[env_lib.Env | program.Program] = []
    self.over = False
    self.conversation: conversation_lib.Conversation | None = None
    self.pending_ids = np.zeros(0, np.int32)
    self.schemas: list[dict[str, Any]] = []
    self.pieces: list[tuple[np.ndarray, np.ndarray | None, np.ndarray | None]] = []
    self.status: str | None = None
    self.unfinished: str | None = None
    self.reply: request_lib.Chunk | None = None
    self.sampled = collections.Counter()
    self.value = 0.0

  async def play(self):
    """Plays to the end and completes the trajectory.

    Raises:
      workers.LoopBlockedError: A call waited on an event loop that another call blocks.
    """
    t, abandoned = self.trajectory, collections.Counter()
    thread_pool.abandoned_calls.set(abandoned)
    call_formats.chat_format.set(self.chat.format)
    self.context.restart(0)
    seconds = self.limits.episode_seconds
    try:
      async with asyncio.timeout(None if seconds == math.inf else seconds) as clock:
        task = await self._make_environment()
        if isinstance(self.env, program.Program):
          t.status = await self._run_program(self.env, task)
        else:
          t.status = await self._play_turns(task)
          if t.status in types.BUDGET_STATUSES and t.turns:
            await self._finish(t.status)
    except _EnvironmentError as error:
      t.status, t.error = 'error', str(error)
      t.metrics[f'error/{_name_cause(error)}'] = 1.0
      t.metrics['timeouts'] = float(isinstance(error.__cause__, workers.CallTimeoutError))
    except TimeoutError:
      if not clock.expired():
        raise
      t.status, t.metrics['timeouts'] = 'error', 1.0
      t.metrics['error/LateEpisode'] = 1.0
      t.error = f'the episode took longer than {seconds:g} seconds (episode_seconds)'
    finally:
      await self._end()
    if abandoned:
      t.metrics['abandoned_calls'] = float(abandoned.total())
      t.metrics |= {f'abandoned/{name}': float(n) for name, n in abandoned.items()}

  async def _end(self):
    """Closes the text and the environment, and completes the trajectory's metrics."""
    t = self.trajectory
    self.context.close_all()
    self._close_segment()
    if self.conversation:
      # A metric that the program reported itself has precedence.
      counts = self.conversation.metrics.items()
      t.metrics = {name: float(n) for name, n in counts} | t.metrics
    if self.context.chooser:
      t.metrics['sampled_tokens'] = float(self.context.chooser.sampled)
    if self.context.search:
      t.metrics['sampled_tokens'] = float(self.sampled.total())
    self.over = True
    if await self._close_env():
      t.metrics['close_failed'] = 1.0

  async def _play_turns(self, task: types.Task) -> str:
    """Plays turn after turn, or searches over turns; returns the episode's status."""
    await self._reset(task)
    self._end_without_room()
    if search := self.context.search:
      with _environment_errors():
        search_lib.check(self.env)
      best = await search_lib.play(search, self, self.context.replica)
      # `best` is a fork of this episode, and the rollout returns this one's trajectory.
      for field in dataclasses.fields(types.Trajectory):
        setattr(self.trajectory, field.name, getattr(best.trajectory, field.name))
      self.env, self.pieces, self.unfinished = best.env, best.pieces, best.unfinished
      self.context, self.status = best.context, best.status
    while self.status is None:
      await self.take_turn()
    return self.status

  async def take_turn(self):
    """Samples one reply and passes it to the environment; sets `status` at the end."""
    t, ids = self.trajectory, self.pending_ids
    reply = await self.context.reply(ids, min(self._room, self.limits.max_turn_tokens))
    self.pieces += [
      (ids, None, None),
      (reply.tokens, reply.behaviour_logprobs, reply.policy_steps),
    ]
    self.reply = reply
    self.sampled['tokens'] += len(reply.tokens)
    stop = self.context.length
    turn = types.Turn(len(t.segments), stop - len(reply.tokens), stop)
    t.turns.append(turn)
    rewards.policy_step.set(int(reply.policy_steps[-1]))
    text = self.chat.decode(reply.tokens.tolist())
    t.messages.append({'role': 'assistant', 'content': str(text)})
    if not reply.stopped:
      self.unfinished, self.status = text, 'truncated'
      return
    step = self._add_reward(await self._call_env('step', text))
    if step.done:
      self.status = 'done'
      return
    with _environment_errors():
      t.messages += _copy_messages(step.messages)
      if step.fresh:
        self._close_segment()
        self.context.close()
        self.context.restart(len(t.segments))
        self.pending_ids = self._encode(
          self.chat.encode_prompt, step.messages, self.schemas
        )
      else:
        last = int(reply.tokens[-1])
        self.pending_ids = self._encode(self.chat.encode_delta, step.messages, last)
    if len(t.turns) == self.limits.max_turns:
      self.status = 'max_turns'
    else:
      self._end_without_room()

  @property
  def _room(self) -> int:
    """How many tokens the next reply may have."""
    return self.context.slots - self.context.length - len(self.pending_ids)

  def _end_without_room(self):
    """Ends the episode where the next reply has no room.

    This is known before that reply is asked for, so that a search never reads the value
    of a state which no row holds.
    """
    if self.status is not None or self._room >= 1:
      return
    t, self.status = self.trajectory, 'truncated'
    if not t.turns:
      n, slots = len(self.pending_ids), self.context.slots
      t.error = f'the prompt has {n} tokens, and a row {slots} (slots)'
      t.metrics['prompt_too_long'] = 1.0

  async def fork(self, number: int) -> 'Episode':
    """Returns an independent copy; unless `number` is 0 it samples with other keys."""
    other, t = copy.copy(self), self.trajectory
    other.trajectory = dataclasses.replace(
      t,
      segments=[*t.segments],
      turns=[dataclasses.replace(turn) for turn in t.turns],
      messages=[*t.messages],
      metrics={**t.metrics},
    )
    other.env = await self._call_env('clone')
    other.pieces = [*self.pieces]
    other.context = self.context.fork(number, len(t.turns))
    return other

  @property
  def mean_logprob(self) -> float:
    """The mean log π of the last reply's tokens."""
    assert self.reply is not None
    return float(np.mean(self.reply.logprobs))

  @property
  def tokens_to_last_reply(self) -> np.ndarray:
    """The tokens of the context up to the end of the last reply, int32."""
    if not self.pieces:  # The last step was `fresh`, and closed the reply's segment.
      return self.trajectory.segments[-1].tokens
    return np.concatenate([piece[0] for piece in self.pieces])

  @property
  def tokens(self) -> np.ndarray:
    """The tokens before the next reply; at the end, before the last one's last token."""
    if self.status is not None:
      return self.tokens_to_last_reply[:-1]
    return np.concatenate([*(piece[0] for piece in self.pieces), self.pending_ids])

  async def _run_program(self, env: program.Program, task: types.Task) -> str:
    """Runs a program against an endpoint of its own; returns the episode's status.

    If the endpoint has refused a reply for want of tokens or turns, an error that the
    program raises then counts as that status and not as an error.
    """
    t, limits = self.trajectory, self.limits
    if self.context.chooser or self.context.search:
      raise ValueError('choice: the replies to a program are not chosen; leave it out.')
    conversation = self.conversation = conversation_lib.Conversation(
      self.chat, task, self.context, limits.max_turns, limits.max_turn_tokens
    )
    thread_pool.current_turn.set(f'task {task.id}, sample {t.sample}')
    output = None
    try:
      async with endpoint.open(conversation, self.chat, self.context.vocab_size) as url:
        with _environment_errors():
          # `play` cancels it before these seconds are over; the pool of threads needs a
          # bound, and the log names it.
          output = await workers.call_on_user_loop(
            env.run,
            env_lib.copy_containers(task),
            url,
            name='run',
            seconds=limits.episode_seconds,
          )
    except _EnvironmentError:
      if conversation.refused is None:
        raise
    finally:
      conversation.end()
      t.segments, t.turns, t.messages = conversation.collect()
    if not t.turns:
      if conversation.refused != 'truncated':
        raise _EnvironmentError('the program ended without a reply of the policy.')
      t.error, t.metrics['prompt_too_long'] = conversation.error, 1.0
      return 'truncated'
    for turn, step in conversation.reports:
      self._add_reward(step, turn)
    rewards.policy_step.set(int(t.policy_steps.max()))
    with _environment_errors():
      step = await workers.call_on_user_loop(
        env.judge,
        task,
        env_lib.copy_containers(t.messages),
        conversation.status,
        output,
        name='judge',
        seconds=limits.step_seconds,
        field='step_seconds',
      )
    self._add_reward(step)
    return conversation.status

  async def _make_environment(self) -> types.Task:
    """Makes the environment in a thread; returns a copy of the task, which it may change.

    If it is late, the episode is over by then, and the thread closes it at once.
    """

    def make() -> tuple[env_lib.Env | program.Program, types.Task]:
      env = self.make_env()
      self.made.append(env)
      if self.over:
        asyncio.run(self._close_env())
      return env, env_lib.copy_containers(self.trajectory.task)

    with _environment_errors():
      seconds = self.limits.reset_seconds
      self.env, task = await workers.call(
        make, name='make_env', seconds=seconds, field='reset_seconds'
      )
    return task

  async def _reset(self, task: types.Task):
    """Resets the environment and encodes the prompt."""
    t = self.trajectory
    messages = await self._call_env('reset', task)
    with _environment_errors():
      t.messages = _copy_messages(messages)
      self.schemas = [tool.schema for tool in getattr(self.env, 'tools', ())]
      self.pending_ids = self._encode(self.chat.encode_prompt, t.messages, self.schemas)

  async def _close_env(self) -> bool:
    """Closes the environment, unless another thread does; returns whether that failed."""
    owner = f'Task {self.trajectory.task.id}'
    return await env_lib.close_env(self.made, self.limits.close_seconds, owner)

  async def _finish(self, status: str):
    """Lets the environment score an episode that a budget ended."""
    if getattr(self.env, 'finish', None) is not None:
      self._add_reward(await self._call_env('finish', status, self.unfinished))

  async def _call_env(self, kind: str, *args) -> Any:
    """Calls a method of the environment, within its time limit."""
    field = 'reset_seconds' if kind == 'reset' else 'step_seconds'
    t = self.trajectory
    where = f'task {t.task.id}, sample {t.sample}, turn {len(t.turns)}'
    thread_pool.current_turn.set(where)
    with _environment_errors():
      method, seconds = getattr(self.env, kind), getattr(self.limits, field)
      return await workers.call_on_user_loop(
        method, *args, name=kind, seconds=seconds, field=field
      )

  def _add_reward(self, step: types.Step, turn: types.Turn | None = None) -> types.Step:
    """Adds a step's reward to a turn, and its metrics to the trajectory.

    Without `turn` the reward is that of the last turn. Returns the step.
    """
    t = self.trajectory
    with _environment_errors():
      if not isinstance(step, types.Step):
        raise _EnvironmentError(f'a step is of type {type(step).__name__}, not a Step.')
      # Some algorithms learn from the named parts of the reward instead of their sum.
      parts = {n: x for n, x in step.metrics.items() if n.startswith('reward/')}
      for name, value in {'reward': step.reward, **parts}.items():
        if not math.isfinite(value):
          raise _EnvironmentError(f'the {name} of a turn is {value}.')
      (turn or t.turns[-1]).reward += float(step.reward)
      for name, value in step.metrics.items():
        t.metrics[name] = t.metrics.get(name, 0.0) + float(value)
    return step

  def _encode(self, encode, *args) -> np.ndarray:
    """Calls `encode` on messages of the environment, which are to blame if it raises."""
    try:
      return encode(*args)
    except ValueError as error:
      raise _EnvironmentError(str(error)) from error

  def _close_segment(self):
    if self.pieces:
      self.trajectory.segments.append(types.Segment.join(self.pieces))
      self.pieces = []


def _copy_messages(messages: Any) -> list[types.Message]:
  """Copies an environment's messages, since it may go on changing its own.

  A message that cannot be serialized raises here, where it costs one episode. Later, when
  the messages are sent to other processes, it would end the run.
  """
  if not isinstance(messages, list | tuple):
    raise _EnvironmentError(
      f'messages are of type {type(messages).__name__}, not a list.'
    )
  for message in messages:
    if not (isinstance(message, dict) and isinstance(message.get('role'), str)):
      raise _EnvironmentError(f'{str(message)[:200]} is no message: it has no role.')
    for key, value in message.items():
      try:
        records.pack([key, value])
      except ValueError as error:
        raise _EnvironmentError(f'{key!r} of a message {error}') from None
  return env_lib.copy_containers(list(messages))
