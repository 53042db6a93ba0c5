"""What a rollout changes: credit, mini-batches, the KL's control, the reference.

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
from agent_r1_jax.host import sharding
from agent_r1_jax.models import decoder, lora
from agent_r1_jax.rl import algorithms, credit, learner, packing
from agent_r1_jax.rl import table as table_lib


@dataclasses.dataclass(frozen=True)
class Plan:
  """What stays the same over a run.

  Attributes:
    model: The shape of policy and critic.
    algorithm: Advantages, loss and the rest.
    shape: Of micro-batches.
    optimizers: 'policy' and, for a critic that is a model of its own, 'critic'.
    schedule: How much is learned, and when the engine gets a new policy.
    reference_model: The shape of the reference policy, where there is one.
    temperature: That tokens are sampled at.
    seed: Of the order of trajectories.
    offload: Whether optimizers' states lie in the host's memory between updates.
  """

  model: decoder.DecoderConfig
  algorithm: algorithms.Algorithm
  shape: packing.MicrobatchShape
  optimizers: dict[str, optax.GradientTransformation]
  schedule: config_lib.Schedule = dataclasses.field(default_factory=config_lib.Schedule)
  reference_model: decoder.DecoderConfig | None = None
  temperature: float = 1.0
  seed: int = 0
  offload: bool = False

  @property
  def shared_critic(self) -> bool:
    """Whether the critic is a second head of the policy."""
    return self.algorithm.needs_critic and 'critic' not in self.optimizers

  @property
  def keeps_old_sampler(self) -> bool:
    """Whether an update is computed while the engine still needs what was before it."""
    return self.schedule.sync_every > 1 or self.schedule.ahead > 0

  @property
  def syncs_before_update(self) -> bool:
    """Whether the engine gets the policy before an update, for the rollout meanwhile."""
    return self.schedule.ahead > 0 and not self.schedule.partial

  @functools.cached_property
  def objectives(self) -> dict[str, learner.Loss]:
    """The losses of policy and critic; each is made once, and so compiled once."""
    policy = learner.objective(self.algorithm, shared_critic=self.shared_critic)
    if 'critic' not in self.optimizers:
      return {'policy': policy}
    return {'policy': policy, 'critic': learner.critic_objective(self.algorithm)}


@dataclasses.dataclass(frozen=True)
class TrainState:
  """What goes on from rollout to rollout; `learn` gives another one.

  Attributes:
    states: 'policy', and 'critic' where that is a model of its own.
    reference: The reference policy's parameters, where there is one.
    sampler: The engine's parameters; adapters are not merged into them yet.
    sampler_step: The rollouts that they had learned from.
    kl_coef: The present weight of the algorithm's KL term.
    step: Rollouts learned from.
  """

  states: dict[str, learner.ModelState]
  reference: decoder.Params | None
  sampler: decoder.Params
  sampler_step: int = 0
  kl_coef: float = 0.0
  step: int = 0

  def checkpoint_arrays(self, plan: Plan) -> dict[str, Any]:
    """What a checkpoint must hold; what can be loaded or derived again is not in it."""
    learned = lambda params: lora.split(params)[0]
    reference = (
      {'reference': learned(self.reference)} if plan.schedule.reference_every else {}
    )
    older = plan.schedule.sync_every > 1 or plan.syncs_before_update
    sampler = {'sampler': learned(self.sampler)} if older else {}
    states = {n: s._replace(params=learned(s.params)) for n, s in self.states.items()}
    return states | reference | sampler

  def checkpoint_numbers(self) -> dict[str, Any]:
    """The rest of a checkpoint."""
    return {name: getattr(self, name) for name in ('sampler_step', 'kl_coef', 'step')}

  def restore(self, arrays: dict[str, Any], numbers: dict[str, Any]) -> 'TrainState':
    """What a checkpoint held, beside what is frozen here."""
    states = {}
    for name, state in self.states.items():
      params = _beside(arrays[name].params, state.params)
      states[name] = arrays[name]._replace(params=params)
    reference, sampler = self.reference, states['policy'].params
    if 'reference' in arrays:
      reference = _beside(arrays['reference'], reference)
    if 'sampler' in arrays:
      sampler = _beside(arrays['sampler'], sampler)
    elif self.sampler is not self.states['policy'].params:
      sampler = _copied(sampler)
    return TrainState(states, reference, sampler, **numbers)


def init(
  params: decoder.Params, plan: Plan, reference: decoder.Params | None = None
) -> TrainState:
  """Before the first rollout.

  A critic of its own starts as a copy of the policy with a value head of zeros. With
  adapters only they are copied: policy, critic and reference share the frozen kernels,
  and the reference's adapters stay as they start, where they change nothing.

  Args:
    params: The policy's parameters.
    plan: The run's.
    reference: Another reference policy than the policy as it starts.
  """
  if reference is None and plan.algorithm.needs_reference:
    reference = _copied(params)
  models = {'policy': params}
  if 'critic' in plan.optimizers:
    head = sharding.init_sharded(functools.partial(_value_head, plan.model))
    models['critic'] = _copied(params) | head
  states = {name: learner.init(p, plan.optimizers[name]) for name, p in models.items()}
  if plan.offload:
    for name, state in states.items():
      states[name] = state._replace(opt_state=sharding.to_host(state.opt_state))
  coef = plan.algorithm.kl.coef if plan.algorithm.kl else 0.0
  return TrainState(states, reference, _handed(params, plan), kl_coef=coef)


def learn(
  train_state: TrainState,
  trajectories: Sequence[types.Trajectory],
  plan: Plan,
  *,
  baselines: Sequence[float] | None = None,
  prefixes: Sequence[np.ndarray] | None = None,
) -> tuple[TrainState, dict[str, float], table_lib.TokenTable]:
  """Learns from one rollout; no argument is changed.

  Args:
    train_state: What the last rollout left. The arrays of its policy and critic are
      donated: after the call their memory is the new ones'.
    trajectories: None with status 'error', each with a turn.
    plan: The run's.
    baselines: The reward of the greedy episode of each trajectory's task.
    prefixes: Tokens of each trajectory that only the critic sees, before the text.

  Returns:
    The new train_state; metrics, of which those of the critic's updates begin
    'critic_'; and the table of what was learned from, its trajectories in their order.

  Raises:
    learner.NotFiniteError: See there. Some of train_state's arrays may have been donated.
  """
  algorithm, kl = plan.algorithm, plan.algorithm.kl
  states, kl_coef, reference = (
    train_state.states,
    train_state.kl_coef,
    train_state.reference,
  )
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
    table, found = credit.estimate(table, algorithm, kl_coef=kl_coef)
    states, watched = _update(train_state, table, plan, prefixes)
    metrics |= found | watched
  if kl and 'kl' in metrics:
    kl_coef = kl.control(kl_coef, metrics['kl'], len(trajectories))
  step = train_state.step + 1
  if plan.schedule.reference_every and step % plan.schedule.reference_every == 0:
    reference = _copied(states['policy'].params)
  train_state = dataclasses.replace(
    train_state, states=states, reference=reference, kl_coef=kl_coef, step=step
  )
  return (
    (train_state if plan.syncs_before_update else sync_sampler(train_state, plan)),
    metrics,
    table,
  )


def sync_sampler(train_state: TrainState, plan: Plan) -> TrainState:
  """Gives the engine the policy, every `sync_every` rollouts.

  `learn` calls it, unless plan.syncs_before_update.
  """
  if (
    train_state.step % plan.schedule.sync_every
    or train_state.sampler_step == train_state.step
  ):
    return train_state
  sampler = _handed(train_state.states['policy'].params, plan)
  return dataclasses.replace(train_state, sampler=sampler, sampler_step=train_state.step)


def _models(train_state: TrainState, plan: Plan) -> credit.Models:
  policy = train_state.states['policy'].params
  critic = (
    train_state.states['critic'].params if 'critic' in train_state.states else policy
  )
  reference_model = plan.reference_model or plan.model
  return credit.Models(policy, plan.model, critic, train_state.reference, reference_model)


def _value_head(model):
  """One of zeros; of the rest of the model only the shapes are made."""
  make = functools.partial(decoder.init, model, value_head=True)
  shapes = jax.eval_shape(make, jax.random.key(0))['value_head']
  return {'value_head': jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)}


def _handed(params, plan):
  """The engine's parameters: a copy if an update uses the policy's up before the next."""
  return _copied(params) if plan.keeps_old_sampler else params


def _copied(params):
  """What an update would use up is copied, what is frozen is shared."""
  learned, frozen = lora.split(params)
  return lora.join(jax.tree.map(jnp.copy, learned), frozen)


def _beside(learned, params):
  """`params` with other numbers where they are learned."""
  return lora.join(learned, lora.split(params)[1])


def _update(
  train_state: TrainState, table: table_lib.TokenTable, plan: Plan, prefixes
) -> tuple[dict[str, learner.ModelState], dict[str, float]]:
  """Epochs of mini-batches: the new states, and the means of their metrics."""
  states, metrics = dict(train_state.states), dict[str, list[float]]()

  def update(name, batches):
    try:
      states[name], numbers = learner.update(
        states[name],
        batches,
        config=plan.model,
        loss=plan.objectives[name],
        optimizer=plan.optimizers[name],
        temperature=plan.temperature,
      )
    except learner.NotFiniteError as error:
      raise learner.NotFiniteError(f'Of the {name}, {error}', error.batches) from None
    for key, value in numbers.items():
      key = f'critic_{key}' if name == 'critic' and key != 'value_loss' else key
      metrics.setdefault(key, []).append(value)

  options = {'algorithm': plan.algorithm, 'shape': plan.shape}
  for members in _minibatches(len(table.group), plan, train_state.step):
    if 'critic' in states:
      batches = credit.make_critic_minibatch(table, members, prefixes=prefixes, **options)
      update('critic', batches)
    if train_state.step >= plan.schedule.critic_warmup:
      more = {'kl_coef': train_state.kl_coef, 'dense': plan.shared_critic}
      update('policy', credit.make_minibatch(table, members, **options, **more))
  return states, {name: float(np.mean(values)) for name, values in metrics.items()}


def _minibatches(n: int, plan: Plan, step: int) -> Iterator[list[int]]:
  """Members of each mini-batch; every epoch has an order of its own."""
  for epoch in range(plan.schedule.epochs):
    order = np.random.default_rng([plan.seed, step, epoch]).permutation(n)
    for members in np.array_split(order, min(plan.schedule.minibatches, n)):
      yield members.tolist()
