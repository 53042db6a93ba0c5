"""Updates the models from a rollout: advantages, epochs of mini-batches, KL control.

plan = updates.Plan(model, algorithm, shape, optimizers, schedule, ...)
train_state = updates.init(params, plan)
train_state, metrics, table = updates.learn(train_state, trajectories, plan)
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.host import runtime
from agent_r1_jax.models import decoder, lora, sharding
from agent_r1_jax.rl import algorithms, credit, learner, packing
from agent_r1_jax.rl import table as table_lib


@dataclasses.dataclass(frozen=True)
class Plan:
  """What an update needs and no step changes."""

  model: decoder.DecoderConfig  # The shape of policy and critic.
  algorithm: algorithms.Algorithm
  shape: packing.MicrobatchShape  # The shape of micro-batches.
  # By model: 'policy' and, if the critic is a model of its own, 'critic'.
  optimizers: dict[str, optax.GradientTransformation]
  # The number of epochs and mini-batches, and when the engine gets a new policy.
  schedule: config_lib.Schedule = dataclasses.field(default_factory=config_lib.Schedule)
  # The shape of the reference policy, if it differs from `model`.
  reference_model: decoder.DecoderConfig | None = None
  temperature: float = 1.0  # The temperature at which tokens are sampled.
  seed: int = 0  # The seed of the order of trajectories.
  # Whether optimizer states are in the host's memory between updates.
  offload: bool = False

  @property
  def shared_critic(self) -> bool:
    """Whether the critic is a second head of the policy."""
    return self.algorithm.needs_critic and 'critic' not in self.optimizers

  @property
  def keeps_old_sampler(self) -> bool:
    """Whether the engine still samples from the old policy after an update."""
    return self.schedule.sync_every > 1 or self.schedule.ahead > 0

  @property
  def syncs_before_update(self) -> bool:
    """Whether the engine gets the policy before the update that runs beside a rollout."""
    return self.schedule.ahead > 0 and not self.schedule.partial

  @functools.cached_property
  def objectives(self) -> dict[str, learner.Loss]:
    """The losses of policy and critic, made once so that each is compiled once."""
    policy = learner.objective(self.algorithm, shared_critic=self.shared_critic)
    if 'critic' not in self.optimizers:
      return {'policy': policy}
    return {'policy': policy, 'critic': learner.critic_objective(self.algorithm)}


@dataclasses.dataclass(frozen=True)
class TrainState:
  """The state that learning passes from rollout to rollout; `learn` returns a new one."""

  # By model: 'policy' and, if the critic is a model of its own, 'critic'.
  states: dict[str, learner.ModelState]
  reference: decoder.Params | None  # The reference policy's parameters, if there is one.
  # The parameters that the engine samples from, before adapters are merged.
  sampler: decoder.Params
  sampler_step: int = 0  # The number of rollouts that `sampler` has learned from.
  kl_coef: float = 0.0  # The present coefficient of the algorithm's KL term.
  step: int = 0  # The number of rollouts learned from.

  def checkpoint_arrays(self, plan: Plan) -> dict[str, Any]:
    """Returns the arrays of a checkpoint: what cannot be loaded or derived at a restart.

    These are the learned parameters and the optimizer states; the reference, if it
    changes; and the sampler, if it may be an older policy than the one in `states`.
    """
    learned = lambda params: lora.split(params)[0]
    arrays: dict[str, Any] = {
      name: state._replace(params=learned(state.params))
      for name, state in self.states.items()
    }
    if plan.schedule.reference_every:
      arrays['reference'] = learned(self.reference)
    if plan.schedule.sync_every > 1 or plan.syncs_before_update:
      arrays['sampler'] = learned(self.sampler)
    return arrays

  def checkpoint_numbers(self) -> dict[str, Any]:
    """Returns the Python numbers of a checkpoint."""
    return {name: getattr(self, name) for name in ('sampler_step', 'kl_coef', 'step')}

  def restore(self, arrays: dict[str, Any], numbers: dict[str, Any]) -> 'TrainState':
    """Returns the state saved in a checkpoint, with the frozen parameters of this one."""
    states = {}
    for name, state in self.states.items():
      params = _with_frozen_of(arrays[name].params, state.params)
      states[name] = arrays[name]._replace(params=params)
    reference, sampler = self.reference, states['policy'].params
    if 'reference' in arrays:
      reference = _with_frozen_of(arrays['reference'], reference)
    if 'sampler' in arrays:
      sampler = _with_frozen_of(arrays['sampler'], sampler)
    elif self.sampler is not self.states['policy'].params:
      sampler = _copy_learned(sampler)  # See _sampler_params.
    return TrainState(states, reference, sampler, **numbers)


def init(
  params: decoder.Params, plan: Plan, reference: decoder.Params | None = None
) -> TrainState:
  """Makes the state before the first rollout.

  A critic of its own starts as a copy of the policy with a value head of zeros. Policy,
  critic and reference share frozen parameters; with LoRA only the adapters are copied.
  """
  if reference is None and plan.algorithm.needs_reference:
    reference = _copy_learned(params)
  models = {'policy': params}
  if 'critic' in plan.optimizers:
    models['critic'] = decoder.add_value_head(_copy_learned(params))
  states = {name: learner.init(p, plan.optimizers[name]) for name, p in models.items()}
  if plan.offload:
    for name, state in states.items():
      states[name] = state._replace(opt_state=sharding.to_host(state.opt_state))
  coef = plan.algorithm.kl.coef if plan.algorithm.kl else 0.0
  return TrainState(states, reference, _sampler_params(params, plan), kl_coef=coef)


def learn(
  train_state: TrainState,
  trajectories: Sequence[types.Trajectory],
  plan: Plan,
  *,
  baselines: Sequence[float] | None = None,
  prefixes: Sequence[np.ndarray] | None = None,
) -> tuple[TrainState, dict[str, float], table_lib.TokenTable]:
  """Learns from one rollout.

  Args:
    train_state: The state after the last rollout. The arrays of its policy and critic
      are donated: they cannot be read after the call.
    trajectories: The trajectories. None has the status 'error', and each has a turn.
    plan: The run's constants.
    baselines: The reward of the greedy episode of each trajectory's task.
    prefixes: For each trajectory, tokens before its text that only the critic sees.

  Returns:
    The new train_state; metrics, those of the critic's updates with the prefix
    'critic_'; and the table of the trajectories, in their order.

  Raises:
    learner.NotFiniteError: A loss or a gradient is not finite. Some of train_state's
      arrays may have been donated.
  """
  algorithm, kl = plan.algorithm, plan.algorithm.kl
  states, reference = train_state.states, train_state.reference
  kl_coef = train_state.kl_coef
  metrics: dict[str, float] = {'kl_coef': kl_coef} if kl else {}
  table = table_lib.build(trajectories, baselines)
  if trajectories:
    if plan.keeps_old_sampler:
      age = train_state.step - table.policy_steps[table.action_mask]
      metrics |= {'stale_steps': float(age.mean()), 'stale_steps_max': float(age.max())}
    table = credit.score(
      table,
      algorithm,
      _models(train_state, plan),
      shape=plan.shape,
      temperature=plan.temperature,
      prefixes=prefixes,
    )
    runtime.release_freed_memory()
    table, estimated = credit.estimate(table, algorithm, kl_coef=kl_coef)
    states, updated = _run_epochs(train_state, table, plan, prefixes)
    metrics |= estimated | updated
  if kl and 'kl' in metrics:
    kl_coef = kl.control(kl_coef, metrics['kl'], len(trajectories))
  step = train_state.step + 1
  if plan.schedule.reference_every and step % plan.schedule.reference_every == 0:
    reference = _copy_learned(states['policy'].params)
  train_state = dataclasses.replace(
    train_state, states=states, reference=reference, kl_coef=kl_coef, step=step
  )
  if not plan.syncs_before_update:
    train_state = sync_sampler(train_state, plan)
  return train_state, metrics, table


def sync_sampler(train_state: TrainState, plan: Plan) -> TrainState:
  """Makes the current policy the sampler, every `sync_every` rollouts.

  `learn` calls it, unless plan.syncs_before_update; the schedule gives the sampler to the
  engine.
  """
  step = train_state.step
  if step % plan.schedule.sync_every or train_state.sampler_step == step:
    return train_state
  sampler = _sampler_params(train_state.states['policy'].params, plan)
  return dataclasses.replace(train_state, sampler=sampler, sampler_step=step)


def _models(train_state: TrainState, plan: Plan) -> credit.Models:
  states, reference_model = train_state.states, plan.reference_model or plan.model
  policy, critic = states['policy'].params, states.get('critic', states['policy']).params
  return credit.Models(policy, plan.model, critic, train_state.reference, reference_model)


def _sampler_params(params, plan):
  """Returns the engine's parameters: a copy if the next update would donate them."""
  return _copy_learned(params) if plan.keeps_old_sampler else params


def _copy_learned(params):
  """Copies the learned parameters, which an update would donate, and no frozen ones."""
  learned, frozen = lora.split(params)
  return lora.join(jax.tree.map(jnp.copy, learned), frozen)


def _with_frozen_of(learned, params):
  """Joins learned parameters with the frozen ones of `params`."""
  return lora.join(learned, lora.split(params)[1])


def _run_epochs(
  train_state: TrainState, table: table_lib.TokenTable, plan: Plan, prefixes
) -> tuple[dict[str, learner.ModelState], dict[str, float]]:
  """Makes the optimizer steps of all epochs; returns the new states and mean metrics."""
  states, metrics = dict(train_state.states), dict[str, list[float]]()

  def update(name, batches):
    gradients = learner.forward_backward(
      states[name].params,
      batches,
      config=plan.model,
      loss=plan.objectives[name],
      temperature=plan.temperature,
    )
    try:
      states[name], numbers = learner.optim_step(
        states[name], gradients, optimizer=plan.optimizers[name]
      )
    except learner.NotFiniteError as error:
      where = f'In the update of the {name}, {error}'
      raise learner.NotFiniteError(where, batches) from None
    for key, value in numbers.items():
      key = f'critic_{key}' if name == 'critic' and key != 'value_loss' else key
      metrics.setdefault(key, []).append(value)

  options = {'algorithm': plan.algorithm, 'shape': plan.shape}
  for members in _split_epochs(len(table.group), plan, train_state.step):
    if 'critic' in states:
      batches = credit.make_critic_minibatch(table, members, prefixes=prefixes, **options)
      update('critic', batches)
    if train_state.step >= plan.schedule.critic_warmup:
      batches = credit.make_minibatch(
        table,
        members,
        kl_coef=train_state.kl_coef,
        shared_critic=plan.shared_critic,
        **options,
      )
      update('policy', batches)
  return states, {name: float(np.mean(values)) for name, values in metrics.items()}


def _split_epochs(n: int, plan: Plan, step: int) -> Iterator[list[int]]:
  """Yields the trajectory numbers of each mini-batch; each epoch has its own order."""
  for epoch in range(plan.schedule.epochs):
    order = np.random.default_rng([plan.seed, step, epoch]).permutation(n)
    for members in np.array_split(order, min(plan.schedule.minibatches, n)):
      yield members.tolist()
