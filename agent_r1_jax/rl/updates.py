"""Updates the models on a rollout: advantages, epochs of mini-batches, KL control.

update_config = train_state.UpdateConfig(model, algorithm, shape, optimizers, ...)
state = train_state.init(params, update_config)
state, metrics, table = updates.learn(state, trajectories, update_config)
"""

from collections.abc import Iterator, Sequence
import dataclasses

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.host import memory
from agent_r1_jax.models import costs
from agent_r1_jax.rl import credit, learner, minibatch, scoring
from agent_r1_jax.rl import table as table_lib
from agent_r1_jax.rl import train_state as train_state_lib
from agent_r1_jax.rl.train_state import TrainState, UpdateConfig


def learn(
  train_state: TrainState,
  trajectories: Sequence[types.Trajectory],
  update_config: UpdateConfig,
  *,
  baselines: Sequence[float] | None = None,
  prefixes: Sequence[np.ndarray] | None = None,
) -> tuple[TrainState, dict[str, float], table_lib.TokenTable]:
  """Trains on one rollout.

  Args:
    train_state: The state after the last rollout. The arrays of its policy and critic
      are donated: they cannot be read after the call.
    trajectories: The trajectories; each has a turn and a status other than FAILED.
    update_config: The run's constants.
    baselines: The reward of the greedy episode of each trajectory's task.
    prefixes: For each trajectory, tokens before its segments that only the critic sees.

  Returns:
    The new train_state; metrics, with the prefix 'critic_' for the critic's updates; and
    the table of the trajectories, in order.

  Raises:
    learner.NotFiniteError: A loss or a gradient is not finite. Some of train_state's
      arrays may have been donated.
  """
  algorithm, kl = update_config.algorithm, update_config.algorithm.kl
  states, reference = train_state.states, train_state.reference
  kl_coef = train_state.kl_coef
  metrics: dict[str, float] = {'kl_coef': kl_coef} if kl else {}
  table = table_lib.build(trajectories, baselines)
  if trajectories:
    if update_config.keeps_old_sampler:
      age = train_state.step - table.policy_steps[table.action_mask]
      metrics |= {'stale_steps': float(age.mean()), 'stale_steps_max': float(age.max())}
    table = scoring.score(
      table,
      algorithm,
      _models(train_state, update_config),
      shape=update_config.shape,
      temperature=update_config.temperature,
      prefixes=prefixes,
    )
    memory.release_freed_memory()
    table, estimated = credit.estimate(table, algorithm, kl_coef=kl_coef)
    states, updated = _run_epochs(train_state, table, update_config, prefixes)
    metrics |= estimated | updated
  if kl and 'kl' in metrics:
    kl_coef = kl.control(kl_coef, metrics['kl'], len(trajectories))
  step = train_state.step + 1
  if (
    update_config.schedule.reference_every
    and step % update_config.schedule.reference_every == 0
  ):
    reference = train_state_lib.copy_learned(states['policy'].params)
  train_state = dataclasses.replace(
    train_state, states=states, reference=reference, kl_coef=kl_coef, step=step
  )
  if not update_config.syncs_before_update:
    train_state = sync_sampler(train_state, update_config)
  return train_state, metrics, table


def sync_sampler(train_state: TrainState, update_config: UpdateConfig) -> TrainState:
  """Makes the current policy the sampler, every `sync_every` rollouts.

  `learn` calls it, unless update_config.syncs_before_update; the schedule then syncs the
  sampler to the engine.
  """
  step = train_state.step
  if step % update_config.schedule.sync_every or train_state.sampler_step == step:
    return train_state
  sampler = train_state_lib.sampler_params(
    train_state.states['policy'].params, update_config
  )
  return dataclasses.replace(train_state, sampler=sampler, sampler_step=step)


def _models(train_state: TrainState, update_config: UpdateConfig) -> scoring.Models:
  states, reference_model = (
    train_state.states,
    update_config.reference_model or update_config.model,
  )
  policy, critic = states['policy'].params, states.get('critic', states['policy']).params
  return scoring.Models(
    policy, update_config.model, critic, train_state.reference, reference_model
  )


def _run_epochs(
  train_state: TrainState,
  table: table_lib.TokenTable,
  update_config: UpdateConfig,
  prefixes,
) -> tuple[dict[str, learner.ModelState], dict[str, float]]:
  """Makes the optimizer steps of all epochs; returns the new states and mean metrics.

  'operations' is a total, over all gradients (models/costs.py), not a mean.
  """
  states, metrics = dict(train_state.states), dict[str, list[float]]()
  operations = 0.0

  def update(name, batches, packed):
    nonlocal operations
    params, has_logits = states[name].params, name == 'policy'
    operations += sum(
      costs.count_gradient(params, update_config.model, batch, has_logits=has_logits)
      for batch in batches
    )
    gradients = learner.forward_backward(
      params,
      batches,
      config=update_config.model,
      loss=update_config.objectives[name],
      temperature=update_config.temperature,
    )
    try:
      states[name], numbers = learner.optim_step(
        states[name], gradients, optimizer=update_config.optimizers[name]
      )
    except learner.NotFiniteError as error:
      where = f'In the update of the {name}, {error}'
      raise learner.NotFiniteError(where, batches) from None
    for key, value in (numbers | packed).items():
      key = f'critic_{key}' if name == 'critic' and key != 'value_loss' else key
      metrics.setdefault(key, []).append(value)

  options = {'algorithm': update_config.algorithm, 'shape': update_config.shape}
  for members in _split_epochs(len(table.group), update_config, train_state.step):
    if 'critic' in states:
      made = minibatch.make_critic(table, members, prefixes=prefixes, **options)
      update('critic', *made)
    if train_state.step >= update_config.schedule.critic_warmup:
      made = minibatch.make_policy(
        table,
        members,
        kl_coef=train_state.kl_coef,
        shared_critic=update_config.shared_critic,
        **options,
      )
      update('policy', *made)
  means = {name: float(np.mean(values)) for name, values in metrics.items()}
  return states, means | {'operations': operations}


def _split_epochs(n: int, update_config: UpdateConfig, step: int) -> Iterator[list[int]]:
  """Yields the trajectory numbers of each mini-batch; each epoch has its own order."""
  for epoch in range(update_config.schedule.epochs):
    order = np.random.default_rng([update_config.seed, step, epoch]).permutation(n)
    for members in np.array_split(order, min(update_config.schedule.minibatches, n)):
      yield members.tolist()
