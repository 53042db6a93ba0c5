"""One episode: encodes messages, samples replies, and lets the environment answer them.

Text and device meet here. What comes of an episode is its Trajectory.
"""

import asyncio
import collections
import contextlib
import copy
import dataclasses
import logging
import math
from typing import Any

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.agent import calls, rewards, threads, workers
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.host import records
from agent_r1_jax.train import choice as choice_lib
from agent_r1_jax.train import search as search_lib

_LOGGER = logging.getLogger(__name__)


class _EnvironmentError(Exception):
  """The environment or its reward raised; the trajectory is masked, not scored."""


def _name_cause(error: _EnvironmentError) -> str:
  """Names the type that the user's code raised; 'InvalidAnswer' if it raised nothing."""
  cause = error.__cause__
  if isinstance(cause, workers.BaseExceptionError):
    cause = cause.__cause__ or cause
  return type(cause).__name__ if cause else 'InvalidAnswer'


@contextlib.contextmanager
def _blaming_the_environment():
  """Turns what is raised inside into an _EnvironmentError."""
  try:
    yield
  except (_EnvironmentError, workers.LoopBlockedError):
    raise
  except Exception as error:
    raise _EnvironmentError(
      workers.describe_error(error) + workers.locate_error(error)
    ) from error


class Context:
  """The context of one episode: the text in the engine that each reply extends.

  Attributes:
    replica: Where its replies are sampled.
    slots: The most tokens that it may have.
    search: Searches for a whole episode, in place of a plain one.
    chooser: Chooses the replies, if several of each are sampled.
  """

  def __init__(self, replica, decoding, automata, identity):
    self.replica, self._decoding, self._automata = replica, decoding, automata
    self._identity, choice = identity, decoding.choice
    self._forked, self.chooser, self.search = False, None, None
    if isinstance(choice, choice_lib.Choice):
      self.chooser = choice_lib.Chooser(replica, choice)
    else:
      self.search = choice
    self.slots = replica.sizes.slots
    self.restart(0)

  def restart(self, segment: int):
    """Begins a new text, with a random key of its own."""
    self._key = request_lib.make_key(*self._identity, segment)
    self._text: request_lib.Text | None = None

  def fork(self, number: int) -> 'Context':
    """Returns a context with the same text so far; 0 goes on as this one would."""
    other = copy.copy(self)
    other._forked = True
    if number:
      other._identity = (*self._identity, number)
      other._key = request_lib.make_key(*self._key.tolist(), number)
    return other

  async def reply(self, ids: np.ndarray, max_tokens: int) -> request_lib.Chunk:
    """Appends tokens to the text and samples the policy's reply."""
    parent = self._text
    if self._forked and parent is not None:
      parent = request_lib.Fork(parent, len(parent))
    request = request_lib.Request(
      ids,
      parent,
      max_tokens=max_tokens,
      sampling=self._decoding.sampling,
      key=self._key,
      automata=self._automata,
      policy=self._decoding.policy,
    )
    if self.chooser:
      self._text, reply = await self.chooser.reply(request)
      return reply
    generation = self.replica.submit(request)
    self._text, self._forked = generation.text, False
    return await generation

  @property
  def length(self) -> int:
    """The tokens of the text so far."""
    return 0 if self._text is None else len(self._text)

  def close(self):
    """Frees the rows of its texts."""
    if self._text is not None:
      self._text.close()
    if self.chooser:
      self.chooser.close()


class Episode:
  """One episode while it is played; it fills in its trajectory.

  Attributes:
    pieces: The segment under way: tokens, log-probs and policy steps of each prompt,
      reply and observation; the last two are None where the policy did not sample.
    ids: The tokens that are given before the next reply.
    status: How the episode ended; None while it goes on.
    sampled: Counts the tokens that were sampled here and in all forks.
    made: The environment, from when it is made until it is closed.
    over: Whether an environment that is made late is to be closed at once.
    unfinished: The text of a reply that ran out of tokens.
  """

  def __init__(self, chat, make_env, limits, context, trajectory):
    self.chat, self.make_env, self.limits = chat, make_env, limits
    self.context, self.trajectory = context, trajectory
    self.env: Any = None
    self.made: list[env_lib.Env] = []
    self.over = False
    self.unfinished: str | None = None
    self.pieces: list[tuple[np.ndarray, np.ndarray | None, np.ndarray | None]] = []
    self.status: str | None = None
    self.sampled = collections.Counter()

  async def play(self):
    """Plays to the end and completes the trajectory.

    Raises:
      workers.LoopBlockedError: A call waited on an event loop that another call blocks.
    """
    t, abandoned = self.trajectory, collections.Counter()
    threads.abandoned_calls.set(abandoned)
    calls.chat_format.set(self.chat.format)
    self.context.restart(0)
    seconds = self.limits.episode_seconds
    try:
      async with asyncio.timeout(None if seconds == math.inf else seconds) as clock:
        t.status = await self._converse()
        if t.status in types.BUDGETS and t.turns:
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
      self.context.close()
      self._close_segment()
      if self.context.chooser:
        t.metrics['sampled_tokens'] = float(self.context.chooser.sampled)
      if self.context.search:
        t.metrics['sampled_tokens'] = float(self.sampled.total())
      if t.status == 'error':
        await workers.drain_cancelled_calls()
      self.over = True
      if await self._close_env():
        t.metrics['close_failed'] = 1.0
    if abandoned:
      t.metrics['abandoned_calls'] = float(abandoned.total())
      t.metrics |= {f'abandoned/{name}': float(n) for name, n in abandoned.items()}

  async def _converse(self) -> str:
    """Plays turn after turn; returns the status in which the episode ended."""
    self.ids, self._schemas = await self._begin()
    if search := self.context.search:
      with _blaming_the_environment():
        search_lib.check(self.env)
      line = await search_lib.play(search, self, self.context.replica)
      vars(self.trajectory).update(vars(line.trajectory))
      self.env, self.pieces, self.unfinished = line.env, line.pieces, line.unfinished
      self.context, self.status = line.context, line.status
    while self.status is None:
      await self.take_turn()
    return self.status

  async def take_turn(self):
    """Plays one turn, and sets `status` if it ended the episode."""
    t, ids = self.trajectory, self.ids
    room = self.context.slots - self.context.length - len(ids)
    if room < 1:
      if not t.turns:
        t.error = (
          f'the prompt has {len(ids)} tokens, and a row {self.context.slots} (slots)'
        )
        t.metrics['prompt_too_long'] = 1.0
      self.status = 'truncated'
      return
    reply = await self.context.reply(ids, min(room, self.limits.max_turn_tokens))
    self.pieces += [(ids, None, None), reply[:3]]
    self.sampled['tokens'] += len(reply.tokens)
    stop = self.context.length
    turn = types.Turn(len(t.segments), stop - len(reply.tokens), stop)
    t.turns.append(turn)
    rewards.policy_step.set(int(reply.policy_steps[-1]))
    text = self.chat.decode(reply.tokens)
    t.messages.append({'role': 'assistant', 'content': str(text)})
    if not reply.stopped:
      self.unfinished, self.status = text, 'truncated'
      return
    step = self._add_reward(await self._ask('step', text))
    if step.done:
      self.status = 'done'
      return
    with _blaming_the_environment():
      t.messages += _copy_messages(step.messages)
      if step.fresh:
        self._close_segment()
        self.context.close()
        self.context.restart(len(t.segments))
        self.ids = self._encode(self.chat.encode_prompt, step.messages, self._schemas)
      else:
        self.ids = self._encode_answer(reply, step.messages)
    if len(t.turns) == self.limits.max_turns:
      self.status = 'max_turns'

  async def fork(self, number: int) -> 'Episode':
    """Returns a copy that goes on by itself, with randomness of its own but for 0."""
    other, t = copy.copy(self), self.trajectory
    other.trajectory = dataclasses.replace(
      t,
      segments=[*t.segments],
      turns=[dataclasses.replace(turn) for turn in t.turns],
      messages=[*t.messages],
      metrics={**t.metrics},
    )
    other.env = await self._ask('clone')
    other.pieces, other.context = [*self.pieces], self.context.fork(number)
    return other

  @property
  def tokens(self) -> np.ndarray:
    """The text of the state, up to where the next token, or the last one, is chosen."""
    tokens = np.concatenate([np.zeros(0, np.int32), *(piece[0] for piece in self.pieces)])
    return np.append(tokens, self.ids) if self.status is None else tokens[:-1]

  @property
  def mean_logprob(self) -> float:
    """The mean log-prob of the last reply's tokens."""
    return float(np.mean(self.pieces[-1][1]))

  async def _begin(self) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Makes the environment; returns the prompt's tokens and the schemas of its tools."""
    t = self.trajectory
    with _blaming_the_environment():
      seconds = self.limits.reset_seconds
      self.env, task = await workers.call(
        self._make_env, name='make_env', seconds=seconds, field='reset_seconds'
      )
    messages = await self._ask('reset', task)
    with _blaming_the_environment():
      t.messages = _copy_messages(messages)
      schemas = [tool.schema for tool in getattr(self.env, 'tools', ())]
      return self._encode(self.chat.encode_prompt, t.messages, schemas), schemas

  def _make_env(self) -> tuple[env_lib.Env, types.Task]:
    """Makes the environment and its task; what comes too late is closed at once."""
    env = self.make_env()
    self.made.append(env)
    if self.over:
      asyncio.run(self._close_env())
    # A copy: the environment may change its task, and other episodes have the same one.
    return env, env_lib.copy_containers(self.trajectory.task)

  async def _close_env(self) -> bool:
    """Closes the environment, if there is one to close; returns whether that failed."""
    seconds, field = self.limits.close_seconds, 'close_seconds'
    try:
      # Taken out first: of two threads that come here, one closes.
      method = getattr(self.made.pop(), 'close', None) if self.made else None
      if method is not None:
        await workers.call_on_user_loop(
          method, name='close', seconds=seconds, field=field
        )
      return False
    except Exception as error:
      text = workers.describe_error(error) + workers.locate_error(error)
      _LOGGER.warning('Task %s: close failed: %s', self.trajectory.task.id, text)
      return True

  async def _finish(self, status: str):
    """Lets the environment score an episode that a budget ended."""
    if getattr(self.env, 'finish', None) is not None:
      self._add_reward(await self._ask('finish', status, self.unfinished))

  async def _ask(self, kind: str, *args) -> Any:
    """Calls a method of the environment, within its time limit."""
    field = 'reset_seconds' if kind == 'reset' else 'step_seconds'
    t = self.trajectory
    where = f'task {t.task.id}, sample {t.sample}, turn {len(t.turns)}'
    threads.current_turn.set(where)
    with _blaming_the_environment():
      method, seconds = getattr(self.env, kind), getattr(self.limits, field)
      return await workers.call_on_user_loop(
        method, *args, name=kind, seconds=seconds, field=field
      )

  def _add_reward(self, step: types.Step) -> types.Step:
    """Adds a step's reward to the last turn, and its metrics to the trajectory."""
    t = self.trajectory
    with _blaming_the_environment():
      if not isinstance(step, types.Step):
        raise _EnvironmentError(f'a step is of type {type(step).__name__}, not a Step.')
      if not math.isfinite(step.reward):
        raise _EnvironmentError(f'the reward of a turn is {step.reward}.')
      t.turns[-1].reward += float(step.reward)
      for name, value in step.metrics.items():
        t.metrics[name] = t.metrics.get(name, 0.0) + float(value)
    return step

  def _encode(self, encode, *messages) -> np.ndarray:
    """Encodes the environment's messages; blames it if one of them is broken."""
    try:
      return encode(*messages)
    except ValueError as error:
      raise _EnvironmentError(str(error)) from error

  def _encode_answer(self, reply, messages) -> np.ndarray:
    """Encodes the environment's answer, to be appended after a reply."""
    ids = self._encode(self.chat.encode_delta, messages)
    if reply.tokens[-1] in self.chat.stop_ids:
      return ids
    # A stop string ended it: the template's end of turn is appended, and is no action.
    return np.append(self.chat.stop_ids[0], ids)

  def _close_segment(self):
    if not self.pieces:
      return
    columns = [[], [], [], []]
    for tokens, logprobs, steps in self.pieces:
      sampled, zeros = logprobs is not None, np.zeros(len(tokens))
      columns[0].append(tokens)
      columns[1].append(np.full(len(tokens), sampled))
      columns[2].append(logprobs if sampled else zeros)
      columns[3].append(steps if sampled else zeros)
    dtypes = (np.int32, bool, np.float32, np.int32)
    arrays = [np.concatenate(c).astype(d) for c, d in zip(columns, dtypes, strict=True)]
    self.trajectory.segments.append(types.Segment(*arrays))
    self.pieces = []


def _copy_messages(messages: Any) -> list[types.Message]:
  """Copies an environment's messages, which it may go on to change.

  What cannot be serialized is refused here, where it costs one episode. Later, when the
  messages are sent to other processes, it would end the run.
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
