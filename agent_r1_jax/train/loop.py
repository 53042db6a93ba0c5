"""Training: rollout, credit, update, log, checkpoint, evaluate; read it from the top."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import itertools
import os
import pathlib
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, types
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import tokenizer as tokenizer_lib
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import replica
from agent_r1_jax.host import disk, preemption, processes, runtime, sharding
from agent_r1_jax.models import decoder, lora, weights
from agent_r1_jax.report import alarms as alarms_lib
from agent_r1_jax.report import progress as progress_lib
from agent_r1_jax.report import summary, viewer
from agent_r1_jax.rl import algorithms, learner, packing, updates
from agent_r1_jax.rl import optimizers as optimizers_lib
from agent_r1_jax.train import (
  evaluate,
  groups,
  identity,
  journal,
  preflight,
  rollout,
  schedule,
  sizes,
)

Config = config_lib.Config


def make_mesh(config: config_lib.Mesh) -> Mesh | None:
  """The chips that train as the configuration lays them out; None for one chip."""
  runtime.initialize()
  devices, samplers = sharding.split_devices(config.samplers)
  chips = len(devices)
  rest = config.data * config.tensor * config.context
  fsdp = config.fsdp or max(1, chips // rest)
  if chips == rest * fsdp == 1 and not config.samplers:
    return None
  axes = {'data': config.data, 'fsdp': fsdp}
  axes |= {'tensor': config.tensor, 'context': config.context}
  mesh = sharding.make_mesh(**axes, devices=devices)
  sharding.make_replica_meshes(mesh, samplers)  # Refuses what cannot sample.
  return mesh


def _check_split(batch: config_lib.Batch, slots: int, mesh: Mesh | None) -> None:
  """Raises ValueError if training rows cannot be split over the mesh."""
  if mesh is None:
    return
  groups, context = mesh.shape['data'] * mesh.shape['fsdp'], mesh.shape['context']
  if batch.microbatch % groups:
    raise ValueError(
      f'batch.microbatch is {batch.microbatch}, yet its rows lie on {groups} groups of '
      'chips (data x fsdp): make it a multiple of that.'
    )
  tokens = batch.row_tokens or slots
  if tokens % context:
    raise ValueError(
      f'a training row has {tokens} tokens (batch.row_tokens, or engine.slots), which '
      f'mesh.context = {context} must divide.'
    )


def load(
  config: config_lib.Model, chat: config_lib.Chat, mesh: Mesh | None = None
) -> tuple[decoder.DecoderConfig, decoder.Params, chat_lib.Chat]:
  """The shape, parameters (on the mesh, if given) and chat of the model's directory."""
  runtime.initialize()
  place = sharding.make_placer(mesh)
  shape, params = weights.load(config.path, dtype='float32', place=place)
  shape = dataclasses.replace(shape, dtype=config.dtype, remat=config.remat)
  tokenizer = tokenizer_lib.load(config.path)
  return (
    shape,
    params,
    chat_lib.Chat(
      tokenizer,
      max_tool_tokens=chat.max_tool_tokens,
      tools_in_prompt=chat.tools_in_prompt,
      stop_strings=fields.parse_json('chat.stop_strings', chat.stop_strings, list),
      template_kwargs=fields.parse_json('chat.template', chat.template, dict),
    ),
  )


def make_engine(
  config: Config,
  model: decoder.DecoderConfig,
  params: decoder.Params,
  mesh: Mesh | None = None,
) -> engine_lib.Engine:
  """The engine, with the run's sizes, on the chips of this process."""
  sizes = config.engine
  return engine_lib.Engine(
    model,
    params,
    mesh=mesh,
    chips=sharding.split_devices(config.mesh.samplers)[1],
    rows=sizes.rows,
    slots=sizes.slots,
    steps=sizes.decode_steps,
    feed_rows=sizes.feed_rows,
    feed_tokens=sizes.feed_tokens,
    bucket=sizes.bucket,
    width=sizes.width or None,
    narrow=sizes.narrow,
    replicas=sizes.replicas or 1,
  )


@preemption.watch()
@processes.exit_together()
def play(
  config: Config,
  model: str | os.PathLike,
  rows: Mapping[str, tuple[Mapping[str, Sequence[types.Task]], rollout.MakeEnv]],
) -> dict[str, dict[str, list[types.Trajectory]]]:
  """evaluate.play with the policy of a directory; its memory is free again afterwards."""
  runtime.quiet_logging()
  config.check()
  config = sizes.resolve(fields.replace(config, {'model.path': str(model)}))
  mesh = make_mesh(config.mesh)
  _check_split(config.batch, config.engine.slots, mesh)
  shape, params, chat = load(config.model, config.chat, mesh)
  engine = make_engine(config, shape, params, mesh)
  with preemption.watch() as watch:
    watch.phase, engine.interrupted = 'an evaluation', watch.is_requested
    try:
      return evaluate.play(
        engine, chat, rows, limits=config.limits, sampling=config.evaluation
      )
    except replica.PreemptedError:
      raise watch.end_unsaved() from None


@preemption.watch()
@processes.exit_together()
def run(
  config: Config,
  workdir: str,
  *,
  tasks: Sequence[types.Task],
  make_env: rollout.MakeEnv,
  algorithm: algorithms.Algorithm,
  evals: Mapping[str, Sequence[types.Task]] | None = None,
  privileged: Callable[[types.Task], str] | None = None,
  label: str = 'training',
) -> decoder.Params:
  """Trains a policy; started again with the same workdir it goes on where it was.

  Writes to workdir: config.json, made_of.json, metrics.jsonl and TensorBoard events,
  checkpoints/, trajectories/step-*.eval of the evaluations and of some episodes of each
  rollout, and at the end curve.png, numbers.md and model/ in HF layout.

  Args:
    config: Of the run.
    workdir: Made if missing.
    tasks: To train on.
    make_env: A new environment for each episode.
    algorithm: Advantages, loss and the rest.
    evals: Sets to evaluate greedily, by name.
    privileged: What the critic alone is told of a task, such as its answer.
    label: What the progress bar calls the run.

  Returns:
    The policy's parameters; adapters are merged into them.

  Raises:
    ValueError: The configuration does not fit the workdir, the model, the tasks, the
      algorithm or the device's memory; or the workdir is of another algorithm, reward,
      tools or tasks.
    RuntimeError: Too many environments raised; the first error is told.
    learner.NotFiniteError: A loss or a gradient; the batch is in workdir/not_finite.npz.
    preemption.Preempted: SIGTERM or Ctrl-C; what had been learned is saved. Where that
      takes too long (see preemption.watch), the process ends with the same status.
    processes.LostError: Another process ended.
  """
  runtime.quiet_logging()
  preflight.check_config(config, algorithm)
  preflight.check_sets(tasks, evals)
  config = sizes.resolve(config, algorithm, workdir)
  mesh = make_mesh(config.mesh)
  _check_split(config.batch, config.engine.slots, mesh)
  model, params, chat = load(config.model, config.chat, mesh)
  engine = make_engine(config, model, params, mesh)
  fits = {'slots': engine.sizes.slots, 'long_prompts': config.chat.long_prompts}
  env = preflight.make_environment(make_env, config.limits.reset_seconds)
  tasks, lines = preflight.examine(chat, env, tasks, evals or {}, **fits)
  with sharding.use_mesh(mesh):
    plan, train_state = _plan(config, model, params, algorithm, mesh)
  if privileged and 'critic' not in train_state.states:
    raise ValueError('privileged: the algorithm has no critic of its own to tell it to.')
  playing: dict[str, Any] = {'make_env': make_env, 'limits': config.limits}
  with contextlib.ExitStack() as stack:
    watch = stack.enter_context(preemption.watch())
    made_of = identity.describe_run(algorithm, env, tasks, privileged)
    run_log = stack.enter_context(journal.Journal(config, workdir, label, made_of))
    watch.newest_step = lambda: _newest(run_log.checkpoints.directory)
    watch.raise_if_requested()
    watch.phase = 'restoring'
    train_state = run_log.restore(train_state, plan)
    # What it began with may be another policy by now, and nobody else holds it.
    engine.sync_weights(train_state.sampler, train_state.sampler_step)
    del params
    engine.interrupted = watch.is_requested
    progress, position = run_log.progress, run_log.position
    for line in lines:
      progress.print_line(line)
    monitor = alarms_lib.AlarmMonitor(config.alarms, progress.print_line)
    faults = alarms_lib.FaultCounter(progress.print_line)

    def compiled(done: int, programs: int):
      progress.set_phase('compile', done, programs)
      watch.raise_if_requested()

    watch.phase = 'compilation'
    sampled = evaluate.decoding(config.sampling, engine, chat, env)
    held_out = evaluate.decoding(config.evaluation, engine, chat, env)
    grammars = [d.grammar for d in (sampled, held_out) if d.grammar]
    engine.warm_up(compiled, [chat.stop_automaton(model.vocab_size), *grammars])
    stack.enter_context(engine.open())
    rollouts = schedule.Schedule(
      config.schedule,
      tasks,
      engine,
      chat,
      run_log,
      sampled,
      seed=config.seed,
      messages=config.log_episodes,
      **playing,
    )

    def evaluated() -> dict[str, float]:
      watch.phase = 'an evaluation'
      params = train_state.states['policy'].params
      if not engine.busy:
        engine.sync_weights(params, train_state.step)  # Without a second copy.
      # Rollouts that are under way go on beside it, by the policy that they had.
      policy = engine.make_policy(params, train_state.step)
      decoding = held_out._replace(policy=policy)
      ended = schedule.counter(
        progress, 'evaluation', sum(map(len, (evals or {}).values()))
      )
      played = evaluate.run(
        engine, chat, evals or {}, decoding=decoding, on_done=ended, **playing
      )
      faults.count(position.step, itertools.chain(*played.values()))
      return _logged(played, workdir, config, position.step)

    try:
      if position.written < 0 and config.schedule.eval_every and not position.unwritten:
        run_log.write(evaluated())
      while position.unwritten or position.step < config.schedule.steps:
        clock = progress_lib.Clock()
        if not position.unwritten:
          watch.phase = 'a rollout'
          train_state, found, drawn = rollouts.take(train_state, plan)
          played = [t for group in found for t in group]
          faults.count(position.step + 1, played)
          numbers = {f'rollout/{k}': v for k, v in evaluate.summary(played).items()}
          numbers['rollout/groups'] = len(found)
          numbers['rollout/dead_groups'] = float(np.mean([*map(groups.tied, found)]))
          if position.step == 0 and config.chat.long_prompts == 'refuse':
            groups.check_played(found)
          found = groups.usable(
            found,
            max_error_rate=config.max_error_rate,
            refilled=config.schedule.max_refills > 0,
            mask_truncated=algorithm.mask_truncated,
          )
          baselines = None
          if algorithm.greedy_baseline:
            found, baselines = rollouts.greedy(found)
          numbers['time/rollout'] = clock.lap()
          progress.set_phase('update')
          watch.phase = 'an update'
          chosen = [t for group in found for t in group]
          told = (
            [chat.encode_data(privileged(t.task)) for t in chosen] if privileged else None
          )
          with _dumping(workdir), sharding.use_mesh(mesh):
            train_state, learned, table = updates.learn(
              train_state, chosen, plan, baselines=baselines, prefixes=told
            )
          numbers |= {f'train/{k}': v for k, v in learned.items()}
          numbers['time/update'] = clock.lap()
          position.learned(numbers, drawn)
          _write_rollout(played, chosen, table, workdir, config, position.step)
        # From here on the step is learned, and only its line is missing.
        numbers = position.numbers()
        if position.step == config.schedule.steps or _every(
          config.schedule.eval_every, position.step
        ):
          numbers |= evaluated()
          numbers['time/eval'] = clock.lap()
        run_log.write(numbers | monitor.check(position.step, numbers))
        progress.update(position.step, reward=numbers['rollout/reward'])
        if (
          run_log.checkpoints.should_save(position.step)
          or position.step == config.schedule.steps
        ):
          run_log.save(train_state, plan)
      faults.report_totals()
    except replica.PreemptedError:
      progress.set_phase('saving')
      watch.start_saving(position.step)
      run_log.save(train_state, plan)
      run_log.checkpoints.wait()
      watch.finish_saving(position.step)
      raise preemption.Preempted from None
    # While the workdir is still locked: another run may not write a model there too.
    run_log.checkpoints.wait()
    watch.phase = 'the writing of the model'
    target = pathlib.Path(workdir) / 'model'
    params = lora.merge(train_state.states['policy'].params)
    weights.save(target, model, params, tokenizer_from=config.model.path)
  if processes.is_first():
    summary.write_training_report(workdir, label)
    print(summary.list_files(workdir))
  return params


def _plan(
  config, model, params, algorithm, mesh=None
) -> tuple[updates.Plan, updates.TrainState]:
  """What stays the same, and what goes on from step to step."""
  own_critic = algorithm.needs_critic and 'value_head' not in params
  if config.schedule.critic_warmup and not own_critic:
    raise ValueError('critic_warmup: there is no critic of its own; make it 0.')
  if own_critic and algorithm.value_coef != 1.0:
    raise ValueError('value_coef: the critic is a model of its own; leave it out.')
  if config.model.lora_rank:
    targets = config.model.lora_targets.split(',')
    adapters = (config.model.lora_rank, targets, config.model.lora_alpha)
    params = lora.add(params, *adapters, jax.random.key(config.seed))
    params = sharding.shard_params(params, mesh)
  options = config.optimizer
  optimizers = {'policy': optimizers_lib.make(options, options.learning_rate)}
  if own_critic:
    optimizers['critic'] = optimizers_lib.make(options, options.critic_learning_rate)
  reference_model, reference = model, None
  if config.model.reference:
    place = sharding.make_placer(mesh)
    reference_model, reference = weights.load(
      config.model.reference, dtype='float32', place=place
    )
    reference_model = dataclasses.replace(reference_model, dtype=config.model.dtype)
    if reference_model.vocab_size != model.vocab_size:
      raise ValueError(
        f'model.reference: {config.model.reference} has {reference_model.vocab_size} '
        f'tokens and the policy {model.vocab_size}; they must share a tokenizer.'
      )
  plan = updates.Plan(
    model,
    algorithm,
    packing.MicrobatchShape(
      config.batch.microbatch, config.batch.row_tokens or config.engine.slots
    ),
    optimizers,
    config.schedule,
    reference_model,
    temperature=config.sampling.temperature,
    seed=config.seed,
    offload=config.optimizer.offload,
  )
  return plan, updates.init(params, plan, reference)


@contextlib.contextmanager
def _dumping(workdir):
  """Writes the batch that made a loss or a gradient not finite."""
  try:
    yield
  except learner.NotFiniteError as error:
    path = pathlib.Path(workdir) / 'not_finite.npz'
    arrays: dict[str, Any] = {
      f'{i}/{name}': np.asarray(value)
      for i, batch in enumerate(error.batches)
      for name, value in batch._asdict().items()
      if value is not None
    }
    where = f'The batch is in {path}.'
    try:
      np.savez_compressed(path, **arrays)
    except OSError as failed:
      where = f'Its batch could not be written: {disk.describe_failure(path, failed)}.'
      path.unlink(missing_ok=True)
    raise learner.NotFiniteError(
      f'{error} {where} Lower the learning rate or look at the batch; '
      'the same command goes on from the last checkpoint.',
      error.batches,
    ) from error


def _logged(played, workdir, config, step) -> dict[str, float]:
  """Writes an evaluation's trajectories, and gives its numbers."""
  numbers = {}
  for name, trajectories in played.items():
    summary = evaluate.summary(trajectories)
    numbers |= {f'eval/{name}/{k}': v for k, v in summary.items()}
    _write(name, trajectories, workdir, config, step)
  return numbers


def _write_rollout(played, chosen, table, workdir, config, step):
  """Writes the first of a rollout's trajectories, with what was learned of their tokens.

  Args:
    played: The rollout's trajectories.
    chosen: Those that were learned from; they are the table's.
    table: As updates.learn gave it.
    workdir: The run's.
    config: The run's.
    step: The update that learned from them.
  """
  if not (shown := played[: config.log_episodes]):
    return
  numbers = {id(t): i for i, t in enumerate(chosen)}
  extra = [
    {'actions': table.list_actions(numbers[id(t)])} if id(t) in numbers else {}
    for t in shown
  ]
  _write('rollout', shown, workdir, config, step, extra=extra)


def _write(name, trajectories, workdir, config, step, **more):
  if processes.is_first():
    viewer.write_log(
      pathlib.Path(workdir) / 'trajectories' / f'step-{step:05d}-{name}.eval',
      trajectories,
      task=name,
      model=config.model.path,
      config=dataclasses.asdict(config),
      step=step,
      **more,
    )


def _newest(checkpoints: pathlib.Path) -> int:
  """The last step on disk; unlike Checkpointer.steps, also while one is being written."""
  return max((int(p.name) for p in checkpoints.glob('*') if p.name.isdigit()), default=0)


def _every(n: int, step: int) -> bool:
  return n > 0 and step % n == 0
