"""The schedule: which rollouts are played when, and by which policy.

Updates take rollouts whole and in their order, so that no batch prefers short episodes,
and no token that is learned from is older than `ahead` updates (and sync_every - 1).

- In turn (ahead = 0): rollout n, then update n, and so on.
- One step off-policy (ahead = 1): rollout n + 1 begins when rollout n has ended, and is
  played during update n by the policy before that update. Such a run repeats to the last
  bit.
- Partial (ahead >= 1): rollouts n + 1 to n + ahead are under way during update n, and go
  on with the new policy after it. An episode holds the updates up only when it has taken
  longer than `ahead` of them.
"""

import collections
from collections.abc import Callable, Sequence
import itertools
from typing import Any

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.rl import updates
from agent_r1_jax.train import evaluate, groups, journal, rollout


class Schedule:
  """Rollouts of a run, from where its journal says that it is."""

  def __init__(
    self,
    config: config_lib.Schedule,
    tasks: Sequence[types.Task],
    engine: engine_lib.Engine,
    chat: chat_lib.Chat,
    run_log: journal.Journal,
    decoding: rollout.Decoding,
    *,
    seed: int = 0,
    messages: int | None = None,
    **playing: Any,
  ):
    """Starts nothing.

    Args:
      config: How much is played, and when.
      tasks: To train on.
      engine: Open.
      chat: Of the policy's tokenizer.
      run_log: Restored.
      decoding: How training rollouts are sampled.
      seed: The run's seed.
      messages: Trajectories of each process whose messages the others get; None: all.
      **playing: Of rollout.start: make_env, limits.
    """
    self._config, self._tasks, self._journal = config, tasks, run_log
    self._engine, self._chat, self._playing = engine, chat, playing
    self._decoding, self._seed, self._messages = decoding, seed, messages
    self._started: collections.deque[rollout.Rollout] = collections.deque()
    self._next = run_log.position.step

  def take(
    self, train_state: updates.TrainState, plan: updates.Plan
  ) -> tuple[updates.TrainState, list[groups.Group], int]:
    """The groups of the next step, and how many tasks they were drawn from.

    Waits for them, and starts what is to be played while they are learned from; with
    plan.syncs_before_update by the policy as it is now, which the train_state that is
    returned has.
    """
    step = self._journal.position.step
    self._start(
      step if plan.syncs_before_update else step + plan.schedule.ahead, train_state
    )
    found, drawn = groups.collect_groups(
      self._played,
      lambda start, n: self._draw_tasks(self._journal.position.tasks_drawn + start, n),
      n=self._config.tasks,
      samples=self._config.samples,
      max_refills=self._config.max_refills,
    )
    if plan.syncs_before_update:
      train_state = updates.sync_sampler(train_state, plan)
      self._start(step + plan.schedule.ahead, train_state)
    return train_state, found, drawn

  def greedy(self, found: list[groups.Group]) -> tuple[list[groups.Group], list[float]]:
    """Of each trajectory, the reward of a greedy episode of its task (ReMax)."""
    tasks = [group[0].task for group in found]
    greedy = evaluate.run(self._engine, self._chat, {'': tasks}, **self._playing)['']
    pairs = [(g, t) for g, t in zip(found, greedy, strict=True) if t.status != 'error']
    return [g for g, _ in pairs], [t.reward for g, t in pairs for _ in g]

  def _start(self, last: int, train_state):
    """Starts the rollouts up to `last`, which the present policy plays."""
    position, config = self._journal.position, self._config
    last = min(last, config.steps - 1)
    if self._next > last and not config.partial:
      return
    self._engine.sync_weights(train_state.sampler, train_state.sampler_step)
    while self._next <= last:
      start = position.tasks_drawn + (self._next - position.step) * config.tasks
      tasks = self._draw_tasks(start, config.tasks)
      self._started.append(self._play(tasks, journal.rollout_number(config, self._next)))
      self._next += 1

  def _played(self, tasks, refill) -> list[types.Trajectory]:
    if not refill:
      return self._started.popleft().result()
    draw = journal.rollout_number(self._config, self._journal.position.step) + refill
    return self._play(tasks, draw, 'refill').result()

  def _play(self, tasks, draw, label='rollout') -> rollout.Rollout:
    config = self._config
    total = len(tasks) * config.samples
    return rollout.start(
      self._engine,
      self._chat,
      tasks,
      samples=config.samples,
      decoding=self._decoding,
      seed=self._seed,
      draw=draw,
      spool=self._journal.spool,
      messages=self._messages,
      on_done=counter(self._journal.progress, label, total),
      **self._playing,
    )

  def _draw_tasks(self, start, n) -> list[types.Task]:
    return groups.epoch_tasks(self._tasks, start, n, self._seed)


def counter(progress, phase: str, total: int) -> Callable[[types.Trajectory], None]:
  """Shows how many episodes of a phase have ended."""
  ended = itertools.count(1)
  return lambda trajectory: progress.set_phase(phase, next(ended), total)
