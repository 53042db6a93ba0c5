"""Low-rank adapters (LoRA, arXiv 2106.09685): W + s · A · B, with A and B trained.

An adapter is three leaves next to the kernel that it adapts:

  {'kernel': [L, D, N, H], 'lora_a': [L, D, R], 'lora_b': [L, R, N, H], 'lora_scale': [L]}

so sharding, checkpoints and optimizers see ordinary parameters. `merge` returns plain
parameters, for export and for the engine.

The sampler and the learner must compute with the same numbers, so `project` computes the
same merged kernel as `merge`, one projection at a time, instead of x · W + s x · A · B.
The costs, for M tokens and a kernel of D x F:

- forward: 2 R D F operations on top of the projection's 2 M D F, and one temporary kernel
  of D x F. x · A · B would take 2 M R (D + F), which is more once M > D F / (D + F);
- backward: the kernel is merged again rather than stored. The frozen kernel has no
  gradient: dA = s xᵀ (dy Bᵀ) and dB = s (x A)ᵀ dy take 6 M R (D + F) operations instead
  of its 2 M D F, and no array of a kernel's size is made or summed.

A frozen 8-bit kernel (quantization.py) is merged only for export; otherwise the sampler
would write and read a 16-bit kernel for every token. Sampler and learner both compute
x · W + s x · A · B for it (`project_alone`).

The engine can also decode rows of several adapters at once: `Adapters` and
`project_rows`, which compute x · W + s x · A · B.

Letters: L layers, R rank, D inputs and F outputs of a projection, N, H as in the decoder;
B rows, T tokens per row, n adapters, I all inputs and O all outputs as one axis.
"""

from collections.abc import Sequence
import functools
import math
from typing import Any, NamedTuple

from flax import traverse_util
import jax
from jax import Array
import jax.numpy as jnp
from jaxtyping import Float, Int

from agent_r1_jax.models import families, quantization, sharded_params, sharding
from agent_r1_jax.models.decoder_config import DecoderConfig
from agent_r1_jax.models.family import Parameter

LEAVES = ('lora_a', 'lora_b', 'lora_scale')
# The learned parameters of a model with adapters.
_LEARNED = {'lora_a', 'lora_b', 'value_head'}


class Adapters(NamedTuple):
  """Several adapters, and the index of each row's; see engine/adapters.py."""

  # For each layer {'attn': {'q': {'a': [n, R, I], 'b': [n, R, O]}, ...}, ...}.
  layers: tuple[dict[str, Any], ...]
  index: Int[Array, 'B']  # The adapter of each row; 0 is none.

  def get_layer(self, layer: int) -> dict[str, Any]:
    """Returns one layer's adapters, with the index next to each 'a' and 'b'."""
    return {
      place: {name: leaf | {'index': self.index} for name, leaf in kernels.items()}
      for place, kernels in self.layers[layer].items()
    }


def check_targets(targets: Sequence[str]) -> None:
  """Raises ValueError if targets are missing or unknown."""
  names = tuple(dict.fromkeys(x.target for x in families.KERNELS.values()))
  if not targets or set(targets) - {*names}:
    raise ValueError(f'lora_targets is {tuple(targets)}; give one or more of {names}.')


def list_targets(config: DecoderConfig) -> list[Parameter]:
  """Lists the layers' kernels that can have an adapter."""
  own = {parameter.path: parameter for parameter in config.facts.parameters}
  paths = [path for path in families.KERNELS if path in own]
  return [own[path] for path in paths if config.list_layers(path)]


def get_shapes(
  config: DecoderConfig, target: Parameter, rank: int
) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of an adapter's leaves for all layers, as `add` makes them."""
  inputs, outputs = (
    tuple(config.sizes[letter] for letter in letters)
    for letters in (target.inputs, target.dims.split('>')[1])
  )
  L = len(config.list_layers(target.path))
  shapes = (L, *inputs, rank), (L, rank, *outputs), (L,)
  return dict(zip(LEAVES, shapes, strict=True))


def add(
  params: dict[str, Any],
  rank: int,
  targets: Sequence[str],
  alpha: float,
  key: Array,
) -> dict[str, Any]:
  """Adds adapters to parameters; B is 0, so the policy stays the same.

  A is normal with variance 1 / inputs, independent of the other targets. The scale s is
  alpha / rank; `targets` are names in families.KERNELS, in any order. Other arrays are
  shared, not copied.

  Raises:
    ValueError: The rank is below 1, alpha is not above 0, targets are missing, unknown or
      not in the model, or the parameters already have adapters.
  """
  if rank < 1:
    raise ValueError(f'lora_rank is {rank}; it must be at least 1 for adapters.')
  if not alpha > 0:
    raise ValueError(f'lora_alpha is {alpha}; it must be above 0, or nothing is learned.')
  check_targets(targets)
  if is_in(params):
    raise ValueError('params have adapters already; merge them first.')
  layers, added = dict(params['layers']), set()
  for number, target in enumerate(families.KERNELS.values()):
    place, name = target.place, target.target
    if name in targets and name in layers.get(place, {}):
      plain, target_key = layers[place][name], jax.random.fold_in(key, number)
      adapter = _adapter(
        plain['kernel'].shape, len(target.inputs), rank, alpha / rank, target_key
      )
      layers[place] = layers[place] | {name: plain | adapter}
      added.add(name)
  for name in targets:
    if name not in added:
      raise ValueError(
        f'lora_targets has {name}, and the layers of this model have none, or experts in '
        'its place, which get no adapters; give q,k,v,o or some of them.'
      )
  return params | {'layers': layers}


def is_in(params: dict[str, Any]) -> bool:
  """Whether any kernel has an adapter."""
  return any(path[-1] in LEAVES for path in traverse_util.flatten_dict(params))


def merge(params: dict[str, Any]) -> dict[str, Any]:
  """Merges the adapters into their kernels; other arrays are shared, not copied.

  8-bit kernels become float32.
  """
  if 'lora_a' in params or quantization.SCALE in params:
    kernel = params['kernel']
    if quantization.SCALE in params:
      kernel = quantization.dequantize(kernel, params[quantization.SCALE])
    if 'lora_a' in params:
      kernel = _merge_kernel(kernel, *(params[name] for name in LEAVES))
    merged = {*LEAVES, quantization.SCALE}
    return {k: v for k, v in params.items() if k not in merged} | {'kernel': kernel}
  return {k: merge(v) if isinstance(v, dict) else v for k, v in params.items()}


def take(params: dict[str, Any]) -> dict[str, Any]:
  """Returns only the adapters' leaves, {'layers': {'attn': {'q': {...}}}}.

  Raises:
    ValueError: There are no adapters.
  """
  if not is_in(params):
    raise ValueError('params have no adapters; lora.add adds them.')
  flat = traverse_util.flatten_dict(params)
  leaves = {path: x for path, x in flat.items() if path[-1] in LEAVES}
  return traverse_util.unflatten_dict(leaves)


def get_rank(params: dict[str, Any]) -> int:
  """Returns the highest rank of the adapters; 0 if there are none."""
  flat: Any = traverse_util.flatten_dict(params)
  return max((x.shape[-1] for path, x in flat.items() if path[-1] == 'lora_a'), default=0)


def split(params: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
  """Splits parameters into learned and frozen parameters.

  With adapters, A, B and a value head are learned; without, all parameters are.
  """
  if not is_in(params):
    return params, {}
  learned, frozen = {}, {}
  for path, x in traverse_util.flatten_dict(params).items():
    side = frozen if _LEARNED.isdisjoint(path) else learned
    side[path] = x
  return traverse_util.unflatten_dict(learned), traverse_util.unflatten_dict(frozen)


def join(learned: dict[str, Any], frozen: dict[str, Any]) -> dict[str, Any]:
  """The inverse of `split`."""
  flat = traverse_util.flatten_dict
  return traverse_util.unflatten_dict(flat(learned) | flat(frozen))


def project_alone(x: Array, a: Array, b: Array, scale: Array) -> Array:
  """s x · A · B, [*M, *inputs] to float32 [*M, *outputs], from operands in x's dtype.

  The barrier keeps XLA from fusing x · A and x · W into one product, for which it would
  concatenate W and A into a new kernel.
  """
  x = jax.lax.optimization_barrier(x)
  product = functools.partial(jnp.tensordot, preferred_element_type=jnp.float32)
  xa = product(x, a.astype(x.dtype), a.ndim - 1)
  return product((scale * xa).astype(x.dtype), b.astype(x.dtype), 1)


def project_rows(
  x: Float[Array, '*BT I'],
  a: Float[Array, 'n R I'],
  b: Float[Array, 'n R O'],
  index: Int[Array, 'B'],
) -> Float[Array, '*BT O']:
  """x · A · B with each row's own A and B, float32; A includes the scale.

  Computes x · A first. A row's sums depend neither on other rows' adapters nor on the
  index of its own. Rows of adapter 0, which is all zeros, get zeros.
  """
  wide: Any = {'preferred_element_type': jnp.float32}
  x_BTI = x.reshape(len(index), -1, x.shape[-1])
  xa_BTR = jnp.einsum('bti,bri->btr', x_BTI, a[index], **wide).astype(x.dtype)
  y_BTO = jnp.einsum('btr,bro->bto', xa_BTR, b[index], **wide)
  return y_BTO.reshape(*x.shape[:-1], b.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def project(
  x: Array, kernel: Array, name: str, a: Array, b: Array, scale: Array
) -> Array:
  """x · (W + s · A · B) in x's type, [*M, *inputs] to [*M, *outputs].

  x, A and B have gradients; W and s are frozen. W must be the caller's own array: a scan
  over layers that saves a derived array for the backward pass stacks a copy of all
  kernels. `name` is passed to sharded_params.gather_kernel.
  """
  merged = _merge_kernel(kernel, a, b, scale).astype(x.dtype)
  merged = sharded_params.gather_kernel(merged, name)
  return jnp.tensordot(x, merged, a.ndim - 1)


def _forward(x, kernel, name, a, b, scale):
  return project(x, kernel, name, a, b, scale), (x, kernel, a, b, scale)


def _backward(name, saved, dy):
  x, kernel, a, b, scale = saved
  inputs, outputs = a.ndim - 1, b.ndim - 1
  tokens = tuple(range(x.ndim - inputs))
  merged = _merge_kernel(kernel, a, b, scale).astype(x.dtype)
  merged = sharded_params.gather_kernel(merged, name)
  last = lambda y, n: tuple(range(y.ndim - n, y.ndim))
  dx = jnp.tensordot(dy, merged, (last(dy, outputs), last(merged, outputs)))

  # XLA's CPU backend compiles some of these bfloat16 products but cannot run them;
  # float32 gives the same products and sums.
  wide = jnp.float32 if sharding.platform() == 'cpu' else x.dtype

  def product(left, right, axes):
    left, right = (y.astype(x.dtype).astype(wide) for y in (left, right))
    return jnp.tensordot(left, right, axes, preferred_element_type=jnp.float32)

  dyb = product(dy, b, (last(dy, outputs), last(b, outputs)))
  xa = product(x, a, inputs)
  da = scale * product(x, dyb, (tokens, tokens))
  db = scale * product(xa, dy, (tokens, tokens))
  return dx, None, da.astype(a.dtype), db.astype(b.dtype), None


project.defvjp(_forward, _backward)


@jax.jit
def _merge_kernel(kernel, a, b, scale):
  """W + s · A · B in W's type, for one layer or for a stack of them.

  Every chip computes the product in float32, so the sum is rounded the same way in every
  program.
  """
  if scale.ndim:
    return jax.lax.map(lambda layer: _merge_kernel(*layer), (kernel, a, b, scale))
  product = jnp.tensordot(scale * a, b, 1, precision=jax.lax.Precision.HIGHEST)
  return (kernel.astype(jnp.float32) + product).astype(kernel.dtype)


def _adapter(shape, inputs: int, rank: int, scale: float, key: Array) -> dict[str, Array]:
  """Makes the three leaves for a stacked kernel of `shape`."""
  L, into, out = shape[0], shape[1 : inputs + 1], shape[inputs + 1 :]
  noise = jax.random.normal(key, (L, *into, rank))
  return {
    'lora_a': noise / math.sqrt(math.prod(into)),
    'lora_b': jnp.zeros((L, rank, *out)),
    'lora_scale': jnp.full(L, scale, jnp.float32),
  }
