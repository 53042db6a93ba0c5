"""Makes the engine's parameters from the learner's: layer by layer, cast and merged.

The learner's parameters are stacked over the layers, in float32, with LoRA's separate.
Results are the same, but a decode saves slices, casts and LoRA's products.
"""

import functools

import jax
from jax import Array
import jax.numpy as jnp

from agent_r1_jax.models import decoder, four_bits, lora, quantization, sharding


def unstack(
  params: decoder.Params, config: decoder.DecoderConfig, weights: str = 'model'
) -> decoder.Params:
  """Makes the parameters of `decoder.extend` from the learner's parameters.

  `layers` becomes a tuple with a dict per layer: an array [L, ...] becomes L arrays.
  Norms, routers and decays stay float32, everything else is cast to config.dtype. LoRA is
  merged one kernel at a time: all merged kernels together would be a second copy of the
  layers. Adapters of frozen 8-bit kernels stay separate, and experts of 4 bits stay as
  they are.

  Args:
    params: The learner's parameters.
    config: The policy's shape.
    weights: 'model'; 'unpacked', which gives experts of 4 bits config.dtype as well; or
      'int8' or 'fp8', for kernels of 8 bits with a scale per output (quantization.py).

  Raises:
    ValueError: The format is unknown, or this model does not support it.
  """
  quantization.check(weights, config, 'engine.weights')
  others = {k: v for k, v in params.items() if k not in ('layers', 'final_norm')}
  cast = sharding.map_named(
    lambda path, x: round_leaf(x, _choose_dtype(path, x, config)), others
  )
  layers = [{} for _ in range(config.num_layers)]
  for place, stacked in params['layers'].items():
    parts = _unstack_layers(stacked, config, f'layers/{place}', weights)
    for layer, part in parts.items():
      layers[layer][place] = part
  return params | cast | {'layers': tuple(layers)}


def _unstack_layers(
  stacked: decoder.Params, config: decoder.DecoderConfig, path: str, weights: str
) -> dict[int, decoder.Params]:
  """Unstacks the part of the layers at `path`; returns layer -> its parameters."""
  layers: dict[int, decoder.Params] = {}
  frozen = quantization.SCALE in stacked
  merges = 'lora_a' in stacked and not frozen
  if weights == four_bits.UNPACKED:
    stacked = four_bits.pair(stacked)
  for name, x in (lora.merge(stacked) if merges else stacked).items():
    place = f'{path}/{name}'
    if isinstance(x, dict):
      for layer, part in _unstack_layers(x, config, place, weights).items():
        layers.setdefault(layer, {})[name] = part
    else:
      # [L, D, N, H] -> [L, D, N H], biases likewise: TPUs tile the last two axes, so
      # XLA would copy each kernel in every decode to join N and H.
      is_query = place.startswith(('layers/attn/q/', 'layers/full/q/'))
      joined = is_query and name not in ('lora_a', 'lora_scale')
      kept = frozen and name != 'bias'
      if isinstance(x, four_bits.Packed):
        stacks = {name: _unpack_stack(x, dtype=config.dtype)}
      elif weights in quantization.FORMATS and place in quantization.KERNELS:
        inputs = len(quantization.KERNELS[place].inputs)
        parts = _unstack_rounded(x, inputs=inputs, joined=joined, weights=weights)
        stacks = dict(zip((name, quantization.SCALE), parts, strict=True))
      else:
        dtype = x.dtype.name if kept else _choose_dtype(place, x, config)
        stacks = {name: _unstack_leaf(x, joined=joined, dtype=dtype)}
      # Wait, because a merged kernel is freed only when its slices are done.
      stacks = jax.block_until_ready(stacks)
      for leaf, stack in stacks.items():
        for layer, part in zip(config.list_layers(place), stack, strict=True):
          layers.setdefault(layer, {})[leaf] = part
  return layers


def cast_params(params: decoder.Params, config: decoder.DecoderConfig) -> decoder.Params:
  """Casts each leaf as `unstack` does, which returns the same for the result.

  For sending parameters without adapters: bfloat16 has half the bytes.
  """
  return sharding.map_named(
    lambda path, x: round_leaf(x, _choose_dtype(path, x, config)), params
  )


def round_leaf(x: Array, dtype: str) -> Array:
  """Casts an array; XLA may drop a cast to bfloat16 and back, but never this one."""
  if dtype == 'bfloat16' and x.dtype == jnp.float32:
    x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
  return x.astype(dtype)


def _choose_dtype(place: str, x: Array, config: decoder.DecoderConfig) -> str:
  exact = any(part in place for part in ('_norm', '/router', '/decay/'))
  exact = exact or x.dtype == jnp.uint8  # Experts of 4 bits.
  return x.dtype.name if exact else config.dtype


@functools.partial(jax.jit, static_argnames=('joined', 'dtype'))
def _unstack_leaf(x: Array, *, joined: bool, dtype: str) -> tuple[Array, ...]:
  return tuple(round_leaf(_join(x, joined), dtype))


@functools.partial(jax.jit, static_argnames=('inputs', 'joined', 'weights'))
def _unstack_rounded(
  x: Array, *, inputs: int, joined: bool, weights: str
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
  x = _join(x, joined)
  values, scale = quantization.quantize_stack(x, inputs=inputs, format_name=weights)
  return tuple(values), tuple(scale)


@functools.partial(jax.jit, static_argnames='dtype')
def _unpack_stack(packed: four_bits.Packed, *, dtype: str) -> tuple[Array, ...]:
  layers = zip(packed.codes, packed.exponents, strict=True)
  return tuple(four_bits.unpack(four_bits.Packed(*layer), dtype) for layer in layers)


def _join(x: Array, joined: bool) -> Array:
  return x.reshape(*x.shape[:-2], -1) if joined else x
