"""Training: rollout, credit, update, log, checkpoint, evaluate; read it from the top."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import itertools
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agent_r1_jax import checkpoint, evaluate, rollout, types, viewer
from agent_r1_jax import metrics as metrics_lib
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import tokenizer as tokenizer_lib
from agent_r1_jax.engine import driver as driver_lib
from agent_r1_jax.engine import sampling as sampling_lib
from agent_r1_jax.engine import stop as stop_lib
from agent_r1_jax.models import decoder, weights
from agent_r1_jax.rl import algorithms, learner
from agent_r1_jax.rl import experience as experience_lib


@dataclasses.dataclass
class Config:
  """Everything of a run that is a number or a name; the paper's values where it has them.

  Attributes:
    model: Directory of the policy to start from: weights and tokenizer in HF layout.
    dtype: Of activations and cache.
    remat: Recompute activations in the backward pass.
    seed: Of the order of tasks and of all sampling.
    steps: Rollouts, each followed by its updates.
    tasks: Of one rollout.
    samples: Episodes of a task: the group.
    max_turns: Replies of an episode.
    max_turn_tokens: Tokens of a reply.
    max_tool_tokens: Tokens of a tool's message; what is longer is cut.
    temperature: Of sampling, and of the log-probs that are trained.
    minibatches: Optimizer steps a rollout.
    learning_rate: Of the policy, after the warm-up.
    critic_learning_rate: Of the critic.
    warmup: Optimizer steps of linear warm-up.
    weight_decay: Of AdamW.
    clip_norm: Of the gradient, over all leaves.
    rows: Episodes at a time.
    slots: Tokens of a row, at most: prompt, replies and tools together.
    decode_steps: Tokens a decode segment.
    feed_rows: Rows a feed.
    feed_tokens: Tokens of a row a feed.
    bucket: Granularity of cache reads, in slots.
    row_tokens: Tokens of a packed training row; 0 means `slots`.
    microbatch: Packed rows of one gradient.
    eval_every: Rollouts between evaluations; 0 evaluates at the end only.
    checkpoint_every: Rollouts between checkpoints.
    keep: Checkpoints kept.
    max_error_rate: Share of episodes of a rollout whose environment may raise.
  """

  model: str = ''
  dtype: str = 'float32'
  remat: bool = False
  seed: int = 0
  steps: int = 100
  tasks: int = 16
  samples: int = 8
  max_turns: int = 5
  max_turn_tokens: int = 1024
  max_tool_tokens: int = 1024
  temperature: float = 1.0
  minibatches: int = 1
  learning_rate: float = 1e-6
  critic_learning_rate: float = 1e-5
  warmup: int = 0
  weight_decay: float = 0.0
  clip_norm: float = 1.0
  rows: int = 64
  slots: int = 8192
  decode_steps: int = 32
  feed_rows: int = 16
  feed_tokens: int = 128
  bucket: int = 1024
  row_tokens: int = 0
  microbatch: int = 4
  eval_every: int = 0
  checkpoint_every: int = 20
  keep: int = 3
  max_error_rate: float = 0.1


def load(config: Config) -> tuple[decoder.DecoderConfig, decoder.Params, chat_lib.Chat]:
  """The policy's shape, parameters and chat, from config.model."""
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
  )


def make_optimizer(config: Config) -> optax.GradientTransformation:
  """AdamW for the policy and, at its own rate, for the critic."""

  def adamw(rate):
    schedule = optax.linear_schedule(rate / (config.warmup + 1), rate, config.warmup)
    return optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay)

  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    optax.partition(
      {
        'policy': adamw(config.learning_rate),
        'critic': adamw(config.critic_learning_rate),
      },
      lambda params: {name: name for name in params},
    ),
  )


def epoch_tasks(tasks: Sequence[types.Task], n: int, step: int, seed: int):
  """The n tasks of a step: every epoch is a seeded order of all tasks."""

  @functools.cache
  def order(epoch):
    return np.random.default_rng([seed, epoch]).permutation(len(tasks)).tolist()

  places = (divmod(i, len(tasks)) for i in range(step * n, (step + 1) * n))
  return [tasks[order(epoch)[place]] for epoch, place in places]


def run(
  config: Config,
  workdir: str,
  *,
  tasks: Sequence[types.Task],
  make_env: rollout.MakeEnv,
  algorithm: algorithms.Algorithm,
  evals: Mapping[str, Sequence[types.Task]] | None = None,
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
    algorithm: Advantages and loss.
    evals: Sets to evaluate greedily, by name.
    label: What the progress bar calls the run.

  Returns:
    The policy's parameters.

  Raises:
    ValueError: The configuration does not fit the workdir, the model or the tasks.
    RuntimeError: Too many environments raised; the first error is told.
    FloatingPointError: A gradient is not finite.
  """
  _check(config, tasks)
  model, params, chat = load(config)
  driver = make_driver(config, model, params, chat)
  ref_params = jax.tree.map(jnp.copy, params) if algorithm.needs_reference else None
  optimizer = make_optimizer(config)
  state = learner.init(_trained(model, params, algorithm), optimizer)
  limits = rollout.Limits(config.max_turns, config.max_turn_tokens)
  with contextlib.ExitStack() as stack:
    checkpoints = stack.enter_context(
      checkpoint.Checkpointer(workdir, every=config.checkpoint_every, keep=config.keep)
    )
    # Only now: what has failed so far leaves no mark in the workdir, and can be mended.
    checkpoint.check_config(workdir, dataclasses.asdict(config), may_change=('steps',))
    restored = checkpoints.restore(like=state)
    start, state, _ = restored or (0, state, {})
    driver.params = state.params['policy']
    writer = stack.enter_context(
      metrics_lib.Writer(workdir, resume_step=start + 1 if restored else 0)
    )
    progress = stack.enter_context(
      metrics_lib.Progress(config.steps, label=label, start=start)
    )

    def evaluated(step: int) -> dict[str, float]:
      ended = _counter(progress, 'evaluation', sum(map(len, (evals or {}).values())))
      played = evaluate.run(
        driver, chat, evals or {}, make_env, limits=limits, on_done=ended
      )
      return _logged(played, workdir, config, step)

    if start == 0 and config.eval_every:
      writer.write(0, evaluated(0))
    for step in range(start, config.steps):
      clock = _Clock()
      played = rollout.collect(
        driver,
        chat,
        epoch_tasks(tasks, config.tasks, step, config.seed),
        make_env,
        limits=limits,
        samples=config.samples,
        seed=config.seed,
        policy_step=step,
        on_done=_counter(progress, 'rollout', config.tasks * config.samples),
      )
      numbers = {f'rollout/{k}': v for k, v in evaluate.summary(played).items()}
      numbers['time/rollout'] = clock.lap()
      progress.phase('update')
      state, learned = _learn(
        config, model, algorithm, optimizer, state, ref_params, played
      )
      driver.params = state.params['policy']
      numbers |= {f'train/{k}': v for k, v in learned.items()}
      numbers['time/update'] = clock.lap()
      done = step + 1
      if done == config.steps or _every(config.eval_every, done):
        numbers |= evaluated(done)
        numbers['time/eval'] = clock.lap()
      writer.write(done, numbers)
      progress.update(done, reward=numbers['rollout/reward'])
      if checkpoints.due(done) or done == config.steps:
        checkpoints.save(done, state, {})
  target = pathlib.Path(workdir) / 'model'
  weights.save(target, model, state.params['policy'], tokenizer_from=config.model)
  return state.params['policy']


def _check(config: Config, tasks: Sequence[types.Task]):
  """Refuses what would fail only after a rollout."""
  if len(tasks) == 0:
    raise ValueError('tasks is empty: give at least one task to train on.')
  for name in ('tasks', 'samples', 'minibatches', 'microbatch'):
    if getattr(config, name) < 1:
      raise ValueError(f'{name} is {getattr(config, name)}; it must be at least 1.')
  if 0 < config.row_tokens < config.slots:
    raise ValueError(
      f'row_tokens is {config.row_tokens}, less than slots ({config.slots}): a long text '
      'would not fit a training row. Raise it, or leave it 0.'
    )


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


def _trained(model, params, algorithm) -> dict[str, decoder.Params]:
  """The policy, and a critic that starts as a copy of it with a value head of zeros."""
  if not algorithm.needs_critic or 'value_head' in params:
    return {'policy': params}
  head = decoder.init(model, jax.random.key(0), value_head=True)['value_head']
  critic = jax.tree.map(jnp.copy, params) | {'value_head': head}
  return {'policy': params, 'critic': critic}


def _learn(config, model, algorithm, optimizer, state, ref_params, played):
  """The updates of one rollout: none if no episode has a token to train on."""
  errors = [t.error for t in played if t.status == 'error']
  if len(errors) > config.max_error_rate * len(played):
    raise RuntimeError(
      f'{len(errors)} of {len(played)} episodes raised, more than max_error_rate='
      f'{config.max_error_rate}. The first: {errors[0]}'
    )
  # A prompt that did not fit its row left no turn.
  trajectories = [t for t in played if t.status != 'error' and t.turns]
  if not trajectories:
    return state, {}
  packing = {'row_tokens': config.row_tokens or config.slots, 'rows': config.microbatch}
  experience = experience_lib.credit(
    trajectories,
    algorithm,
    params=state.params,
    ref_params=ref_params,
    config=model,
    temperature=config.temperature,
    **packing,
  )
  order = np.random.default_rng([config.seed, int(state.step)]).permutation(
    len(trajectories)
  )
  parts = []
  for members in np.array_split(order, min(config.minibatches, len(order))):
    batches = experience_lib.minibatch(experience, members.tolist(), algorithm, **packing)
    state, numbers = learner.update(
      state,
      batches,
      config=model,
      loss=algorithm.loss,
      optimizer=optimizer,
      temperature=config.temperature,
    )
    parts.append(numbers)
  numbers = {name: float(np.mean([p[name] for p in parts])) for name in parts[0]}
  return state, numbers | experience_lib.summary(experience)


def _every(n: int, step: int) -> bool:
  return n > 0 and step % n == 0


class _Clock:
  """Seconds since the last lap."""

  def __init__(self):
    self._last = time.perf_counter()

  def lap(self) -> float:
    now = time.perf_counter()
    seconds, self._last = now - self._last, now
    return seconds
