"""Makes what a run computes with: mesh, model, chat, engine, and the first train state.

footprint.py counts and compiles the train state from shapes alone.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields
from agent_r1_jax.agent import call_formats, pictures
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.agent import tokenizer as tokenizer_lib
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.host import runtime
from agent_r1_jax.models import batch_invariant, decoder, lora, quantization, sharding
from agent_r1_jax.models.files import weights
from agent_r1_jax.rl import algorithms, optimizers, packing
from agent_r1_jax.rl import train_state as train_state_lib

# A model's shape and its parameters.
Model = tuple[decoder.DecoderConfig, decoder.Params]


def make_mesh(config: config_lib.Mesh) -> Mesh | None:
  """Returns the mesh of the chips that train; None for one chip."""
  runtime.initialize()
  mesh, samplers = split_chips(config)
  if mesh:
    sharding.make_replica_meshes(mesh, samplers)  # Raises if these chips cannot sample.
  return mesh


def split_chips(
  config: config_lib.Mesh, absent: Sequence[Any] = ()
) -> tuple[Mesh | None, list[Any]]:
  """Returns the mesh that trains, None for one chip; and this process's samplers.

  Chips that are absent, of one process, stand for those that are here: programs can be
  compiled for them. One of them has a mesh too.

  Raises:
    ValueError: The axes do not multiply to the number of chips.
  """
  if absent:
    cut = len(absent) - config.samplers
    devices, samplers = list(absent[:cut]), list(absent[cut:])
  else:
    devices, samplers = sharding.split_devices(config.samplers)
  axes = config.axes(len(devices))
  alone = len(devices) == math.prod(axes.values()) == 1 and not samplers
  if alone and not absent:
    return None, []
  return sharding.make_mesh(**axes, devices=devices), samplers


def load(
  config: config_lib.Model,
  chat: config_lib.Chat,
  mesh: Mesh | None = None,
  frozen: str = 'float32',
) -> tuple[decoder.DecoderConfig, decoder.Params, chat_lib.Chat]:
  """Loads the shape, the float32 parameters and the chat of the model in `config.path`.

  On a mesh the parameters are sharded as they are read. If `frozen` is a format of 8
  bits, they are stored in it as they are read; see quantization.freeze_leaf.
  """
  chat.check()
  runtime.initialize()
  # A run before this one, in the same process, may have left its engine in a cycle.
  runtime.release_freed_memory(cycles=True)
  place, scales = sharding.make_placer(mesh), {}

  def place_frozen(path: str, x: np.ndarray) -> Any:
    leaf, scale = quantization.freeze_leaf(path, place(path, x), config.dtype, frozen)
    if scale is not None:
      scales[path] = scale
    return leaf

  rounds = frozen != 'float32'
  shape, params = weights.load(
    config.path,
    dtype='float32',
    place=place_frozen if rounds else place,
    formats=config.formats,
  )
  if rounds:
    params = quantization.add_scales(params, scales)
    if mesh:  # What programs have made may lie elsewhere.
      params = jax.device_put(params, sharding.make_shardings(params, mesh))
  shape = dataclasses.replace(
    shape,
    dtype=config.dtype,
    remat=config.remat or 'none',
    ops=batch_invariant.INVARIANT if config.batch_invariant else None,
  )
  return (
    shape,
    params,
    chat_lib.Chat(
      tokenizer_lib.load(config.path),
      max_tool_tokens=chat.max_tool_tokens,
      tools_in_prompt=chat.tools_in_prompt,
      tool_format=call_formats.FORMATS.get(chat.tool_format),
      stop_strings=fields.parse_json('chat.stop_strings', chat.stop_strings, list),
      template_kwargs=fields.parse_json('chat.template', chat.template, dict),
      date=chat.date,
      pictures=shape.vision and pictures.load(config.path, shape.vision.token_size),
    ),
  )


def make_engine(
  config: config_lib.Config,
  model: decoder.DecoderConfig,
  params: decoder.Params,
  mesh: Mesh | None = None,
  guides: Iterable[guide_lib.Guide] = (),
  **adapters: int,
) -> engine_lib.Engine:
  """Makes an engine of the sizes in `config.engine` on the chips of this process.

  Its requests may use the guides, which have no parameters. `adapters` and `adapter_rank`
  are those of Engine, which has room for none by default.
  """
  sizes = dataclasses.asdict(config.engine)
  # Here 0 means all rows, and one replica.
  sizes |= {'width': sizes['width'] or None, 'replicas': sizes['replicas'] or 1}
  sizes |= adapters
  return engine_lib.Engine(
    model,
    params,
    guides=dict.fromkeys(guides),
    mesh=mesh,
    chips=sharding.split_devices(config.mesh.samplers)[1],
    **sizes,
  )


def make_state(
  config: config_lib.Config,
  model: decoder.DecoderConfig,
  params: decoder.Params,
  algorithm: algorithms.Algorithm,
  mesh: Mesh | None = None,
  reference: Model | None = None,
) -> tuple[train_state_lib.UpdateConfig, train_state_lib.TrainState]:
  """Makes the constants of the updates, and the train state before the first rollout.

  The policy's parameters, on the mesh, get adapters here. Without a `reference`, the
  reference policy of an algorithm that needs one is the policy as it begins.

  Raises:
    ValueError: A field of the configuration does not fit the algorithm or the model.
  """
  # A policy with a value head is its own critic; else the critic is a second model.
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
      config.batch.trees,
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


def load_state(
  config: config_lib.Config,
  policy: decoder.DecoderConfig,
  params: decoder.Params,
  algorithm: algorithms.Algorithm,
  mesh: Mesh | None,
) -> tuple[train_state_lib.UpdateConfig, train_state_lib.TrainState]:
  """Makes the state with the reference in `config.model.reference`, if there is one."""
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
    return make_state(config, policy, params, algorithm, mesh, reference)


def _check_replaceable(
  reference_model: decoder.DecoderConfig,
  reference: decoder.Params,
  model: decoder.DecoderConfig,
  params: decoder.Params,
):
  """Raises ValueError unless the policy's parameters fit the reference's model."""
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
