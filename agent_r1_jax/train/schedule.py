"""The schedule: when each rollout starts, and with which policy.

Updates learn from complete rollouts in order, so batches are not biased to short
episodes, and every token is at most `ahead` + `sync_every` - 1 updates old.

- Synchronous (ahead = 0): rollout n, then update n, and so on.
- One step off-policy (ahead = 1): rollout n + 1 starts when rollout n ends, and is played
  during update n by the policy before that update. The run is reproducible bit for bit.
- Partial (ahead >= 1): rollouts n + 1 to n + ahead are under way during update n, and
  continue with the new policy after it. An episode delays an update only if it takes
  longer than `ahead` updates.
"""

import collections
import copy
import itertools
from typing import Any

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.engine import protocol
from agent_r1_jax.rl import updates
from agent_r1_jax.rl.train_state import TrainState, UpdateConfig
from agent_r1_jax.rollout import evaluate, groups, rollout, sockets
from agent_r1_jax.train import curriculum as curriculum_lib
from agent_r1_jax.train import run_files
from agent_r1_jax.train.plan import plan as plan_lib


class Rollouts:
  """Starts the rollouts of a run, from the step where it resumes."""

  def __init__(
    self,
    plan: plan_lib.Plan,
    engine: protocol.AnyEngine,
    files: run_files.RunFiles,
    watcher: sockets.Watcher,
    samplers: sockets.Samplers | None = None,
  ):
    """Starts nothing yet. `files` are restored; the engine plays without `samplers`."""
    self._samplers = samplers
    self._schedule, self._files, self._watcher = plan.schedule, files, watcher
    self._engine, self._chat, self._decoding = engine, plan.chat, plan.training
    draws = files.loop_state.draws
    self._stream = curriculum_lib.TaskStream(
      plan.curriculum, plan.tasks, seed=plan.seed, draws=draws
    )
    self._playing: Any = {'make_env': plan.make_env, 'limits': plan.limits}
    self._shared: Any = {'seed': plan.seed, 'send_messages': plan.log_episodes}
    self._started: collections.deque[rollout.Rollout] = collections.deque()
    self._next_step = files.loop_state.step

  def next_groups(
    self, train_state: TrainState, update_config: UpdateConfig
  ) -> tuple[TrainState, list[groups.Group], curriculum_lib.Draws]:
    """Starts the rollouts that are due, waits for this step's, returns its groups.

    Before a rollout starts, the sampler is synced to the engine. Policy n is the policy
    after n updates, and steps count from 0. At step 2,

    - synchronous: sync policy 2, start rollout 2 and wait for it.
    - ahead = 1: wait for rollout 2, which policy 1 plays; sync policy 2; start rollout 3,
      which is played while update 2 computes policy 3.
    - partial, ahead = 1: sync policy 2, start rollout 3, and wait for rollout 2. Both
      rollouts continue or start with policy 2.

    Refills for tied groups are played before it returns, if max_refills allows.

    Returns:
      The train state, whose sampler is the current policy if
      update_config.syncs_before_update; the groups; and the tasks drawn for them and for
      all rollouts under way.
    """
    step, ahead = self._files.loop_state.step, update_config.schedule.ahead
    if update_config.syncs_before_update:
      # One step off-policy: the newest policy is synced after the wait. Before the wait,
      # only a run's first call starts a rollout.
      self._sync_and_start(train_state, step)
    else:
      # Synchronous or partial: the newest policy is synced now.
      self._sync_and_start(train_state, step + ahead)
    step_groups = groups.collect_groups(
      self._collect,
      n=self._schedule.tasks,
      samples=self._schedule.samples,
      max_refills=self._schedule.max_refills,
    )
    self._stream.finish_rollout(step_groups)
    if update_config.syncs_before_update:
      # After the wait, because the rollout that has just ended had to keep its policy.
      train_state = updates.sync_sampler(train_state, update_config)
      self._sync_and_start(train_state, step + ahead)
    return train_state, step_groups, copy.deepcopy(self._stream.draws)

  def play_greedy(
    self, step_groups: list[groups.Group]
  ) -> tuple[list[groups.Group], list[float]]:
    """Plays a greedy episode of each group's task (ReMax), with the rollouts' guides.

    Returns:
      The groups whose greedy episode has no error, and, for each of their trajectories,
      the reward of its task's greedy episode.
    """
    tasks = [group[0].task for group in step_groups]
    decoding = self._decoding._replace(sampling=config_lib.GREEDY)
    greedy = evaluate.run(
      self._engine, self._chat, {'': tasks}, decoding=decoding, **self._playing
    )['']
    pairs = [
      (g, t)
      for g, t in zip(step_groups, greedy, strict=True)
      if t.status != types.Status.FAILED
    ]
    return [g for g, _ in pairs], [t.reward for g, t in pairs for _ in g]

  def _sync_and_start(self, train_state: TrainState, last: int):
    """Syncs the sampler to the engine, and starts all rollouts up to step `last`."""
    last = min(last, self._schedule.steps - 1)
    to_start = range(self._next_step, last + 1)
    # If no rollout starts, only rollouts under way could use the new policy, which needs
    # `partial`.
    if to_start or self._schedule.partial:
      self._engine.sync_weights(train_state.sampler, train_state.sampler_step)
      if self._samplers:
        self._samplers.sync_weights(train_state.sampler, train_state.sampler_step)
    for step in to_start:
      tasks = self._stream.start_rollout(self._schedule.tasks)
      number = run_files.rollout_number(self._schedule, step)
      self._started.append(self._play(tasks, number, step))
      self._next_step = step + 1

  def _collect(self, n: int, refill: int) -> list[types.Trajectory]:
    """Waits for the oldest rollout, or plays n more tasks in its step."""
    if not refill:
      return self._started.popleft().result()
    # Another rollout number, so that a task drawn again gets other samples.
    step = self._files.loop_state.step
    number = run_files.rollout_number(self._schedule, step) + refill
    return self._play(self._stream.refill(n), number, step, 'refill').result()

  def _play(
    self, tasks, number: int, step: int, label: str = 'rollout'
  ) -> rollout.Rollout:
    """Starts the episodes of some tasks, whose random keys depend on `number`."""
    samples = self._schedule.samples
    return rollout.start(
      self._engine,
      self._chat,
      tasks,
      samples=samples,
      decoding=self._decoding,
      rollout_number=number,
      step=step + 1,
      store=self._files.store,
      on_done=counter(self._watcher, label, len(tasks) * samples),
      elsewhere=self._samplers.play if self._samplers else None,
      **self._shared,
      **self._playing,
    )


def counter(watcher: sockets.Watcher, phase: str, total: int) -> sockets.Ended:
  """Returns a callback that counts a phase's episodes for the watcher."""
  ended = itertools.count(1)
  return lambda trajectory: watcher.set_phase(phase, next(ended), total)
