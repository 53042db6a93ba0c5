"""Rollout: episodes of an environment, played by the policy on the engine's rows.

Here the text side and the device side meet: messages become tokens, sampled tokens become
a reply, and what both sides saw becomes a Trajectory.
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
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import threads, workers
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import loop as loop_lib
from agent_r1_jax.engine import replica as replica_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.engine import sampling as sampling_lib
from agent_r1_jax.host import processes, records
from agent_r1_jax.train import spool as spool_lib

MakeEnv = Callable[[], env_lib.Env]
Limits = config_lib.Limits

# How often an episode is begun whose event loop another one's coroutine blocks.
_ATTEMPTS = 3


class Rollout:
  """Episodes that were started on the processes' engines."""

  def __init__(
    self,
    engine: engine_lib.Engine,
    future: futures.Future,
    tasks: Sequence[types.Task],
    kept: spool_lib.RolloutSpool | None,
    messages: int | None,
  ):
    """The trajectories to come from this process, all tasks, and the spool."""
    self._engine, self._future, self._kept = engine, future, kept
    self._tasks, self._messages = tasks, messages

  def wait(self):
    """Until this process's episodes have ended, however they did."""
    loop_lib.wait(self._future)

  def result(self) -> list[types.Trajectory]:
    """The trajectories of all processes, a task's samples side by side.

    All processes ask for their rollouts' results in the same order.

    Raises:
      replica_lib.PreemptedError: In all processes, if one of them was interrupted.
      processes.LostError: Another process ended.
    """
    try:
      played = loop_lib.wait(self._future).result()
      if self._engine.interrupted():
        # Also after their ends: what would follow takes too long.
        played = None
    except replica_lib.PreemptedError:
      played = None
    finally:
      if self._kept:
        self._kept.close()
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
  """Plays episodes to their ends: `start`, and its result."""
  with engine.open():
    return start(engine, *args, **kwargs).result()


class Decoding(NamedTuple):
  """How the replies of a rollout are sampled.

  Attributes:
    sampling: How tokens are chosen.
    grammar: What a reply may say; None allows all. It makes the samples off-policy.
    policy: Which policy samples; None is the engine's own, as it is at each segment.
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
  limits: Limits,
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
  order, the number of rows and the tools' speed change nothing. Where an id comes again,
  its samples are counted on.

  Args:
    engine: Open, with the policy's weights.
    chat: Messages to tokens, with the policy's tokenizer.
    tasks: What to play.
    make_env: Makes a new environment for each episode.
    limits: What each episode may use.
    decoding: How the replies are sampled.
    samples: Episodes of a task.
    seed: The run's seed.
    draw: Another number, another draw of the same tasks.
    spool: Where episodes that end are kept, and from where those are taken that had
      ended before a kill.
    messages: With several processes, how many of a process's trajectories are sent to the
      others with their messages, from the first; None: all of them. The others arrive
      without messages.
    on_done: Called with each trajectory as it ends.

  Raises:
    ValueError: A limit allows nothing.
  """
  limits.check()
  kept = spool.open_rollout(draw, tasks) if spool else None
  # Slow tools of all rows may wait at the same time.
  workers.POOL.grow(2 * engine.sizes.rows * len(engine.replicas))
  stops = chat.stop_automaton(engine.config.vocab_size)
  automata = (stops,) if decoding.grammar is None else (stops, decoding.grammar)

  async def one(group: int, sample: int, number: int) -> types.Trajectory:
    task = tasks[group]
    if kept and (before := kept.get((task.id, number))):
      on_done(before)
      return before
    identity = (seed, draw, task.id, number)
    async with engine.reserve(group, decoding.policy) as replica:
      voice = _Voice(replica, decoding, automata, identity)
      trajectory = await _play(
        lambda: types.Trajectory(task, group, sample, [], [], [], status='error'),
        lambda trajectory: _Episode(chat, make_env, limits, voice, trajectory),
      )
    # Programs that tools started may have been told to end with the run, and have failed
    # for it: what ended since then is played again.
    if kept and not engine.interrupted():
      kept.add((task.id, number), trajectory)
    on_done(trajectory)
    return trajectory

  mine = processes.take_share(len(tasks))
  seen = collections.Counter()
  episodes = []
  for group, task in enumerate(tasks):
    for sample in range(samples):
      if group in mine:
        episodes.append(one(group, sample, seen[task.id]))
      seen[task.id] += 1
  return Rollout(engine, engine.start(episodes), tasks, kept, messages)


async def _play(
  new: Callable[[], types.Trajectory], episode: Callable[[types.Trajectory], '_Episode']
) -> types.Trajectory:
  """Plays an episode; anew where it waited on an event loop that another one blocks.

  What it samples is the same again, so that nothing is lost but time.
  """
  for attempt in range(1, _ATTEMPTS + 1):
    trajectory = new()
    try:
      await episode(trajectory).play()
      break
    except workers.LoopBlockedError as error:
      trajectory.error = str(error)
      trajectory.metrics |= {'timeouts': 1.0, 'error/LoopBlockedError': 1.0}
      if attempt == _ATTEMPTS:
        break
  return trajectory


class _EnvironmentError(Exception):
  """The environment or its reward raised; the trajectory is to be masked, not scored."""


def _kind(error: _EnvironmentError) -> str:
  """The name of what users' code raised; 'InvalidAnswer' where it answered nonsense."""
  cause = error.__cause__
  if isinstance(cause, workers.BaseExceptionError):
    cause = cause.__cause__ or cause
  return type(cause).__name__ if cause else 'InvalidAnswer'


@contextlib.contextmanager
def _blaming_the_environment():
  """What is raised inside comes of what the environment gave."""
  try:
    yield
  except (_EnvironmentError, workers.LoopBlockedError):
    raise
  except Exception as error:
    raise _EnvironmentError(
      workers.describe_error(error) + workers.locate_error(error)
    ) from error


class _Voice:
  """The policy as one episode hears it: the text under way, and how it goes on.

  Attributes:
    text: The tokens of the segment under way; None before the first reply.
    slots: The most tokens of a text.
  """

  def __init__(self, replica, decoding, automata, identity):
    self._replica, self._decoding, self._automata = replica, decoding, automata
    self._identity = identity
    self.slots = replica.sizes.slots
    self.restart(0)

  def restart(self, segment: int):
    """Begins a new text, with randomness of its own."""
    self._key = request_lib.make_key(*self._identity, segment)
    self.text: request_lib.Text | None = None

  async def reply(self, ids: np.ndarray, most: int) -> request_lib.Chunk:
    """Appends tokens to the text and samples what the policy replies."""
    generation = self._replica.submit(
      request_lib.Request(
        ids,
        self.text,
        max_tokens=most,
        sampling=self._decoding.sampling,
        key=self._key,
        automata=self._automata,
        policy=self._decoding.policy,
      )
    )
    self.text = generation.text
    return await generation

  def close(self):
    """Ends the text: other texts may have its row."""
    if self.text is not None:
      self.text.close()


class _Episode:
  """One episode in the making: the row's text, piece by piece."""

  def __init__(self, chat, make_env, limits, voice, trajectory):
    self.chat, self.make_env, self.limits, self.voice = chat, make_env, limits, voice
    self.trajectory = trajectory
    self.env: Any = None
    self.unfinished: str | None = None
    # What was fed has no log-probs and no policy's step.
    self.pieces: list[tuple[np.ndarray, np.ndarray | None, np.ndarray | None]] = []

  async def play(self):
    """Plays to the end and completes the trajectory.

    Raises:
      workers.LoopBlockedError: A call waited on an event loop that another one's blocks.
    """
    t, abandoned = self.trajectory, collections.Counter()
    threads.abandoned_calls.set(abandoned)
    self.voice.restart(0)
    seconds = self.limits.episode_seconds
    try:
      async with asyncio.timeout(None if seconds == math.inf else seconds) as clock:
        t.status = await self._converse()
        if t.status in types.BUDGETS and t.turns:
          await self._finish(t.status)
    except _EnvironmentError as error:
      t.status, t.error = 'error', str(error)
      t.metrics[f'error/{_kind(error)}'] = 1.0
      t.metrics['timeouts'] = float(isinstance(error.__cause__, workers.CallTimeoutError))
    except TimeoutError:
      if not clock.expired():
        raise
      t.status, t.metrics['timeouts'] = 'error', 1.0
      t.metrics['error/LateEpisode'] = 1.0
      t.error = f'the episode took longer than {seconds:g} seconds (episode_seconds)'
    finally:
      self.voice.close()
      self._close_segment()
    if t.metrics.get('timeouts'):
      await workers.drain_cancelled_calls()
    if abandoned:
      t.metrics['abandoned_calls'] = float(abandoned.total())
      t.metrics |= {f'abandoned/{name}': float(n) for name, n in abandoned.items()}

  async def _converse(self) -> str:
    t = self.trajectory
    ids, schemas = await self._begin()
    for _ in range(self.limits.max_turns):
      room = self.voice.slots - len(self.voice.text or ()) - len(ids)
      if room < 1:
        if not t.turns:
          t.error = (
            f'the prompt has {len(ids)} tokens, and a row {self.voice.slots} (slots)'
          )
          t.metrics['prompt_too_long'] = 1.0
        return 'truncated'
      reply = await self.voice.reply(ids, min(room, self.limits.max_turn_tokens))
      self.pieces += [(ids, None, None), reply[:3]]
      stop = len(self.voice.text or ())
      turn = types.Turn(len(t.segments), stop - len(reply.tokens), stop)
      t.turns.append(turn)
      text = self.chat.decode(reply.tokens)
      t.messages.append({'role': 'assistant', 'content': str(text)})
      if not reply.stopped:
        self.unfinished = text
        return 'truncated'
      step = self._noted(await self._ask('step', text))
      if step.done:
        return 'done'
      with _blaming_the_environment():
        t.messages += _copied(step.messages)
        if step.fresh:
          self._close_segment()
          self.voice.close()
          self.voice.restart(len(t.segments))
          ids = self._encoded(self.chat.encode_prompt, step.messages, schemas)
        else:
          ids = self._after(reply, step.messages)
    return 'max_turns'

  async def _begin(self) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """The prompt, and the schemas of the environment's tools."""
    t = self.trajectory
    # Whatever the environment does to its task, other episodes have theirs.
    make = lambda: (self.make_env(), env_lib.copy_containers(t.task))
    with _blaming_the_environment():
      seconds = self.limits.reset_seconds
      call = workers.call(make, name='make_env', seconds=seconds, field='reset_seconds')
      self.env, task = await call
    messages = await self._ask('reset', task)
    with _blaming_the_environment():
      t.messages = _copied(messages)
      schemas = [tool.schema for tool in getattr(self.env, 'tools', ())]
      return self._encoded(self.chat.encode_prompt, t.messages, schemas), schemas

  async def _finish(self, status: str):
    """Asks what the end by a budget is worth; the turns have what they earned so far."""
    if getattr(self.env, 'finish', None) is not None:
      self._noted(await self._ask('finish', status, self.unfinished))

  async def _ask(self, kind: str, *args) -> Any:
    """What a method of the environment answers."""
    field = 'reset_seconds' if kind == 'reset' else 'step_seconds'
    with _blaming_the_environment():
      method, seconds = getattr(self.env, kind), getattr(self.limits, field)
      return await workers.call_on_user_loop(
        method, *args, name=kind, seconds=seconds, field=field
      )

  def _noted(self, step: types.Step) -> types.Step:
    """Adds a step's reward to the last turn, and its metrics to the trajectory's."""
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

  def _encoded(self, encode, *messages) -> np.ndarray:
    """Encodes what the environment said; a broken message is a fault of its."""
    try:
      return encode(*messages)
    except ValueError as error:
      raise _EnvironmentError(str(error)) from error

  def _after(self, reply, messages):
    """The tokens that go on from a reply."""
    ids = self._encoded(self.chat.encode_delta, messages)
    if reply.tokens[-1] in self.chat.stop_ids:
      return ids
    # A stop string ended it: the end of the turn is ours to write, and no action.
    return np.append(self.chat.stop_ids[0], ids)

  def _close_segment(self):
    if not self.pieces:
      return
    tokens, logprobs, steps = zip(*self.pieces, strict=True)
    sizes = [len(t) for t in tokens]
    chosen = [lp is not None for lp in logprobs]

    def filled(parts, dtype):
      parts = [np.zeros(n) if x is None else x for n, x in zip(sizes, parts, strict=True)]
      return np.concatenate(parts).astype(dtype)

    self.trajectory.segments.append(
      types.Segment(
        np.concatenate(tokens).astype(np.int32),
        np.repeat(chosen, sizes),
        filled(logprobs, np.float32),
        filled(steps, np.int32),
      )
    )
    self.pieces = []


def _copied(messages: Any) -> list[types.Message]:
  """An environment's messages, which it may go on to change.

  What cannot be written is refused here, where it costs one episode: later the messages
  go to the spool and to the other processes, and the run would end.
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
