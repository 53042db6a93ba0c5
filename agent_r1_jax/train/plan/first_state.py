"""Makes the learner's side of a run: the constants of updates, the first train state.

footprint.py makes the same from shapes alone, to count and compile it.
"""

import dataclasses
import functools
import logging

import jax
from jax.sharding import Mesh

from agent_r1_jax import config as config_lib
from agent_r1_jax.models import decoder, lora, sharding
from agent_r1_jax.models.files import weights
from agent_r1_jax.rl import algorithms, optimizers, packing
from agent_r1_jax.rl import train_state as train_state_lib

_LOGGER = logging.getLogger(__name__)
# A model's shape and its parameters.
Model = tuple[decoder.DecoderConfig, decoder.Params]


def make(
  config: config_lib.Config,
  model: decoder.DecoderConfig,
  params: decoder.Params,
  algorithm: algorithms.Algorithm,
  mesh: Mesh | None = None,
  reference: Model | None = None,
) -> tuple[train_state_lib.UpdateConfig, train_state_lib.TrainState]:
  """Makes the constants of the updates, and the train state before the first rollout.

  Adds adapters to the policy's parameters, which must be on the mesh. If the algorithm
  needs a reference policy and `reference` is None, the initial policy is the reference.

  Raises:
    ValueError: A field of the configuration does not fit the algorithm or the model.
  """
  # A policy with a value head is its own critic; otherwise the critic is a second model.
  own_critic = algorithm.needs_critic and 'value_head' not in params
  if config.schedule.critic_warmup and not own_critic:
    raise ValueError('critic_warmup: there is no critic of its own; make it 0.')
  if own_critic and algorithm.value_coef != 1.0:
    raise ValueError('value_coef: the critic is a model of its own; leave it out.')
  if config.model.lora_rank:
    targets = config.model.adapter_targets
    adapters = (config.model.lora_rank, targets, config.model.lora_alpha)
    params = lora.add(params, *adapters, jax.random.key(config.seed))
    params = sharding.shard_params(params, mesh)
  options = config.optimizer
  made = {'policy': optimizers.make(options, options.learning_rate)}
  if own_critic:
    made['critic'] = optimizers.make(options, options.critic_learning_rate)
  reference_model, reference_params = reference or (model, None)
  if reference_params and config.schedule.reference_every:
    _check_replaceable(reference_model, reference_params, model, params)
  update_config = train_state_lib.UpdateConfig(
    model,
    algorithm,
    packing.MicrobatchShape(
      config.batch.microbatch,
      config.batch.row_tokens or config.engine.slots,
      config.batch.trees and not _needs_whole_rows(model.recurrent),
      model.vision,
    ),
    made,
    config.schedule,
    reference_model,
    temperature=config.sampling.temperature,
    seed=config.seed,
    offload=config.optimizer.offload,
  )
  return update_config, train_state_lib.init(params, update_config, reference_params)


@functools.cache
def _needs_whole_rows(recurrent: tuple[bool, ...]) -> bool:
  """Whether recurrent layers, which cannot follow trees, need whole rows; warns if so."""
  if recurrent:
    _LOGGER.warning(
      'batch.trees: tokens that texts share are computed in each of them, since layers '
      'with a state follow one text.'
    )
  return bool(recurrent)


def load(
  config: config_lib.Config,
  policy: decoder.DecoderConfig,
  params: decoder.Params,
  algorithm: algorithms.Algorithm,
  mesh: Mesh | None,
) -> tuple[train_state_lib.UpdateConfig, train_state_lib.TrainState]:
  """Makes the constants and the state, with the reference in `config.model.reference`."""
  reference, path = None, config.model.reference
  with sharding.use_mesh(mesh):
    if path:
      place = sharding.make_placer(mesh)
      model, theirs = weights.load(
        path, dtype='float32', place=place, formats=config.model.formats
      )
      if model.vocab_size != policy.vocab_size:
        raise ValueError(
          f'model.reference: {path} has {model.vocab_size} tokens and the policy '
          f'{policy.vocab_size}; they must share a tokenizer.'
        )
      reference = dataclasses.replace(model, dtype=config.model.dtype), theirs
    return make(config, policy, params, algorithm, mesh, reference)


def _check_replaceable(
  reference_model: decoder.DecoderConfig,
  reference: decoder.Params,
  model: decoder.DecoderConfig,
  params: decoder.Params,
):
  """Raises ValueError unless the policy's parameters fit the reference model."""
  free = {'dtype': 'float32', 'remat': 'none', 'max_positions': 0, 'ops': None}
  theirs, ours = (dataclasses.replace(m, **free) for m in (reference_model, model))
  differing = [
    f.name
    for f in dataclasses.fields(model)
    if getattr(theirs, f.name) != getattr(ours, f.name)
  ]
  if ('value_head' in reference) != ('value_head' in params):
    differing.append('value_head')
  if differing:
    raise ValueError(
      'schedule.reference_every: the policy becomes the reference, and model.reference '
      f'is another model ({", ".join(differing)}). Make it 0, or give a reference of '
      "the policy's shape."
    )
