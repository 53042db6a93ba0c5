"""The memory of a decode; test_engine.py and test_requests.py test what it computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from agent_r1_jax.engine import active_request, drafts
from agent_r1_jax.engine import programs as programs_lib
from agent_r1_jax.models import engine_params, kv_cache

_B, _STEPS = (tiny.SIZES[name] for name in ('rows', 'decode_steps'))


def test_a_decode_in_place_has_no_second_cache():
  """Its temporaries are less than a tenth of a cache of long rows; a copy is as large."""
  config, slots = tiny.config(layers=4), 8192
  shapes = jax.eval_shape(lambda: kv_cache.empty(config, _B, slots))
  params = tiny.init_shapes(config)
  params = jax.eval_shape(lambda params: engine_params.unstack(params, config), params)
  batch = active_request.make_decode_batch({}, _B, (), unused_row=_B)
  sizes = {'config': config, 'guides': (), 'steps': _STEPS, 'bucket': slots}
  cache, temporaries = sum(x.size * 4 for x in jax.tree.leaves(shapes)), {}
  for in_place in (False, True):
    program = programs_lib.decode.lower(
      params, shapes, batch, (), **sizes, in_place=in_place
    )
    memory = program.compile().memory_analysis()
    temporaries[in_place] = memory.temp_size_in_bytes / cache
  assert temporaries[True] < 0.1 < 1 < temporaries[False]


@pytest.mark.parametrize('budget', [1, 2, 3])
def test_nothing_is_written_behind_the_tokens_of_the_budget(budget):
  """Of a draft either: in a ring it would take the place of the window's first slots."""
  config = dataclasses.replace(tiny.config('mistral', 2), sliding=(True, False), window=9)
  ring, slots, length, k = 25, 64, 40, 3
  cache = jax.eval_shape(lambda: kv_cache.empty(config, 1, slots, window_slots=ring))
  cache = jax.tree.map(lambda x: jnp.asarray(np.full(x.shape, 7, x.dtype)), cache)
  index, text = drafts.Index(), np.arange(30, dtype=np.int32)
  index.add(text, len(text))
  places = drafts.Places(*map(jnp.asarray, index.offer()))
  batch = active_request.make_decode_batch({}, 1, (), unused_row=1)
  ends = np.asarray(batch.ends).copy()
  ends[0] = text[10 - ends.shape[1] : 10]
  propose = jax.jit(drafts.propose, static_argnums=2)
  assert (np.asarray(propose(places, ends, k)) == text[10:13]).all()
  batch = batch._replace(
    rows=np.zeros(1, int), length=np.array([length]), ends=ends, budget=np.array([budget])
  )
  unstack = jax.jit(engine_params.unstack, static_argnums=1)
  params = unstack(tiny.params(config), config)
  sizes = {'config': config, 'guides': (), 'steps': 2, 'bucket': slots, 'k': k}
  cache, _, out = programs_lib.decode(params, cache, batch, (), places, **sizes)
  # All tokens but the last one are computed: of one token, the text's last before it.
  most = length + budget
  for layer, size in zip(cache, (ring, slots), strict=True):
    written = np.flatnonzero((np.asarray(layer.keys) != 7).any((0, 1, 3)))
    assert {*written.tolist()} <= {i % size for i in range(length, most)}
    assert length % size in written
  assert 1 <= out.count[0] <= budget
