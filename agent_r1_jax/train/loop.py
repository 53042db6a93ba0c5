"""The training loop: sample, score, estimate advantages, update, log, save.

train/plan/plan.py defines a run, and train/opening.py opens it.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import os
import pathlib
import time
from typing import NamedTuple

import jax
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.engine import guide, protocol
from agent_r1_jax.host import memory, moments, preemption, processes, runtime
from agent_r1_jax.models import decoder, lora, quantization, sharding
from agent_r1_jax.rl import algorithms, learner, updates
from agent_r1_jax.rollout import evaluate, groups, rollout, sockets
from agent_r1_jax.train import curriculum, opening, preflight, schedule, task_checks
from agent_r1_jax.train.plan import plan as plan_lib
from agent_r1_jax.train.plan import setup


@preemption.watch()
@processes.exit_together()
def run(
  config: config_lib.Config,
  workdir: str,
  *,
  tasks: Sequence[types.Task],
  make_env: rollout.MakeEnv,
  algorithm: algorithms.Algorithm,
  evals: Mapping[str, Sequence[types.Task]] | None = None,
  privileged: Callable[[types.Task], str] | None = None,
  guides: Mapping[guide.Guide, guide.State] | None = None,
  label: str = 'training',
  watcher: sockets.Watcher = sockets.PLAIN,
  make_engine: setup.MakeEngine = setup.make_engine,
  samplers: sockets.Samplers | None = None,
) -> decoder.Params:
  """Trains a policy, or resumes the run in workdir.

  Writes config.json, made_of.json (see train/fingerprint.py), metrics.jsonl and
  checkpoints/ to workdir, and at the end, in HF layout, model/ and critic/ if the critic
  is separate. The watcher shows and writes the rest.

  Args:
    config: The run's configuration.
    workdir: The directory that the run writes to; made if missing.
    tasks: The tasks to train on.
    make_env: Makes a new environment for each episode.
    algorithm: The advantage estimator and the loss.
    evals: Named sets of tasks to evaluate, sampled by config.evaluation (greedily by
      default).
    privileged: Returns text about a task that only the critic reads, such as its answer.
    guides: Your own guides (engine/guide.py), without parameters, each with its state at
      the start of every reply, in training and in evaluation.
    label: The run's name.
    watcher: Observes the run. The default prints one line per step; report.Watcher() adds
      a live view, alarms, logs of episodes, TensorBoard and other sinks, traces, curves.
    make_engine: Makes the engine, by default on the chips of this process;
      contrib/external samples from other servers.
    samplers: Play the episodes of rollouts elsewhere, such as contrib/ray's; by default
      this process's engine plays them.

  Returns:
    The policy's parameters, with LoRA merged into them unless the kernels have 8 bits.

  Raises:
    ValueError: The configuration does not fit the workdir, the model, the tasks, the
      algorithm or the device's memory; or the workdir's run has another algorithm,
      reward, tools or tasks.
    RuntimeError: Too many environments raised; the message has the first error.
    learner.NotFiniteError: A loss or a gradient is not finite; the batch is written to
      workdir/not_finite.npz.
    preemption.Preempted: The process got SIGTERM or Ctrl-C, and a checkpoint is saved. If
      saving takes too long (see preemption.watch), the process ends with the same status.
    processes.LostError: Another process ended.
    sockets.SamplersLostError: There were too few samplers for too long; a checkpoint is
      saved.
  """
  runtime.quiet_logging()
  runtime.initialize()  # From here on, errors reach the other processes.
  if not os.fspath(workdir):
    raise ValueError('workdir is empty; name a directory for the run.')
  algorithm = preflight.correct_rounding(config, algorithm)
  preflight.check_config(config, algorithm)
  watcher.check(config)
  _check_samplers(config, samplers, make_engine)
  task_checks.check_sets(tasks, evals)
  with opening.open_run(
    # A variable would keep the initial parameters alive.
    *plan_lib.make(
      config,
      workdir,
      tasks=tasks,
      make_env=make_env,
      algorithm=algorithm,
      evals=evals or {},
      privileged=privileged,
      guides=guides or {},
      make_engine=make_engine,
    ),
    workdir,
    label=label,
    watcher=watcher,
    samplers=samplers,
  ) as run:
    try:
      _run_steps(run)
    except protocol.PreemptedError:
      _save_preempted(run)
      raise preemption.Preempted from None
    except sockets.SamplersLostError:
      _save(run)
      raise
    # The workdir is still locked, so that no other run writes a model there.
    run.files.checkpoints.wait()
    run.signals.phase = 'the writing of the model'
    run.files.save_models(run.train_state)
    params = run.train_state.states['policy'].params
  # Frees the engine's copy of the policy before another copy is made.
  del run
  memory.release_freed_memory(cycles=True)
  watcher.finish(pathlib.Path(workdir), label)
  return params if quantization.is_frozen(params) else lora.merge(params)


def _check_samplers(
  config: config_lib.Config,
  samplers: sockets.Samplers | None,
  make_engine: setup.MakeEngine,
):
  """Raises ValueError for samplers that do not fit the run."""
  if samplers is None:
    return
  samplers.check(config)
  if make_engine is not setup.make_engine:
    raise ValueError('make_engine: samplers make their own; leave one of them out.')


def _run_steps(run: opening.OpenRun):
  """Takes the remaining steps of the run: sample, learn, evaluate, log, save."""
  plan, files, loop_state = run.plan, run.files, run.files.loop_state
  watcher, steps = run.watcher, plan.schedule.steps
  if plan.evals and loop_state.is_new and plan.schedule.eval_every:
    _write_line(run, _evaluate(run))
  while loop_state.pending_metrics or loop_state.step < steps:
    began = time.perf_counter()
    # A run preempted during an evaluation resumes with it: the update is done, and only
    # the step's line in metrics.jsonl is missing.
    if not loop_state.pending_metrics:
      number = loop_state.step + 1
      with watcher.trace_step(number), moments.watch(moments.Step(number)):
        sample = _sample(run)
        memory.release_freed_memory()
        sampled = time.perf_counter()
        learned, table = _learn(run, sample)
        memory.release_freed_memory()
        updated = time.perf_counter()
      seconds = {'time/rollout': sampled - began, 'time/update': updated - sampled}
      loop_state.advance(sample.metrics | learned | seconds, sample.draws)
      watcher.log_rollout(loop_state.step, sample.played, sample.chosen, table)
    metrics = dict(loop_state.pending_metrics)
    every, is_last = plan.schedule.eval_every, loop_state.step == steps
    if plan.evals and every and (is_last or loop_state.step % every == 0):
      began = time.perf_counter()
      metrics |= _evaluate(run)
      memory.release_freed_memory()
      metrics['time/eval'] = time.perf_counter() - began
    _write_line(run, metrics | watcher.measure(loop_state.step, metrics))
    if loop_state.step == steps or files.checkpoints.should_save(loop_state.step):
      files.save(run.train_state)


def _write_line(run: opening.OpenRun, metrics: dict[str, float]):
  """Writes the line of the current step to metrics.jsonl, and tells the watcher."""
  run.files.write(metrics)
  run.watcher.write(run.files.loop_state.step, metrics)


class _Sample(NamedTuple):
  """The episodes of one step.

  Attributes:
    played: All episodes.
    chosen: The episodes that the update learns from.
    baselines: For each chosen episode, the reward of a greedy episode of its task, for
      algorithms that subtract it.
    prefixes: For each chosen episode, the tokens before it that only the critic reads.
    draws: The tasks drawn so far, including tasks of rollouts under way.
    metrics: Numbers to log, named 'rollout/...'.
  """

  played: list[types.Trajectory]
  chosen: list[types.Trajectory]
  baselines: list[float] | None
  prefixes: list[np.ndarray] | None
  draws: curriculum.Draws
  metrics: dict[str, float]


@functools.partial(jax.profiler.annotate_function, name='rollout')
def _sample(run: opening.OpenRun) -> _Sample:
  """Plays the episodes of the next step and chooses those to learn from.

  The schedule syncs the sampler to the engine, starts the rollouts that are due and waits
  for this step's. Then faults are counted, and greedy episodes are played if the
  algorithm subtracts their reward.

  Raises:
    RuntimeError: Too many environments raised.
    ValueError: All prompts of the run's first rollout are too long, and chat.long_prompts
      is 'refuse'.
  """
  plan, algorithm = run.plan, run.plan.update_config.algorithm
  step = run.files.loop_state.step
  run.signals.phase = 'a rollout'
  run.watcher.set_phase('rollout')
  stats = run.engine.stats
  sampled, calls = stats.sampled, stats.calls
  run.train_state, step_groups, draws = run.rollouts.next_groups(
    run.train_state, run.plan.update_config
  )
  played = [t for group in step_groups for t in group]
  run.watcher.see_episodes(step + 1, played)
  metrics = {f'rollout/{k}': v for k, v in evaluate.summarize(played).items()}
  if run.engine.sizes.drafts and not run.samplers:
    accepted = (stats.sampled - sampled) / max(1, stats.calls - calls)
    metrics['accepted/decode'] = accepted  # Tokens sampled per call of the policy.
  if run.samplers:
    metrics |= run.samplers.measure()
  metrics['rollout/groups'] = len(step_groups)
  metrics['rollout/dead_groups'] = float(
    np.mean([groups.is_tied(g) for g in step_groups])
  )
  if step == 0 and plan.refuses_long_prompts:
    groups.check_first_rollout(step_groups)
  step_groups = groups.select_usable(
    step_groups,
    max_error_rate=plan.max_error_rate,
    refilled=plan.schedule.max_refills > 0,
    mask_truncated=algorithm.mask_truncated,
  )
  baselines, prefixes = None, None
  if algorithm.greedy_baseline:
    step_groups, baselines = run.rollouts.play_greedy(step_groups)
  chosen = [t for group in step_groups for t in group]
  if plan.privileged:
    prefixes = [plan.chat.encode_data(plan.privileged(t.task)) for t in chosen]
  return _Sample(played, chosen, baselines, prefixes, draws, metrics)


@functools.partial(jax.profiler.annotate_function, name='update')
def _learn(run: opening.OpenRun, sample: _Sample):
  """Scores the tokens, estimates advantages and updates policy and critic.

  Returns:
    Numbers to log, named 'train/...', and the table of the trained tokens.
  """
  run.watcher.set_phase('update')
  run.signals.phase = 'an update'
  try:
    update = moments.Update(len(sample.chosen))
    with moments.watch(update), sharding.use_mesh(run.engine.mesh):
      run.train_state, metrics, table = updates.learn(
        run.train_state,
        sample.chosen,
        run.plan.update_config,
        baselines=sample.baselines,
        prefixes=sample.prefixes,
      )
  except learner.NotFiniteError as error:
    dumped = run.files.dump_batches(error.batches)
    raise learner.NotFiniteError(
      f'{error} {dumped} Lower the learning rate or look at the batch; '
      'the same command goes on from the last checkpoint.',
      error.batches,
    ) from error
  return {f'train/{k}': v for k, v in metrics.items()}, table


def _evaluate(run: opening.OpenRun) -> dict[str, float]:
  """Plays the evaluation sets with the current policy; returns numbers to log.

  If no rollout is under way, the engine keeps this policy, even if the sampler is older;
  the schedule syncs the sampler again before it starts a rollout.
  """
  files, train_state, engine = run.files, run.train_state, run.engine
  run.signals.phase = 'an evaluation'
  run.watcher.set_phase('evaluation')
  params = train_state.states['policy'].params
  if not engine.busy:
    engine.sync_weights(params, train_state.step)  # Without a second copy.
  # Rollouts under way keep sampling from their own policy.
  policy = engine.make_policy(params, train_state.step)
  total = sum(len(tasks) for tasks in run.plan.evals.values())
  played = evaluate.run(
    engine,
    run.plan.chat,
    run.plan.evals,
    run.plan.make_env,
    limits=run.plan.limits,
    decoding=run.plan.evaluation._replace(policy=policy),
    on_done=schedule.counter(run.watcher, 'evaluation', total),
  )
  step = files.loop_state.step
  run.watcher.see_episodes(step, [t for ts in played.values() for t in ts])
  metrics = {}
  for name, trajectories in played.items():
    run.watcher.log_evaluation(name, step, trajectories)
    metrics[f'eval/{name}/episodes'] = len(trajectories)
    for key, value in evaluate.summarize(trajectories).items():
      metrics[f'eval/{name}/{key}'] = value
  return metrics


def _save_preempted(run: opening.OpenRun):
  """Writes a checkpoint before the process ends, and says so on the terminal."""
  step = run.files.loop_state.step
  run.watcher.set_phase('saving')
  run.signals.start_saving(step)
  _save(run)
  run.signals.finish_saving(step)


def _save(run: opening.OpenRun):
  """Writes a checkpoint, and waits until it is on disk."""
  run.files.save(run.train_state)
  run.files.checkpoints.wait()
