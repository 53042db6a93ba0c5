"""The constants of a run's updates, and the training state that each step replaces.

A checkpoint holds the part of the state that cannot be loaded or derived at a restart.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from agent_r1_jax import config as config_lib
from agent_r1_jax.models import decoder, lora, sharding
from agent_r1_jax.rl import algorithms, learner, packing


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
  """The constants of a run's updates."""

  model: decoder.DecoderConfig  # The shape of policy and critic.
  algorithm: algorithms.Algorithm
  shape: packing.MicrobatchShape  # The shape of micro-batches.
  # By model: 'policy' and, if the critic is a separate model, 'critic'.
  optimizers: dict[str, optax.GradientTransformation]
  # The number of epochs and mini-batches, and when to sync the engine's policy.
  schedule: config_lib.Schedule = dataclasses.field(default_factory=config_lib.Schedule)
  # The shape of the reference policy, if it differs from `model`.
  reference_model: decoder.DecoderConfig | None = None
  temperature: float = 1.0  # The temperature at which tokens are sampled.
  seed: int = 0  # The seed of the order of trajectories.
  # Whether optimizer states are in host memory between updates.
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
    """Whether the engine is synced before the update that runs during a rollout."""
    return self.schedule.ahead > 0 and not self.schedule.partial

  @functools.cached_property
  def objectives(self) -> dict[str, learner.Loss]:
    """The losses of policy and critic, cached so that each is compiled once."""
    policy = learner.objective(self.algorithm, shared_critic=self.shared_critic)
    if 'critic' not in self.optimizers:
      return {'policy': policy}
    return {'policy': policy, 'critic': learner.critic_objective(self.algorithm)}


@dataclasses.dataclass(frozen=True)
class TrainState:
  """The training state between rollouts; updates.learn returns a new one."""

  # By model: 'policy' and, if the critic is a separate model, 'critic'.
  states: dict[str, learner.ModelState]
  reference: decoder.Params | None  # The reference policy's parameters, if there is one.
  # The parameters that the engine samples from, before LoRA is merged.
  sampler: decoder.Params
  sampler_step: int = 0  # The number of rollouts that `sampler` was trained on.
  kl_coef: float = 0.0  # The current coefficient of the algorithm's KL term.
  step: int = 0  # The number of rollouts trained on.

  def checkpoint_arrays(self, update_config: UpdateConfig) -> dict[str, Any]:
    """Returns the arrays of a checkpoint, which cannot be loaded or derived at a restart.

    These are the learned parameters and the optimizer states; the reference, if it
    changes; and the sampler, if it may be older than the policy in `states`.
    """
    learned = lambda params: lora.split(params)[0]
    arrays: dict[str, Any] = {
      name: state._replace(params=learned(state.params))
      for name, state in self.states.items()
    }
    if update_config.schedule.reference_every:
      arrays['reference'] = learned(self.reference)
    if update_config.schedule.sync_every > 1 or update_config.syncs_before_update:
      arrays['sampler'] = learned(self.sampler)
    return arrays

  def checkpoint_numbers(self) -> dict[str, Any]:
    """Returns the Python numbers of a checkpoint."""
    return {name: getattr(self, name) for name in ('sampler_step', 'kl_coef', 'step')}

  def restore(self, arrays: dict[str, Any], numbers: dict[str, Any]) -> 'TrainState':
    """Returns the state of a checkpoint, with the frozen parameters of this one."""
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
      sampler = copy_learned(sampler)  # See sampler_params.
    return TrainState(states, reference, sampler, **numbers)


def init(
  params: decoder.Params,
  update_config: UpdateConfig,
  reference: decoder.Params | None = None,
) -> TrainState:
  """Makes the state before the first rollout.

  A separate critic starts as a copy of the policy with a value head of zeros. Policy,
  critic and reference share frozen parameters; only learned parameters are copied.
  """
  if reference is None and update_config.algorithm.needs_reference:
    reference = copy_learned(params)
  models = {'policy': params}
  if 'critic' in update_config.optimizers:
    models['critic'] = decoder.add_value_head(copy_learned(params))
  states = {
    name: learner.init(p, update_config.optimizers[name]) for name, p in models.items()
  }
  if update_config.offload:
    for name, state in states.items():
      states[name] = state._replace(opt_state=sharding.to_host(state.opt_state))
  coef = update_config.algorithm.kl.coef if update_config.algorithm.kl else 0.0
  return TrainState(
    states, reference, sampler_params(params, update_config), kl_coef=coef
  )


def sampler_params(params: decoder.Params, update_config: UpdateConfig) -> decoder.Params:
  """Returns the engine's parameters: a copy if the next update would donate them."""
  return copy_learned(params) if update_config.keeps_old_sampler else params


def copy_learned(params: decoder.Params) -> decoder.Params:
  """Copies only the learned parameters, which an update would donate."""
  learned, frozen = lora.split(params)
  return lora.join(jax.tree.map(jnp.copy, learned), frozen)


def _with_frozen_of(learned, params):
  """Joins learned parameters with the frozen ones of `params`."""
  return lora.join(learned, lora.split(params)[1])
