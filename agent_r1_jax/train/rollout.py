"""Rollouts: plays episodes of an environment with the policy.

Text and device meet here: messages are encoded, the engine samples a reply, the
environment answers it, and tokens, log-probs and messages become a Trajectory.
"""

import asyncio
import collections
from collections.abc import Callable, Sequence
from concurrent import futures
import contextlib
import math
from typing import Any, NamedTuple

import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import calls, rewards, threads, workers
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import loop as loop_lib
from agent_r1_jax.engine import replica as replica_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.engine import sampling as sampling_lib
from agent_r1_jax.host import processes, records
from agent_r1_jax.train import spool as spool_lib

MakeEnv = Callable[[], env_lib.Env]

# How often an episode is begun, if another one's coroutine blocks its event loop.
_ATTEMPTS = 3


class Rollout:
  """The episodes of a rollout, under way on the engine of each process."""

  def __init__(
    self,
    engine: engine_lib.Engine,
    future: futures.Future,
    tasks: Sequence[types.Task],
    spool: spool_lib.RolloutSpool | None,
    messages: int | None,
  ):
    """Holds the future of this process's trajectories, and the tasks of all processes."""
    self._engine, self._future, self._spool = engine, future, spool
    self._tasks, self._messages = tasks, messages

  def result(self) -> list[types.Trajectory]:
    """Waits for the trajectories of all processes; samples of a task are side by side.

    All processes must ask for their rollouts' results in the same order.

    Raises:
      replica_lib.PreemptedError: In all processes, if one of them was interrupted.
      processes.LostError: Another process ended.
    """
    try:
      played = loop_lib.wait(self._future).result()
      if self._engine.interrupted():
        # Even if all episodes have ended: the update would take too long.
        played = None
    except replica_lib.PreemptedError:
      played = None
    finally:
      if self._spool:
        self._spool.close()
    if not processes.is_distributed():
      if played is None:
        raise replica_lib.PreemptedError
      return played
    return _exchange(played, self._tasks, self._messages)


def _exchange(
  played: list[types.Trajectory] | None, tasks: Sequence[types.Task], messages: int | None
) -> list[types.Trajectory]:
  """Returns the trajectories of all processes, in the order of tasks and samples.

  Small records go through the coordinator; tokens and messages go as arrays.

  Args:
    played: This process's trajectories, or None if it was interrupted.
    tasks: The rollout's tasks, by group; all processes have the same ones.
    messages: As in `start`.
  """
  heads, columns = records.split(played or [])
  everyones_heads = processes.gather(None if played is None else heads)
  if None in everyones_heads:
    raise replica_lib.PreemptedError
  texts = records.pack([t.messages for t in (played or [])[:messages]])
  shares = zip(
    everyones_heads,
    processes.gather_arrays(columns),
    processes.gather_arrays(np.frombuffer(texts, np.uint8)),
    strict=True,
  )
  trajectories = []
  for heads, columns, texts in shares:
    share = records.join(heads, columns, tasks)
    # The first trajectories of a share have their messages, the others none.
    for trajectory, text in zip(share, records.unpack(texts.tobytes()), strict=False):
      trajectory.messages = text
    trajectories += share
  return sorted(trajectories, key=lambda t: (t.group, t.sample))


def collect(engine: engine_lib.Engine, *args, **kwargs) -> list[types.Trajectory]:
  """Plays episodes to their ends; takes the arguments of `start`."""
  with engine.open():
    return start(engine, *args, **kwargs).result()


class Decoding(NamedTuple):
  """How the replies of a rollout are sampled.

  Attributes:
    sampling: How tokens are chosen from the logits.
    grammar: Restricts what a reply may say, which makes the samples off-policy.
    policy: The policy that samples; None is the engine's newest at each decode segment.
  """

  sampling: sampling_lib.Sampling = sampling_lib.ON_POLICY
  grammar: types.Automaton | None = None
  policy: replica_lib.Policy | None = None


ON_POLICY = Decoding()


def start(
  engine: engine_lib.Engine,
  chat: chat_lib.Chat,
  tasks: Sequence[types.Task],
  make_env: MakeEnv,
  *,
  limits: config_lib.Limits,
  decoding: Decoding = ON_POLICY,
  samples: int = 1,
  seed: int = 0,
  draw: int = 0,
  spool: spool_lib.Spool | None = None,
  messages: int | None = None,
  on_done: Callable[[types.Trajectory], None] = lambda trajectory: None,
) -> Rollout:
  """Starts `samples` episodes of every task; a task is a group.

  Each process plays its share of the tasks, and gets the trajectories of all; see
  `messages`.

  A trajectory's randomness depends on (seed, draw, task id, sample, position) alone: the
  order, the number of rows and the tools' speed change nothing. Where a task comes twice,
  its samples are numbered on.

  Args:
    engine: The engine, open, with the policy's weights.
    chat: Encodes messages with the policy's tokenizer.
    tasks: The tasks to play.
    make_env: Makes a new environment for each episode.
    limits: What each episode may use.
    decoding: How the replies are sampled.
    samples: How many episodes of each task are played.
    seed: The run's seed.
    draw: Another number samples other episodes of the same tasks.
    spool: Keeps finished episodes on disk; what it has of before a kill is not played.
    messages: With several processes, how many of a process's trajectories are sent to the
      others with their messages, from the first; None: all of them. The others arrive
      without messages.
    on_done: Called with each trajectory as it ends.

  Raises:
    ValueError: A limit is not above 0.
  """
  limits.check()
  finished = spool.open_rollout(draw, tasks) if spool else None
  # Slow tools of all rows may wait at the same time.
  workers.POOL.grow(2 * engine.sizes.rows * len(engine.replicas))
  stops = chat.stop_automaton(engine.config.vocab_size)
  automata = (stops,) if decoding.grammar is None else (stops, decoding.grammar)

  async def play(group: int, sample: int, number: int) -> types.Trajectory:
    task = tasks[group]
    if finished and (before := finished.get((task.id, number))):
      on_done(before)
      return before
    async with engine.reserve(group, decoding.policy) as replica:
      context = _Context(replica, decoding, automata, (seed, draw, task.id, number))
      # An episode that waited on an event loop that another one blocks is played again.
      # It samples the same tokens, so that nothing is lost but time.
      for _ in range(_ATTEMPTS):
        trajectory = types.Trajectory(task, group, sample, [], [], [], status='error')
        try:
          await _Episode(chat, make_env, limits, context, trajectory).play()
          break
        except workers.LoopBlockedError as error:
          trajectory.error = str(error)
          trajectory.metrics |= {'timeouts': 1.0, 'error/LoopBlockedError': 1.0}
    # An interrupt may also have ended programs that tools had started: what failed for
    # that is played again.
    if finished and not engine.interrupted():
      finished.add((task.id, number), trajectory)
    on_done(trajectory)
    return trajectory

  mine = processes.take_share(len(tasks))
  seen = collections.Counter()
  episodes = []
  for group, task in enumerate(tasks):
    for sample in range(samples):
      if group in mine:
        episodes.append(play(group, sample, seen[task.id]))
      seen[task.id] += 1
  return Rollout(engine, engine.start(episodes), tasks, finished, messages)


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


class _Context:
  """The context of one episode: the text in the engine that each reply extends.

  Attributes:
    slots: The most tokens that it may have.
  """

  def __init__(self, replica, decoding, automata, identity):
    self._replica, self._decoding, self._automata = replica, decoding, automata
    self._identity = identity
    self.slots = replica.sizes.slots
    self.restart(0)

  def restart(self, segment: int):
    """Begins a new text, with a random key of its own."""
    self._key = request_lib.make_key(*self._identity, segment)
    self._text: request_lib.Text | None = None

  async def reply(self, ids: np.ndarray, max_tokens: int) -> request_lib.Chunk:
    """Appends tokens to the text and samples the policy's reply."""
    generation = self._replica.submit(
      request_lib.Request(
        ids,
        self._text,
        max_tokens=max_tokens,
        sampling=self._decoding.sampling,
        key=self._key,
        automata=self._automata,
        policy=self._decoding.policy,
      )
    )
    self._text = generation.text
    return await generation

  @property
  def length(self) -> int:
    """The tokens of the text so far."""
    return 0 if self._text is None else len(self._text)

  def close(self):
    """Frees the row of the text."""
    if self._text is not None:
      self._text.close()


class _Episode:
  """One episode while it is played; it fills in its trajectory.

  Attributes:
    pieces: The segment under way: tokens, log-probs and policy steps of each prompt,
      reply and observation; the last two are None where the policy did not sample.
    unfinished: The text of a reply that ran out of tokens.
  """

  def __init__(self, chat, make_env, limits, context, trajectory):
    self.chat, self.make_env, self.limits = chat, make_env, limits
    self.context, self.trajectory = context, trajectory
    self.env: Any = None
    self.unfinished: str | None = None
    self.pieces: list[tuple[np.ndarray, np.ndarray | None, np.ndarray | None]] = []

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
    if t.metrics.get('timeouts'):
      await workers.drain_cancelled_calls()
    if abandoned:
      t.metrics['abandoned_calls'] = float(abandoned.total())
      t.metrics |= {f'abandoned/{name}': float(n) for name, n in abandoned.items()}

  async def _converse(self) -> str:
    """Plays turn after turn; returns the status in which the episode ended."""
    t = self.trajectory
    ids, schemas = await self._begin()
    for _ in range(self.limits.max_turns):
      room = self.context.slots - self.context.length - len(ids)
      if room < 1:
        if not t.turns:
          t.error = (
            f'the prompt has {len(ids)} tokens, and a row {self.context.slots} (slots)'
          )
          t.metrics['prompt_too_long'] = 1.0
        return 'truncated'
      reply = await self.context.reply(ids, min(room, self.limits.max_turn_tokens))
      self.pieces += [(ids, None, None), reply[:3]]
      stop = self.context.length
      turn = types.Turn(len(t.segments), stop - len(reply.tokens), stop)
      t.turns.append(turn)
      rewards.policy_step.set(int(reply.policy_steps[-1]))
      text = self.chat.decode(reply.tokens)
      t.messages.append({'role': 'assistant', 'content': str(text)})
      if not reply.stopped:
        self.unfinished = text
        return 'truncated'
      step = self._add_reward(await self._ask('step', text))
      if step.done:
        return 'done'
      with _blaming_the_environment():
        t.messages += _copy_messages(step.messages)
        if step.fresh:
          self._close_segment()
          self.context.close()
          self.context.restart(len(t.segments))
          ids = self._encode(self.chat.encode_prompt, step.messages, schemas)
        else:
          ids = self._encode_answer(reply, step.messages)
    return 'max_turns'

  async def _begin(self) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Makes the environment; returns the prompt's tokens and the schemas of its tools."""
    t = self.trajectory
    # A copy: the environment may change its task, and other episodes have the same one.
    make = lambda: (self.make_env(), env_lib.copy_containers(t.task))
    with _blaming_the_environment():
      seconds = self.limits.reset_seconds
      call = workers.call(make, name='make_env', seconds=seconds, field='reset_seconds')
      self.env, task = await call
    messages = await self._ask('reset', task)
    with _blaming_the_environment():
      t.messages = _copy_messages(messages)
      schemas = [tool.schema for tool in getattr(self.env, 'tools', ())]
      return self._encode(self.chat.encode_prompt, t.messages, schemas), schemas

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
