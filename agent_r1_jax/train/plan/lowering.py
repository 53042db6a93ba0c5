"""Lowers the programs of a run from shapes alone, so that they can be compiled before it.

Parameters are shapes, sharded by `mesh`, which must be set; None is a single chip.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.engine import active_request, automaton_guide, drafts
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import programs as programs_lib
from agent_r1_jax.engine import sizes as sizes_lib
from agent_r1_jax.models import decoder, lora, sharding
from agent_r1_jax.rl import learner, minibatch, optimizers, train_state
from agent_r1_jax.rl import table as table_lib


def lower_gradient(
  update_config: train_state.UpdateConfig, params: Any, replay: bool, mesh: Any
) -> Any:
  """Lowers the gradient of the policy's loss over a micro-batch."""
  batch = _make_batch(update_config, replay)
  return learner._gradient.lower(
    _place(params, mesh),
    _place(batch, mesh, mesh and sharding.batch_sharding(mesh)),
    loss=update_config.objectives['policy'],
    config=update_config.model,
    temperature=update_config.temperature,
  )


def lower_update(config: config_lib.Optimizer, params: Any, mesh: Any) -> Any:
  """Lowers the optimizer's step."""
  params, optimizer = _place(params, mesh), optimizers.make(config, config.learning_rate)
  learned = lora.split(params)[0]
  state: Any = jax.eval_shape(lambda p: learner.init(p, optimizer), params)
  state = _place(state._replace(params=learned), mesh)
  return learner._apply.lower(state, learned, optimizer=optimizer)


def lower_sampling(
  engine: config_lib.Engine, model: decoder.DecoderConfig, params: Any, mesh: Any
) -> list[Any]:
  """Lowers the largest decode and prefill of a replica."""
  options: Any = dataclasses.asdict(engine)
  del options['weights']  # `params` have that format already.
  sizes = sizes_lib.make(model, **options)
  cache: Any = jax.eval_shape(functools.partial(sizes.make_cache, model))
  if mesh is not None:
    place = lambda x: _place(x, mesh, sharding.cache_sharding(x.shape[1], mesh))
    cache = jax.tree.map(place, cache)
  params = _place(params, mesh)
  guides = (automaton_guide.AUTOMATA, guide_lib.TRUNCATION)
  pool = automaton_guide.AutomatonPool(model.vocab_size)
  rows, bucket = sizes.decode_rows[-1], sizes.decode_buckets[-1]
  decode = programs_lib.decode.lower(
    params,
    cache,
    active_request.make_decode_batch({}, rows, guides, sizes.rows),
    (automaton_guide.make_tables(pool.entries), None),
    drafts.Index().offer() if sizes.drafts else None,
    config=model,
    guides=guides,
    steps=sizes.decode_steps,
    bucket=bucket,
    in_place=sizes.decodes_in_place(rows, bucket),
    k=sizes.drafts,
  )
  entries = sizes.prefill_rows[-1], sizes.prefill_tokens, sizes.rows
  batch, _ = active_request.make_prefill_batch((), *entries)
  prefill = programs_lib.prefill.lower(
    params, cache, batch, config=model, bucket=sizes.buckets[-1]
  )
  return [decode, prefill]


def _place(shapes: Any, mesh: Any, where: Any = None) -> Any:
  """Returns shapes with their shardings on a mesh, or all with the sharding `where`."""
  if mesh is None:
    return shapes
  struct = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
  if where is not None:
    return jax.tree.map(lambda x: struct(x, where), shapes)
  return jax.tree.map(struct, shapes, sharding.make_shardings(shapes, mesh))


def _make_batch(update_config: train_state.UpdateConfig, replay: bool) -> types.Batch:
  """Makes a micro-batch of one episode, with the columns that the algorithm needs."""
  one, algorithm, model = np.ones(1), update_config.algorithm, update_config.model
  text = types.Segment(np.ones(1, np.int32), np.ones(1, bool), one)
  if model.num_experts and replay:
    shape = 1, model.num_layers, model.experts_per_token
    text.routes = np.zeros(shape, np.int8)
  columns: dict[str, Any] = {'advantages': one}
  if algorithm.needs_reference:
    columns['ref_logprobs'] = one
  if algorithm.needs_critic:
    columns |= {'values': one, 'returns': one}
  if algorithm.correction:
    columns['correction'] = one
  table = dataclasses.replace(table_lib.from_segments([text]), **columns)
  options = {'shape': update_config.shape, 'shared_critic': update_config.shared_critic}
  return minibatch.make_policy(table, [0], algorithm, **options)[0][0]
