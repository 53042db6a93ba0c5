"""The parameters as the engine samples with them: one tree a layer, cast and merged.

The learner's are stacked over the layers, float32, with adapters apart. The results are
the same; a decode saves slices, casts and the products of adapters.
"""

import functools

import jax
from jax import Array

from agent_r1_jax.models import decoder, lora


def unstack(params: decoder.Params, config: decoder.DecoderConfig) -> decoder.Params:
  """Makes the parameters of `decoder.extend` from those of the learner.

  `layers` becomes a tuple with a tree for each layer: an array [L, ...] becomes L arrays.
  Norms and routers stay float32, everything else is cast to config.dtype. Adapters are
  merged, one kernel after the other: all merged kernels together would be a second copy
  of the layers.
  """
  others = {k: v for k, v in params.items() if k not in ('layers', 'final_norm')}
  cast = jax.tree.map(lambda x: x.astype(config.dtype), others)
  layers = _unstack_tree(params['layers'], config, 'layers')
  return params | cast | {'layers': layers}


def _unstack_tree(
  tree: decoder.Params, config: decoder.DecoderConfig, path: str
) -> tuple[decoder.Params, ...]:
  """Returns a tree for each layer; `path` are the names above the tree."""
  stacks = {}
  for name, x in lora.merge(tree).items() if 'lora_a' in tree else tree.items():
    place = f'{path}/{name}'
    if isinstance(x, dict):
      stacks[name] = _unstack_tree(x, config, place)
    else:
      # [L, D, N, H] -> [L, D, N H], and the bias likewise: a TPU stores the last two axes
      # in tiles, so that XLA would copy each kernel at every decode to join N and H.
      joined = place.startswith('layers/attn/q/')
      exact = '_norm' in place or '/router/' in place
      dtype = x.dtype.name if exact else config.dtype
      # A merged kernel is freed only when this is done.
      stacks[name] = jax.block_until_ready(_unstack_leaf(x, joined=joined, dtype=dtype))
  return tuple({k: x[i] for k, x in stacks.items()} for i in range(config.num_layers))


@functools.partial(jax.jit, static_argnames=('joined', 'dtype'))
def _unstack_leaf(x: Array, *, joined: bool, dtype: str) -> tuple[Array, ...]:
  x = x.reshape(*x.shape[:-2], -1) if joined else x
  return tuple(x.astype(dtype))
