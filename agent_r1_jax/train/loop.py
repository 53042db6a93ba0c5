"""The training loop: sample, score, estimate advantages, update, log, save.

train/setup.py makes the objects that the loop uses.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
from typing import NamedTuple

import jax
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, types
from agent_r1_jax.engine import guide, replica
from agent_r1_jax.guided import critic
from agent_r1_jax.host import preemption, processes, runtime
from agent_r1_jax.host import workdir as workdir_lib
from agent_r1_jax.models import decoder, lora, peft_files, sharding, weights
from agent_r1_jax.report import profile, summary
from agent_r1_jax.report import progress as progress_lib
from agent_r1_jax.rl import algorithms, learner, updates
from agent_r1_jax.train import (
  curriculum,
  evaluate,
  groups,
  identity,
  preflight,
  rollout,
  schedule,
  setup,
  sizes,
)
from agent_r1_jax.train import journal as journal_lib


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
) -> decoder.Params:
  """Trains a policy; if it is called again with the same workdir, it resumes.

  Writes to workdir: config.json, made_of.json, metrics.jsonl and TensorBoard events,
  checkpoints/, trajectories/step-*.eval of the evaluations and of some episodes of each
  rollout, and at the end curve.png, numbers.md, and in HF layout model/ and, if the
  critic is a model of its own, critic/ (see guided/critic.py).

  Args:
    config: The run's configuration.
    workdir: The directory that the run writes to; made if missing.
    tasks: The tasks to train on.
    make_env: Makes a new environment for each episode.
    algorithm: The advantage estimator and the loss.
    evals: Sets of tasks to evaluate by config.evaluation, by default greedily; by name.
    privileged: Returns a text on a task that only the critic reads, such as its answer.
    guides: Guides of one's own (engine/guide.py), without parameters, and the state in
      which each begins in every reply, of training and of evaluation.
    label: The run's name on the progress bar.

  Returns:
    The policy's parameters; adapters are merged into them.

  Raises:
    ValueError: The configuration does not fit the workdir, the model, the tasks, the
      algorithm or the device's memory; or the workdir has a run with another algorithm,
      reward, tools or tasks.
    RuntimeError: Too many environments raised; the message has the first error.
    learner.NotFiniteError: A loss or a gradient is not finite; the batch is written to
      workdir/not_finite.npz.
    preemption.Preempted: The process got SIGTERM or Ctrl-C; what had been learned is
      saved. Where that takes too long (see preemption.watch), the process ends with the
      same status.
    processes.LostError: Another process ended.
  """
  runtime.quiet_logging()
  if not os.fspath(workdir):
    raise ValueError('workdir is empty; name a directory for the run.')
  preflight.check_config(config, algorithm)
  preflight.check_sets(tasks, evals)
  with setup.start(
    config,
    workdir,
    tasks=tasks,
    make_env=make_env,
    algorithm=algorithm,
    evals=evals or {},
    privileged=privileged,
    guides=guides or {},
    label=label,
  ) as job:
    try:
      _run_steps(job)
    except replica.PreemptedError:
      _save_preempted(job)
      raise preemption.Preempted from None
    # While the workdir is still locked: another run may not write a model there too.
    job.journal.checkpoints.wait()
    job.watch.phase = 'the writing of the model'
    _save_models(job)
    params = job.train_state.states['policy'].params
  # The engine's copy of the policy is freed before another one is made.
  del job
  runtime.release_freed_memory(cycles=True)
  if processes.is_first():
    summary.write_training_report(workdir, label)
    print(summary.list_files(workdir))
  return lora.merge(params)


@contextlib.contextmanager
def reserve(
  config: config_lib.Config, workdir: str | os.PathLike, algorithm: algorithms.Algorithm
) -> Iterator[None]:
  """Locks a run's workdir inside `with`, and refuses settings that `run` would refuse.

  For scripts that play something else before they call `run`, or after it: with a wrong
  setting, or beside another run, they raise before anything is played.

  Raises:
    ValueError: The configuration does not fit the workdir, the algorithm or the device's
      memory; or another run holds the workdir.
  """
  preflight.check_config(config, algorithm)
  with journal_lib.lock(sizes.resolve(config, algorithm, workdir), workdir):
    yield


def _run_steps(job: setup.Job):
  """Takes the remaining steps of the run: sample, learn, evaluate, log, save."""
  config, journal, position = job.config, job.journal, job.journal.position
  steps, meter = config.schedule.steps, progress_lib.Meter(job.engine)
  if job.evals and position.is_new and config.schedule.eval_every:
    journal.write(_evaluate(job))
  while position.pending_metrics or position.step < steps:
    clock = progress_lib.Clock()
    # A run that was preempted during an evaluation resumes with it: the update was made
    # before, and only the step's line in metrics.jsonl is missing.
    if not position.pending_metrics:
      with profile.trace_step(config.profiled_steps, journal.workdir, position.step + 1):
        sample = _sample(job)
        runtime.release_freed_memory()
        seconds = {'time/rollout': clock.lap()}
        learned, table = _learn(job, sample)
        runtime.release_freed_memory()
        seconds['time/update'] = clock.lap()
      position.advance(sample.metrics | learned | seconds, sample.draws)
      journal.write_rollout(sample.played, sample.chosen, table)
    metrics = dict(position.pending_metrics)
    every = config.schedule.eval_every
    is_due = position.step == steps or (every and position.step % every == 0)
    if job.evals and is_due:
      metrics |= _evaluate(job)
      runtime.release_freed_memory()
      metrics['time/eval'] = clock.lap()
    metrics |= meter.measure()
    journal.write(metrics | job.alarms.check(position.step, metrics))
    journal.progress.show_metrics(position.step, metrics)
    if position.step == steps or journal.checkpoints.should_save(position.step):
      journal.save(job.train_state, job.plan)
  job.faults.report_totals()


class _Sample(NamedTuple):
  """The episodes of one step.

  Attributes:
    played: All episodes.
    chosen: The episodes that the update learns from.
    baselines: For each chosen episode the reward of a greedy episode of its task, for
      algorithms that subtract it.
    prefixes: For each chosen episode the tokens before it that only the critic reads.
    draws: The tasks drawn so far, including those of the rollouts under way.
    metrics: Numbers to log, named 'rollout/...'.
  """

  played: list[types.Trajectory]
  chosen: list[types.Trajectory]
  baselines: list[float] | None
  prefixes: list[np.ndarray] | None
  draws: curriculum.Draws
  metrics: dict[str, float]


@functools.partial(jax.profiler.annotate_function, name='rollout')
def _sample(job: setup.Job) -> _Sample:
  """Plays the episodes of the next step and chooses those to learn from.

  The schedule syncs the sampler to the engine, starts the rollouts that are due and waits
  for this step's. Then faults are counted, and greedy episodes are played for algorithms
  that subtract their reward.

  Raises:
    RuntimeError: Too many environments raised.
    ValueError: All prompts of the run's first rollout are too long, and chat.long_prompts
      is 'refuse'.
  """
  config, algorithm, step = job.config, job.plan.algorithm, job.journal.position.step
  job.watch.phase = 'a rollout'
  job.train_state, step_groups, draws = job.rollouts.next_groups(
    job.train_state, job.plan
  )
  played = [t for group in step_groups for t in group]
  job.faults.count(step + 1, played)
  metrics = {f'rollout/{k}': v for k, v in evaluate.summarize(played).items()}
  metrics['rollout/groups'] = len(step_groups)
  metrics['rollout/dead_groups'] = float(
    np.mean([groups.is_tied(g) for g in step_groups])
  )
  if step == 0 and config.chat.long_prompts == 'refuse':
    groups.check_first_rollout(step_groups)
  step_groups = groups.select_usable(
    step_groups,
    max_error_rate=config.max_error_rate,
    refilled=config.schedule.max_refills > 0,
    mask_truncated=algorithm.mask_truncated,
  )
  baselines, prefixes = None, None
  if algorithm.greedy_baseline:
    step_groups, baselines = job.rollouts.play_greedy(step_groups)
  chosen = [t for group in step_groups for t in group]
  if job.privileged:
    prefixes = [job.chat.encode_data(job.privileged(t.task)) for t in chosen]
  return _Sample(played, chosen, baselines, prefixes, draws, metrics)


@functools.partial(jax.profiler.annotate_function, name='update')
def _learn(job: setup.Job, sample: _Sample):
  """Scores the tokens, estimates advantages and updates policy and critic.

  Returns:
    Numbers to log, named 'train/...', and the table of the tokens that were learned from.
  """
  job.journal.progress.set_phase('update')
  job.watch.phase = 'an update'
  try:
    with sharding.use_mesh(job.engine.mesh):
      job.train_state, metrics, table = updates.learn(
        job.train_state,
        sample.chosen,
        job.plan,
        baselines=sample.baselines,
        prefixes=sample.prefixes,
      )
  except learner.NotFiniteError as error:
    dumped = job.journal.dump_batches(error.batches)
    raise learner.NotFiniteError(
      f'{error} {dumped} Lower the learning rate or look at the batch; '
      'the same command goes on from the last checkpoint.',
      error.batches,
    ) from error
  return {f'train/{k}': v for k, v in metrics.items()}, table


def _evaluate(job: setup.Job) -> dict[str, float]:
  """Plays the evaluation sets by the current policy; returns numbers to log.

  If no rollout is under way, the engine keeps this policy, even where the sampler is an
  older one; the schedule syncs the sampler again before it starts a rollout.
  """
  journal, train_state, engine = job.journal, job.train_state, job.engine
  job.watch.phase = 'an evaluation'
  params = train_state.states['policy'].params
  if not engine.busy:
    engine.sync_weights(params, train_state.step)  # Without a second copy.
  # Rollouts under way go on sampling from their own policy.
  policy = engine.make_policy(params, train_state.step)
  total = sum(len(tasks) for tasks in job.evals.values())
  played = evaluate.run(
    engine,
    job.chat,
    job.evals,
    job.make_env,
    limits=job.config.limits,
    decoding=job.evaluation._replace(policy=policy),
    on_done=schedule.counter(journal.progress, 'evaluation', total),
  )
  job.faults.count(journal.position.step, itertools.chain(*played.values()))
  metrics = {}
  for name, trajectories in played.items():
    journal.write_evaluation(name, trajectories)
    for key, value in evaluate.summarize(trajectories).items():
      metrics[f'eval/{name}/{key}'] = value
  return metrics


def _save_models(job: setup.Job):
  """Writes the policy, its adapters, and a critic."""
  base, workdir = job.config.model.path, job.journal.workdir
  value_head = critic.describe(
    job.plan.algorithm, base, privileged=job.privileged is not None
  )
  options = {'tokenizer_from': base, 'value_head': value_head}
  for name, state in job.train_state.states.items():
    target = workdir / ('model' if name == 'policy' else name)
    weights.save(target, job.plan.model, state.params, **options)
  policy = job.train_state.states['policy'].params
  if lora.has_adapters(policy):
    peft_files.save(workdir / 'adapter', policy, pathlib.Path(base).resolve())


def _save_preempted(job: setup.Job):
  """Writes a checkpoint before the process ends, and prints that it does."""
  journal, step = job.journal, job.journal.position.step
  journal.progress.set_phase('saving')
  job.watch.start_saving(step)
  journal.save(job.train_state, job.plan)
  journal.checkpoints.wait()
  job.watch.finish_saving(step)


@preemption.watch()
@processes.exit_together()
def play(
  config: config_lib.Config,
  model: str | os.PathLike,
  methods: Mapping[str, rollout.Method],
  *,
  samples: int = 1,
  workdir: str | os.PathLike | None = None,
  choose: evaluate.Choose | None = None,
) -> dict[str, dict[str, list[types.Trajectory]]]:
  """Plays the tasks of one or several methods by the policy in a directory.

  An episode's randomness depends on (config.seed, task id, sample) alone.

  Args:
    config: The configuration; its model.path is replaced by `model`.
    model: The policy's directory in HF layout.
    methods: The tasks and the environment of each method, by name; see rollout.Method.
    samples: How many episodes of each task are played.
    workdir: Where each episode is written as it ends; a repeated call, also one with more
      samples or methods, then plays only the missing ones. None writes nothing.
    choose: Makes, for the engine, the choice among several candidates of each reply.

  Returns:
    Method -> set -> trajectories; those of a task are side by side.

  Raises:
    ValueError: The workdir has episodes of another configuration, model, task,
      environment or tool, and the message lists what differs; or it is in use.
  """
  runtime.quiet_logging()
  config.check()
  config = sizes.resolve(
    fields.replace(config, {'model.path': str(model)}), None, workdir
  )
  folder = None if workdir is None else pathlib.Path(workdir)
  with contextlib.ExitStack() as stack:
    if folder:
      if processes.is_first():
        stack.enter_context(workdir_lib.lock(folder))
      _check_same(config, folder, methods)
    mesh = setup.make_mesh(config.mesh)
    shape, params, chat = setup.load(config.model, config.chat, mesh)
    guides = [guide.FORCED] if choose else []
    engine = setup.make_engine(config, shape, params, mesh, guides)
    # This is the watch that began with `play`.
    watch = stack.enter_context(preemption.watch())
    watch.phase, engine.interrupted = 'an evaluation', watch.is_requested
    try:
      return evaluate.play(
        engine,
        chat,
        methods,
        limits=config.limits,
        sampling=config.evaluation,
        samples=samples,
        seed=config.seed,
        workdir=folder,
        choose=choose,
      )
    except replica.PreemptedError:
      raise watch.end_unsaved() from None


def _check_same(config: config_lib.Config, workdir: pathlib.Path, methods) -> None:
  """Raises ValueError if the workdir has episodes of another configuration or method."""
  workdir_lib.check_config(
    workdir, dataclasses.asdict(config), defaults=config.read_missing()
  )
  model = identity.model_digest(config.model.path)
  for method, (sets, make_env) in methods.items():
    tasks = [task for tasks in sets.values() for task in tasks]
    with preflight.open_environment(make_env, config.limits) as env:
      made_of = identity.describe_run(None, env, tasks)
    made_of |= {'model': model, 'sets': identity.tasks_digest(sets)}
    workdir_lib.check_config(
      workdir / method,
      made_of,
      name='made_of.json',
      remedy=f'Give another workdir, or delete {workdir / method} to play all again',
    )
