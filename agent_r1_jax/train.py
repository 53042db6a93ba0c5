"""Training: rollout, credit, update, log, checkpoint, evaluate; read it from the top."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
from typing import Any

import jax
import numpy as np

from agent_r1_jax import alarms as alarms_lib
from agent_r1_jax import checkpoint, evaluate, host, rollout, types, viewer
from agent_r1_jax import metrics as metrics_lib
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import tokenizer as tokenizer_lib
from agent_r1_jax.engine import driver as driver_lib
from agent_r1_jax.engine import sampling as sampling_lib
from agent_r1_jax.engine import stop as stop_lib
from agent_r1_jax.models import decoder, lora, weights
from agent_r1_jax.rl import algorithms, episodes, learner, updates
from agent_r1_jax.rl import experience as experience_lib
from agent_r1_jax.rl import optimizers as optimizers_lib

# What a plan of updates takes from the configuration as it is.
_PLANNED = (
  'temperature',
  'minibatches',
  'epochs',
  'critic_warmup',
  'reference_every',
  'sync_every',
  'seed',
  'offload',
)


@dataclasses.dataclass
class Config:
  """Everything of a run that is a number or a name; the paper's values where it has them.

  Attributes:
    model: Directory of the policy to start from: weights and tokenizer in HF layout.
    reference: Directory of the reference policy or teacher, of the same tokenizer; empty
      is the policy as it started.
    reference_every: Steps after which the reference becomes the present policy; 0 never.
    dtype: Of activations and cache.
    remat: Activations recomputed in the backward pass: 'none', 'dots' or 'full'.
    lora_rank: Of the adapters that are trained in place of all parameters; 0 is without.
    lora_targets: Projections that get one, with commas between them.
    lora_alpha: Adapters count lora_alpha / lora_rank times.
    seed: Of the order of tasks and of all sampling.
    steps: Rollouts, each followed by its updates.
    tasks: Of one rollout.
    samples: Episodes of a task: the group.
    max_turns: Replies of an episode.
    max_turn_tokens: Tokens of a reply.
    max_tool_tokens: Tokens of a tool's message; what is longer is cut.
    temperature: Of sampling, and of the log-probs that are trained.
    max_refills: Rollouts that a step may add to take the place of groups whose rewards
      are all equal (DAPO's dynamic sampling).
    sync_every: Steps between two hand-overs of the policy to the engine; above 1 the
      algorithm must have a correction.
    max_staleness: Steps by which an episode's policy may be older; bounds sync_every.
    epochs: Over each rollout.
    minibatches: Optimizer steps an epoch.
    learning_rate: Of the policy, after the warm-up.
    critic_learning_rate: Of the critic.
    critic_warmup: Steps in which the critic alone is updated.
    warmup: Optimizer steps of linear warm-up.
    weight_decay: Of the optimizer, decoupled as AdamW's.
    optimizer: Of optimizers.KINDS: 'adamw', 'adamw8' (moments of 8 bits) or 'adafactor'.
    offload: Keep the optimizer's state in the host's memory between updates.
    clip_norm: Of the gradient of policy and critic each, over all leaves.
    rows: Episodes at a time.
    slots: Tokens of a row, at most: prompt, replies and tools together.
    decode_steps: Tokens a decode segment.
    feed_rows: Rows a feed.
    feed_tokens: Tokens of a row a feed.
    bucket: Least slots that a cache read covers; it doubles up to slots.
    width: Most rows that are decoded at a time; 0 is all. With slow tools, half of rows.
    narrow: Whether few rows run in programs for a quarter of rows. Where tools take their
      time, a run repeats to the last bit only without it, and with bucket = slots.
    row_tokens: Tokens of a packed training row; 0 means `slots`.
    microbatch: Packed rows of one gradient.
    eval_every: Rollouts between evaluations; 0 evaluates at the end only.
    checkpoint_every: Rollouts between checkpoints.
    keep: Checkpoints kept.
    max_error_rate: Share of episodes of a rollout whose environment may raise.
    alarms: Numbers beyond which an alarm is logged.
  """

  model: str = ''
  reference: str = ''
  reference_every: int = 0
  dtype: str = 'float32'
  remat: str = 'none'
  lora_rank: int = 0
  lora_targets: str = 'q,k,v,o,gate,up,down'
  lora_alpha: float = 16.0
  seed: int = 0
  steps: int = 100
  tasks: int = 16
  samples: int = 8
  max_turns: int = 5
  max_turn_tokens: int = 1024
  max_tool_tokens: int = 1024
  temperature: float = 1.0
  max_refills: int = 0
  sync_every: int = 1
  max_staleness: int = 1_000_000
  epochs: int = 1
  minibatches: int = 1
  learning_rate: float = 1e-6
  critic_learning_rate: float = 1e-5
  critic_warmup: int = 0
  warmup: int = 0
  weight_decay: float = 0.0
  optimizer: str = 'adamw'
  offload: bool = False
  clip_norm: float = 1.0
  rows: int = 64
  slots: int = 8192
  decode_steps: int = 32
  feed_rows: int = 16
  feed_tokens: int = 128
  bucket: int = 1024
  width: int = 0
  narrow: bool = True
  row_tokens: int = 0
  microbatch: int = 4
  eval_every: int = 0
  checkpoint_every: int = 20
  keep: int = 3
  max_error_rate: float = 0.1
  alarms: alarms_lib.Limits = dataclasses.field(default_factory=alarms_lib.Limits)


def load(config: Config) -> tuple[decoder.DecoderConfig, decoder.Params, chat_lib.Chat]:
  """The policy's shape, parameters and chat, from config.model."""
  host.prepare()
  model, params = weights.load(config.model, dtype='float32')
  model = dataclasses.replace(model, dtype=config.dtype, remat=config.remat)
  tokenizer = tokenizer_lib.load(config.model)
  return model, params, chat_lib.Chat(tokenizer, max_tool_tokens=config.max_tool_tokens)


def make_driver(
  config: Config,
  model: decoder.DecoderConfig,
  params: decoder.Params,
  chat: chat_lib.Chat,
) -> driver_lib.Driver:
  """The engine, with the run's sizes."""
  sampling = sampling_lib.Sampling(config.temperature)
  if not sampling.on_policy:
    raise ValueError(
      f'temperature is {config.temperature}: a policy is trained on samples of its own '
      'distribution, so it must be above 0.'
    )
  return driver_lib.Driver(
    model,
    params,
    stop=stop_lib.stop(chat.stop_ids),
    sampling=sampling,
    rows=config.rows,
    slots=config.slots,
    steps=config.decode_steps,
    feed_rows=config.feed_rows,
    feed_tokens=config.feed_tokens,
    bucket=config.bucket,
    width=config.width or None,
    narrow=config.narrow,
  )


def epoch_tasks(
  tasks: Sequence[types.Task], start: int, n: int, seed: int
) -> list[types.Task]:
  """The n tasks after the first `start`: every epoch is a seeded order of all tasks."""

  @functools.cache
  def order(epoch):
    return np.random.default_rng([seed, epoch]).permutation(len(tasks)).tolist()

  places = (divmod(i, len(tasks)) for i in range(start, start + n))
  return [tasks[order(epoch)[place]] for epoch, place in places]


def play(
  config: Config,
  model: str | os.PathLike,
  rows: Mapping[str, tuple[Mapping[str, Sequence[types.Task]], rollout.MakeEnv]],
) -> dict[str, dict[str, list[types.Trajectory]]]:
  """evaluate.play with the policy of a directory; its memory is free again afterwards."""
  shape, params, chat = load(dataclasses.replace(config, model=str(model)))
  driver = make_driver(config, shape, params, chat)
  limits = rollout.Limits(config.max_turns, config.max_turn_tokens)
  return evaluate.play(driver, chat, rows, limits=limits)


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

  Writes to workdir: config.json, metrics.jsonl and TensorBoard events, checkpoints/,
  trajectories/step-*.eval of the evaluations, and model/ in HF layout at the end.

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
    ValueError: The configuration does not fit the workdir, the model, the tasks or the
      algorithm.
    RuntimeError: Too many environments raised; the first error is told.
    learner.NotFiniteError: A loss or a gradient; the batch is in workdir/not_finite.npz.
  """
  _check(config, tasks, algorithm)
  model, params, chat = load(config)
  driver = make_driver(config, model, params, chat)
  plan, carry = _plan(config, model, params, algorithm)
  if privileged and 'critic' not in carry.states:
    raise ValueError('privileged: the algorithm has no critic of its own to tell it to.')
  playing: dict[str, Any] = {'make_env': make_env}
  playing['limits'] = rollout.Limits(config.max_turns, config.max_turn_tokens)
  with contextlib.ExitStack() as stack:
    checkpoints = stack.enter_context(
      checkpoint.Checkpointer(workdir, every=config.checkpoint_every, keep=config.keep)
    )
    # Only now: what has failed so far leaves no mark in the workdir, and can be mended.
    checkpoint.check_config(workdir, dataclasses.asdict(config), may_change=('steps',))
    start, drawn = 0, 0
    if restored := checkpoints.restore(like=carry.arrays(plan)):
      start, arrays, host = restored
      drawn, carry = host['drawn'], carry.restored(arrays, host['carry'])
    writer = stack.enter_context(
      metrics_lib.Writer(workdir, resume_step=start + 1 if restored else 0)
    )
    progress = stack.enter_context(
      metrics_lib.Progress(config.steps, label=label, start=start)
    )

    def evaluated(step: int) -> dict[str, float]:
      driver.params = lora.merge(carry.states['policy'].params)
      ended = _counter(progress, 'evaluation', sum(map(len, (evals or {}).values())))
      played = evaluate.run(driver, chat, evals or {}, on_done=ended, **playing)
      return _logged(played, workdir, config, step)

    driver.warm_up(functools.partial(progress.phase, 'compile'))
    if start == 0 and config.eval_every:
      writer.write(0, evaluated(0))
    for step in range(start, config.steps):
      clock = metrics_lib.Clock()
      driver.params = lora.merge(carry.sampler)
      counter = functools.partial(_counter, progress)
      collect = functools.partial(
        rollout.collect, driver, chat, policy_step=carry.sampler_step, **playing
      )
      groups, drawn = _groups(config, tasks, collect, step, drawn, counter)
      played = [t for group in groups for t in group]
      numbers = {f'rollout/{k}': v for k, v in evaluate.summary(played).items()}
      numbers['rollout/groups'] = len(groups)
      groups = _usable(config, algorithm, groups)
      if algorithm.greedy_baseline:
        groups, baselines = _with_greedy(groups, driver, chat, playing)
      else:
        baselines = None
      numbers['time/rollout'] = clock.lap()
      progress.phase('update')
      chosen = [t for group in groups for t in group]
      prefixes = [chat.reply(privileged(t.task)) for t in chosen] if privileged else None
      with _dumping(workdir):
        carry, learned = updates.learn(
          carry, chosen, plan, baselines=baselines, prefixes=prefixes
        )
      numbers |= {f'train/{k}': v for k, v in learned.items()}
      numbers['time/update'] = clock.lap()
      done = step + 1
      if done == config.steps or _every(config.eval_every, done):
        numbers |= evaluated(done)
        numbers['time/eval'] = clock.lap()
      alarms = alarms_lib.ring(numbers, config.alarms)
      writer.write(done, numbers | alarms)
      progress.update(done, reward=numbers['rollout/reward'])
      if checkpoints.due(done) or done == config.steps:
        host = {'drawn': drawn, 'carry': carry.numbers()}
        checkpoints.save(done, carry.arrays(plan), host)
  target = pathlib.Path(workdir) / 'model'
  params = lora.merge(carry.states['policy'].params)
  weights.save(target, model, params, tokenizer_from=config.model)
  return params


def _check(config, tasks, algorithm) -> None:
  """Refuses what would fail only after a rollout, or would do nothing."""
  if len(tasks) == 0:
    raise ValueError('tasks is empty: give at least one task to train on.')
  for name in ('tasks', 'samples', 'epochs', 'minibatches', 'microbatch', 'sync_every'):
    if getattr(config, name) < 1:
      raise ValueError(f'{name} is {getattr(config, name)}; it must be at least 1.')
  if 0 < config.row_tokens < config.slots:
    raise ValueError(
      f'row_tokens is {config.row_tokens}, less than slots ({config.slots}): a long text '
      'would not fit a training row. Raise it, or leave it 0.'
    )
  for name in ('reference', 'reference_every'):
    if getattr(config, name) and not algorithm.needs_reference:
      raise ValueError(f'{name}: the algorithm reads no reference policy; leave it out.')
  if algorithm.reads_reference and not config.reference:
    raise ValueError(
      'reference: the algorithm learns from a teacher; give its directory.'
    )
  if config.reference_every and algorithm.reads_reference:
    raise ValueError('reference_every: a teacher stays as it is; make it 0.')
  if config.reference_every and config.reference and config.lora_rank:
    raise ValueError('reference_every: with adapters it needs reference to be empty.')
  if config.sync_every > 1 and not algorithm.correction:
    raise ValueError(
      f'sync_every is {config.sync_every}: episodes are of an older policy, and the '
      'algorithm has no correction for that (rl/correction.py).'
    )
  if config.max_staleness < config.sync_every - 1:
    raise ValueError(
      f'max_staleness is {config.max_staleness}, but with sync_every={config.sync_every} '
      f'policies get {config.sync_every - 1} steps old.'
    )


def _plan(config, model, params, algorithm) -> tuple[updates.Plan, updates.Carry]:
  """What stays the same, and what goes on from step to step."""
  own_critic = algorithm.needs_critic and 'value_head' not in params
  if config.critic_warmup and not own_critic:
    raise ValueError('critic_warmup: there is no critic of its own; make it 0.')
  if config.lora_rank:
    targets = config.lora_targets.split(',')
    adapters = (config.lora_rank, targets, config.lora_alpha)
    params = lora.add(params, *adapters, jax.random.key(config.seed))
  fields = ('warmup', 'clip_norm', 'weight_decay')
  common = {name: getattr(config, name) for name in fields}
  make = functools.partial(optimizers_lib.make, config.optimizer, **common)
  optimizers = {'policy': make(config.learning_rate)}
  if own_critic:
    optimizers['critic'] = make(config.critic_learning_rate)
  reference_model, reference = model, None
  if config.reference:
    reference_model, reference = weights.load(config.reference, dtype='float32')
    reference_model = dataclasses.replace(reference_model, dtype=config.dtype)
    if reference_model.vocab_size != model.vocab_size:
      raise ValueError(
        f'reference: {config.reference} has {reference_model.vocab_size} tokens and the '
        f'policy {model.vocab_size}; they must share a tokenizer.'
      )
  plan = updates.Plan(
    model,
    algorithm,
    experience_lib.Rows(config.microbatch, config.row_tokens or config.slots),
    optimizers,
    reference_model,
    **{name: getattr(config, name) for name in _PLANNED},
  )
  return plan, updates.start(params, plan, reference)


def _groups(config, tasks, collect, step, drawn, counter):
  """A step's groups, and how many tasks were drawn; tied groups are drawn anew."""
  groups: list[list[types.Trajectory]] = []
  live = 0
  for refill in range(config.max_refills + 1):
    missing = config.tasks - live
    if not missing:
      break
    played = collect(
      tasks=epoch_tasks(tasks, drawn, missing, config.seed),
      samples=config.samples,
      seed=config.seed,
      draw=step * (config.max_refills + 1) + refill,
      on_done=counter('refill' if refill else 'rollout', missing * config.samples),
    )
    drawn += missing
    new = [played[i : i + config.samples] for i in range(0, len(played), config.samples)]
    for number, group in enumerate(new, start=len(groups)):
      for trajectory in group:
        trajectory.group = number
    groups += new
    live += sum(not _tied(group) for group in new)
  return groups, drawn


def _usable(config, algorithm, groups) -> list[list[types.Trajectory]]:
  """What can be learned from; RuntimeError if too many environments raised."""
  played = [t for group in groups for t in group]
  errors = [t.error for t in played if t.status == 'error']
  if len(errors) > config.max_error_rate * len(played):
    raise RuntimeError(
      f'{len(errors)} of {len(played)} episodes raised, more than max_error_rate='
      f'{config.max_error_rate}. The first: {errors[0]}'
    )
  if config.max_refills:
    groups = [group for group in groups if not _tied(group)]
  masked = ('error', *(types.BUDGETS if algorithm.mask_truncated else ()))

  # A prompt that did not fit its row left no turn.
  kept = [[t for t in group if t.status not in masked and t.turns] for group in groups]
  return [group for group in kept if group]


def _tied(group) -> bool:
  """Whether a group's rewards are all equal; an error has none."""
  rewards = [t.reward for t in group if t.status != 'error']
  return not rewards or episodes.tied(np.array(rewards))


def _with_greedy(groups, driver, chat, playing):
  """Of each trajectory, the reward of a greedy episode of its task (ReMax)."""
  tasks = [group[0].task for group in groups]
  greedy = evaluate.run(driver, chat, {'': tasks}, **playing)['']
  pairs = [(g, t) for g, t in zip(groups, greedy, strict=True) if t.status != 'error']
  return [g for g, _ in pairs], [t.reward for g, t in pairs for _ in g]


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
    np.savez_compressed(path, **arrays)
    raise learner.NotFiniteError(
      f'{error} The batch is in {path}. Lower the learning rate or look at the batch; '
      'the same command goes on from the last checkpoint.',
      error.batches,
    ) from error


def _logged(played, workdir, config, step) -> dict[str, float]:
  """Writes an evaluation's trajectories, and gives its numbers."""
  numbers = {}
  for name, trajectories in played.items():
    summary = evaluate.summary(trajectories)
    numbers |= {f'eval/{name}/{k}': v for k, v in summary.items()}
    path = pathlib.Path(workdir) / 'trajectories' / f'step-{step:05d}-{name}.eval'
    viewer.write(
      path,
      trajectories,
      task=name,
      model=config.model,
      config=dataclasses.asdict(config),
      step=step,
    )
  return numbers


def _counter(progress, phase: str, total: int) -> Callable[[types.Trajectory], None]:
  """Shows how many episodes of a phase have ended."""
  ended = itertools.count(1)
  return lambda trajectory: progress.phase(phase, next(ended), total)


def _every(n: int, step: int) -> bool:
  return n > 0 and step % n == 0
