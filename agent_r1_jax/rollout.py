"""Rollout: episodes of an environment, played by the policy on the engine's rows.

Here the text side and the device side meet: messages become tokens, sampled tokens become
a reply, and what both sides saw becomes a Trajectory.
"""

import collections
from collections.abc import Callable, Sequence
from concurrent import futures
import dataclasses
import math
import traceback

import numpy as np

from agent_r1_jax import processes, records, types
from agent_r1_jax import spool as spool_lib
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.engine import driver as driver_lib
from agent_r1_jax.engine import replica

MakeEnv = Callable[[], env_lib.Env]


@dataclasses.dataclass(frozen=True)
class Limits:
  """What one episode may use.

  Attributes:
    max_turns: Replies.
    max_turn_tokens: Tokens of one reply.
  """

  max_turns: int = 5
  max_turn_tokens: int = 512

  def __post_init__(self):
    for name, value in dataclasses.asdict(self).items():
      if value < 1:
        raise ValueError(f'{name} is {value}; it must be at least 1.')


class Rollout:
  """Episodes that were started on the processes' engines."""

  def __init__(
    self,
    driver: driver_lib.Driver,
    future: futures.Future,
    tasks: Sequence[types.Task],
    kept: spool_lib.Rollout | None,
  ):
    """The trajectories to come from this process, all tasks, and the spool."""
    self._driver, self._future, self._kept = driver, future, kept
    self._tasks = tasks

  def wait(self):
    """Until this process's episodes have ended, however they did."""
    futures.wait([self._future])

  def result(self) -> list[types.Trajectory]:
    """The trajectories of all processes, a task's samples side by side.

    All processes ask for their rollouts' results in the same order.

    Raises:
      replica.PreemptedError: In all processes, if one of them was interrupted.
      processes.LostError: Another process ended.
    """
    try:
      played = self._future.result()
      if self._driver.interrupted():
        # Also after their ends: what would follow takes too long.
        played = None
    except replica.PreemptedError:
      played = None
    finally:
      if self._kept:
        self._kept.close()
    # A task does not travel: all processes have the same ones.
    shares = processes.gather(
      played,
      pack=records.pack_trajectories,
      unpack=lambda data: records.unpack_trajectories(data, self._tasks),
    )
    if None in shares:
      raise replica.PreemptedError
    found = [t for share in shares for t in share]
    return sorted(found, key=lambda t: (t.group, t.sample))


def collect(driver: driver_lib.Driver, *args, **kwargs) -> list[types.Trajectory]:
  """Plays episodes to their ends: `start`, and its result."""
  with driver.open():
    return start(driver, *args, **kwargs).result()


def start(
  driver: driver_lib.Driver,
  chat: chat_lib.Chat,
  tasks: Sequence[types.Task],
  make_env: MakeEnv,
  *,
  limits: Limits,
  samples: int = 1,
  seed: int = 0,
  draw: int = 0,
  spool: spool_lib.Spool | None = None,
  on_done: Callable[[types.Trajectory], None] = lambda trajectory: None,
) -> Rollout:
  """Starts `samples` episodes of every task; a task is a group.

  Each process plays its share of the tasks, and gets the trajectories of all.

  A trajectory's randomness depends on (seed, draw, task id, sample, position) alone: the
  order, the number of rows and the tools' speed change nothing. Where an id comes again,
  its samples are counted on.

  Args:
    driver: Open, with the policy's params.
    chat: Of the policy's tokenizer.
    tasks: What to play.
    make_env: A new environment for each episode.
    limits: Of each episode.
    samples: Episodes of a task.
    seed: Of the run.
    draw: Another number, another draw of the same tasks.
    spool: Where episodes that end are kept, and from where those are taken that had
      ended before a kill.
    on_done: Called with each trajectory as it ends.
  """
  kept = spool.rollout(draw, tasks) if spool else None

  async def one(group: int, sample: int, number: int) -> types.Trajectory:
    task = tasks[group]
    if kept and (before := kept.found((task.id, number))):
      on_done(before)
      return before
    trajectory = types.Trajectory(
      task, group, sample, segments=[], turns=[], messages=[], status='error'
    )
    identity = (seed, draw, task.id, number)
    async with driver.row(driver_lib.key(*identity, 0), group) as row:
      await _Episode(chat, make_env(), limits, row, identity, trajectory).play()
    if kept:
      kept.keep((task.id, number), trajectory)
    on_done(trajectory)
    return trajectory

  mine = processes.share(len(tasks))
  seen = collections.Counter()
  episodes = []
  for group, task in enumerate(tasks):
    for sample in range(samples):
      if group in mine:
        episodes.append(one(group, sample, seen[task.id]))
      seen[task.id] += 1
  return Rollout(driver, driver.start(episodes), tasks, kept)


class _EnvironmentError(Exception):
  """The environment or its reward raised; the trajectory is to be masked, not scored."""


class _Episode:
  """One episode in the making: the row's text, piece by piece."""

  def __init__(self, chat, env, limits, row, identity, trajectory):
    self.chat, self.env, self.limits, self.row = chat, env, limits, row
    self.identity, self.trajectory = identity, trajectory
    # What was fed has no log-probs and no policy's step.
    self.pieces: list[tuple[np.ndarray, np.ndarray | None, np.ndarray | None]] = []

  async def play(self):
    """Plays to the end and completes the trajectory."""
    t = self.trajectory
    try:
      t.status = await self._converse()
    except _EnvironmentError as error:
      t.status, t.error = 'error', str(error)
    self._close_segment()

  async def _converse(self) -> str:
    t = self.trajectory
    t.messages = list(await self._ask(self.env.reset, t.task))
    schemas = [tool.schema for tool in getattr(self.env, 'tools', ())]
    ids = self._encoded(self.chat.prompt, t.messages, schemas)
    for _ in range(self.limits.max_turns):
      room = self.row.replica.sizes.slots - self.row.length - len(ids)
      if room < 1:
        if not t.turns:
          slots = self.row.replica.sizes.slots
          t.error = f'the prompt has {len(ids)} tokens, and a row {slots} (slots)'
          t.metrics['prompt_too_long'] = 1.0
        return 'truncated'
      budget = min(room, self.limits.max_turn_tokens)
      reply = await self.row.generate(ids, budget)
      self.pieces += [(ids, None, None), reply[:3]]
      stop = self.row.length
      turn = types.Turn(len(t.segments), stop - len(reply.tokens), stop)
      t.turns.append(turn)
      text = self.chat.decode(reply.tokens)
      t.messages.append({'role': 'assistant', 'content': str(text)})
      if not reply.stopped:
        # What the reply would have become is unknown: it earns nothing.
        return 'truncated'
      step = await self._ask(self.env.step, text)
      if not math.isfinite(step.reward):
        raise _EnvironmentError(f'the reward of a turn is {step.reward}.')
      turn.reward = float(step.reward)
      for name, value in step.metrics.items():
        t.metrics[name] = t.metrics.get(name, 0.0) + value
      t.messages += step.messages
      if step.done:
        return 'done'
      if step.fresh:
        self._close_segment()
        self.row.restart(driver_lib.key(*self.identity, len(t.segments)))
        ids = self._encoded(self.chat.prompt, step.messages, schemas)
      else:
        ids = self._after(reply, step.messages)
    return 'max_turns'

  async def _ask(self, method, argument):
    try:
      return await method(argument)
    except Exception as error:
      frame = traceback.extract_tb(error.__traceback__)[-1]
      where = f'{frame.filename}:{frame.lineno}, in {frame.name}'
      raise _EnvironmentError(f'{type(error).__name__}: {error} ({where})') from error

  def _encoded(self, encode, *messages) -> np.ndarray:
    """Encodes what the environment said; a broken message is a fault of its."""
    try:
      return encode(*messages)
    except ValueError as error:
      raise _EnvironmentError(str(error)) from error

  def _after(self, reply, messages):
    """The tokens that go on from a reply."""
    ids = self._encoded(self.chat.delta, messages)
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
