"""The memory of a decode; test_engine.py and test_requests.py test what it computes."""

import jax
import tiny

from agent_r1_jax.engine import active_request
from agent_r1_jax.engine import programs as programs_lib
from agent_r1_jax.models import decoder, kv_cache, sampling_params

_B, _STEPS = (tiny.SIZES[name] for name in ('rows', 'decode_steps'))


def test_a_decode_in_place_has_no_second_cache():
  """Its temporaries are less than a tenth of a cache of long rows; a copy is as large."""
  config, slots = tiny.config(layers=4), 8192
  shapes = jax.eval_shape(lambda: kv_cache.empty(config, _B, slots))
  params = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
  params = jax.eval_shape(lambda params: sampling_params.unstack(params, config), params)
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
