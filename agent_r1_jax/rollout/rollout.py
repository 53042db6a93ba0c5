"""Rollouts: many concurrent episodes, of which each process plays its share."""

import collections
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent import futures
import itertools
from typing import Any

import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.engine import clients, protocol
from agent_r1_jax.host import moments, processes, records, thread_pool, workers
from agent_r1_jax.rollout import context as context_lib
from agent_r1_jax.rollout import decoding as decoding_lib
from agent_r1_jax.rollout import episode as episode_lib
from agent_r1_jax.rollout import sockets
from agent_r1_jax.rollout import store as store_lib

MakeEnv = Callable[[], env_lib.Env | sockets.Player]
Play = Callable[[sockets.Order], Coroutine[Any, Any, types.Trajectory]]
# A way to solve tasks: the tasks with that way's prompts, by the name of their set, and
# the function that makes the environment of each episode.
Method = tuple[Mapping[str, Sequence[types.Task]], MakeEnv]

# The most attempts at an episode: at least so many if others' coroutines block its event
# loop, and so many if its machine is lost, which the episode itself may cause.
_ATTEMPTS, _MOST_LOSSES = 3, 10


class Rollout:
  """A rollout whose episodes are under way on each process's engine."""

  def __init__(
    self,
    engine: protocol.AnyEngine,
    future: futures.Future,
    tasks: Sequence[types.Task],
    send_messages: int | None,
  ):
    """Holds the future of this process's trajectories, and the tasks of all processes."""
    self._engine, self._future = engine, future
    self._tasks, self._send_messages = tasks, send_messages

  def result(self) -> list[types.Trajectory]:
    """Waits for the trajectories of all processes; episodes of a task are adjacent.

    All processes must request their rollouts' results in the same order.

    Raises:
      protocol.PreemptedError: In all processes, if any was interrupted.
      processes.LostError: Another process ended.
    """
    try:
      played = clients.wait(self._future).result()
      if self._engine.interrupted():
        # Even if all episodes have ended: the update would take too long.
        played = None
    except protocol.PreemptedError:
      played = None
    if not processes.is_distributed():
      if played is None:
        raise protocol.PreemptedError
      return played
    return _exchange(played, self._tasks, self._send_messages)


def _exchange(
  played: list[types.Trajectory] | None,
  tasks: Sequence[types.Task],
  send_messages: int | None,
) -> list[types.Trajectory]:
  """Returns the trajectories of all processes, in the order of tasks and samples.

  `played` has this process's, or is None if it was interrupted; `tasks` has all tasks.
  """
  if None in processes.gather(None if played is None else len(played)) or played is None:
    raise protocol.PreemptedError
  mine = [store_lib.list_fields(trajectory) for trajectory in played]
  for fields in mine[len(mine) if send_messages is None else send_messages :]:
    fields['messages'] = []
  packed = np.frombuffer(records.pack(mine), np.uint8)
  return sorted(
    (
      store_lib.make_trajectory(fields, tasks[fields['group']])
      for share in processes.gather_arrays(packed)
      for fields in records.unpack(share.tobytes())
    ),
    key=lambda t: (t.group, t.sample),
  )


def collect(engine: protocol.AnyEngine, *args, **kwargs) -> list[types.Trajectory]:
  """Plays episodes to the end, with the arguments of `start`."""
  with engine.open():
    return start(engine, *args, **kwargs).result()


def start(
  engine: protocol.AnyEngine,
  chat: chat_lib.Chat,
  tasks: Sequence[types.Task],
  make_env: MakeEnv,
  *,
  limits: config_lib.Limits,
  decoding: decoding_lib.Decoding = decoding_lib.ON_POLICY,
  samples: int = 1,
  seed: int = 0,
  rollout_number: int = 0,
  step: int | None = None,
  store: store_lib.EpisodeStore | None = None,
  send_messages: int | None = None,
  on_done: Callable[[types.Trajectory], None] = lambda trajectory: None,
  elsewhere: Play | None = None,
) -> Rollout:
  """Starts `samples` episodes of every task; a task's episodes are a group.

  Each process plays its share of the tasks, and gets all trajectories; see
  `send_messages`.

  A trajectory's randomness depends only on (seed, rollout_number, task id, sample,
  position), and not on the order, the number of rows or the tools' speed. If `tasks` has
  a task twice, the sample numbers of the second group continue the first's.

  The engine must be open and have the policy's weights. Episodes that `store` has from
  before a kill are not played again. With several processes, each sends `send_messages`
  of its trajectories with their messages, by default all, and the rest without. `step` is
  the training step that learns from them, for observers. `elsewhere` plays the episodes
  instead of the engine; it is awaited in the engine's event loop.

  Raises:
    ValueError: A limit is not above 0.
  """
  limits.check()
  finished = store.open_rollout(rollout_number, tasks) if store else None
  own_groups = processes.take_share(len(tasks))
  play = elsewhere or make_play(
    engine,
    chat,
    make_env,
    limits=limits,
    decoding=decoding,
    seed=seed,
    attempts=len(own_groups) * samples,
  )

  async def play_or_read(order: sockets.Order) -> types.Trajectory:
    key = order.task.id, order.number
    stored = finished.get(key) if finished else None
    # A call with more samples numbers tasks with equal ids differently.
    if stored and (stored.group, stored.sample) == (order.group, order.sample):
      on_done(stored)
      return stored
    trajectory = await play(order)
    # The signal that interrupted the engine may also have killed programs that tools had
    # started. Episodes that failed because of it must be played again.
    if finished and not engine.interrupted():
      finished.add(key, trajectory)
    on_done(trajectory)
    return trajectory

  numbers = collections.Counter()  # The next sample number of each task id.
  episodes = []
  for (group, task), sample in itertools.product(enumerate(tasks), range(samples)):
    if group in own_groups:
      order = sockets.Order(task, group, sample, numbers[task.id], rollout_number)
      episodes.append(play_or_read(order))
    numbers[task.id] += 1
  moment = moments.Rollout(step, len(episodes))
  future = moments.follow(moment, lambda: engine.start(episodes))
  return Rollout(engine, future, tasks, send_messages)


def make_play(
  engine: protocol.AnyEngine,
  chat: chat_lib.Chat,
  make_env: MakeEnv,
  *,
  limits: config_lib.Limits,
  decoding: decoding_lib.Decoding,
  seed: int,
  attempts: int,
) -> Play:
  """Makes a function that plays an order as a client of the engine.

  `attempts` is the most episodes that are played at a time; see `start` for the rest.
  """
  # Every row may wait for a slow tool at the same time.
  thread_pool.POOL.grow(2 * engine.sizes.rows * len(engine.replicas))
  stops = chat.stop_automaton(engine.config.vocab_size)
  automata = (stops,) if decoding.grammar is None else (stops, decoding.grammar)
  rows = decoding.choice.rows if decoding.choice else 1

  async def play(order: sockets.Order) -> types.Trajectory:
    task, group, sample, number, rollout_number = order
    async with engine.reserve(group, decoding.policy, rows) as replica:
      context = context_lib.Context(
        replica, decoding, automata, (seed, rollout_number, task.id, number)
      )
      return await _play(
        lambda: types.Trajectory(task, group, sample, [], [], [], types.Status.FAILED),
        lambda t: episode_lib.Episode(chat, make_env, limits, context, t),
        decoding.choice,
        attempts=max(_ATTEMPTS, attempts),
      )

  return play


async def _play(
  begin: Callable[[], types.Trajectory],
  make_episode: Callable[[types.Trajectory], episode_lib.Episode],
  choice: sockets.Choice | None,
  attempts: int,
) -> types.Trajectory:
  """Plays an episode, again if it was lost through no fault of its own.

  It samples the same tokens again, so only time is lost. Each other episode may block the
  shared event loop once.
  """
  for attempt in itertools.count():
    workers.home.set(workers.Home(spread=attempt > 0))
    trajectory = begin()
    try:
      with moments.watch(moments.Episode(trajectory)):
        await make_episode(trajectory).play(choice)
      break
    except workers.LostCallError as error:
      blocked = isinstance(error, workers.LoopBlockedError)
      trajectory.error = str(error)
      trajectory.metrics |= {
        'timeouts': float(blocked),
        f'error/{type(error).__name__}': 1.0,
      }
      if attempt + 1 >= (attempts if blocked else _MOST_LOSSES):
        break
  if attempt:
    trajectory.metrics['replays'] = float(attempt)
  return trajectory
