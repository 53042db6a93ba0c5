"""Optimizers: Adam with 8 or 2 bytes of state per parameter, Adafactor, and Muon.

Adam's step is m̂ / (√v̂ + ε) with m ← β₁ m + (1 - β₁) g and v ← β₂ v + (1 - β₂) g². The
default of β₂ is 0.95, where PyTorch, verl and TRL use 0.999: a run has some hundreds of
steps, too few for an average over 1000.

| optimizer | moments of a large kernel | bytes per parameter |
|---|---|---|
| `adamw` | two of float32 | 8 |
| `adamw8` | two of float8; float32 scales of rows of the last axis | 2 + 8 / row |
| `adafactor` | means of the second over each of two axes | 0.01 to 0.1 |
| `muon` | one of float32, for the layers' kernels; others as `adamw` | 4 |

tests/test_optimizers.py measures these. Neither optax 0.2.8 nor any other maintained
library for both JAX versions in requirements.txt has 8-bit moments.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import optax
from optax import contrib

from agent_r1_jax import config as config_lib
from agent_r1_jax.models import families, sharding

# float8 with 3 bits of mantissa, its largest number, and its smallest positive one.
_FLOAT8, _LARGEST, _SMALLEST = jnp.float8_e4m3fn, 448.0, 2.0**-9
# How many more bits the mantissa of float32 has.
_CUT = 20
# The root mean square of a kernel's update at learning rate 1: about Adam's (Moonlight).
_UPDATE_RMS = 0.2
# The kernels that Muon updates, by their paths.
_KERNELS = families.KERNELS


class Rounded(NamedTuple):
  """An array in float8, with a scale for each row."""

  codes: Any  # float8, of the array's shape.
  scales: Any  # float32 [..., 1]; the array is codes * scales.


class Adam8State(NamedTuple):
  """The number of updates, the first moments, and the roots of the second moments."""

  count: Array
  mu: Rounded
  root_nu: Rounded


class MuonState(NamedTuple):
  """The number of updates, and the momentum of the layers' kernels."""

  count: Array
  mu: Any


class Adam(NamedTuple):
  """β₁, β₂ and ε of Adam."""

  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8


DEFAULT = Adam()
Rate = optax.ScalarOrSchedule


def adamw(
  rate: Rate, decay: float, adam: Adam = DEFAULT, *, decay_all: bool = False
) -> optax.GradientTransformation:
  """Adam with decoupled weight decay (arXiv 1711.05101), of matrices or everything."""
  directions = optax.scale_by_adam(**adam._asdict())
  return optax.chain(directions, *_step(rate, decay, decay_all))


def adamw8(
  rate: Rate, decay: float, adam: Adam = DEFAULT, *, decay_all: bool = False
) -> optax.GradientTransformation:
  """`adamw` with 8-bit moments."""
  return optax.chain(scale_by_adam8(*adam), *_step(rate, decay, decay_all))


def adafactor(
  rate: Rate, decay: float, adam: Adam = DEFAULT, *, decay_all: bool = False
) -> optax.GradientTransformation:
  """Adafactor (arXiv 1804.04235) without momentum and with absolute step sizes.

  Learning rates have the magnitude of Adam's. The weight decay is decoupled and scales
  with the learning rate, as in `adamw`.

  Raises:
    ValueError: `adam` is not the default; Adafactor does not use it.
  """
  if adam != DEFAULT:
    raise ValueError(
      f"adam_b1, adam_b2, adam_eps are {(*adam,)}, and 'adafactor' reads none of them; "
      "leave them out, or take the kind 'adamw'."
    )
  return optax.chain(
    optax.scale_by_factored_rms(),
    optax.clip_by_block_rms(1.0),
    *_step(rate, decay, decay_all),
  )


def muon(
  rate: Rate, decay: float, adam: Adam = DEFAULT, *, decay_all: bool = False
) -> optax.GradientTransformation:
  """Muon for the kernels of the layers, `adamw` for all other parameters.

  Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) steps along the
  orthogonal matrix nearest to a kernel's momentum, U Vᵀ of U S Vᵀ. Newton-Schulz steps
  approximate it: their singular values are 0.7 to 1.2 instead of 1. A kernel is one
  matrix of inputs x outputs per layer. Embeddings, heads, norms, biases and LoRA get
  AdamW with the numbers of `adam`, which Muon itself does not use.

  It differs from that article in the size of the step, 0.2 √max(inputs, outputs) U Vᵀ
  (Moonlight, arXiv 2502.16982): the root mean square of the entries of U Vᵀ is
  1 / √max(inputs, outputs), so that updates are about as large as Adam's for kernels of
  any shape, and all parameters share Adam's learning rate and weight decay.
  """
  directions: dict[Any, optax.GradientTransformation] = {
    'muon': scale_by_muon(),
    'adamw': optax.scale_by_adam(**adam._asdict()),
  }
  return optax.chain(optax.partition(directions, _label), *_step(rate, decay, decay_all))


KINDS = {'adamw': adamw, 'adamw8': adamw8, 'adafactor': adafactor, 'muon': muon}


def make(options: config_lib.Optimizer, rate: float) -> optax.GradientTransformation:
  """Makes one of KINDS with clipped gradients and a linear warm-up of the rate.

  Raises:
    ValueError: There is no such kind, or a number is out of range or not used by this
      kind.
  """
  options.check()
  schedule = optax.linear_schedule(rate / (options.warmup + 1), rate, options.warmup)
  adam = Adam(options.adam_b1, options.adam_b2, options.adam_eps)
  decay = {'decay': options.weight_decay, 'decay_all': options.decay_all}
  optimizer = KINDS[options.kind](schedule, adam=adam, **decay)
  return optax.chain(optax.clip_by_global_norm(options.clip_norm), optimizer)


def _step(rate: Rate, decay: float, decay_all: bool):
  """Adds the weight decay to a direction, and scales it by the rate."""

  def add(path, direction, param):
    kept = path.endswith(('scale', 'bias', 'sinks')) and not decay_all
    return direction if kept or not decay else direction + decay * param

  # Not optax's mask: it adds a level to the state, which older checkpoints lack.
  add_all = functools.partial(sharding.map_named, add)
  return optax.stateless(add_all), optax.scale_by_learning_rate(rate)


def scale_by_adam8(
  b1: float = DEFAULT.b1, b2: float = DEFAULT.b2, eps: float = DEFAULT.eps
) -> optax.GradientTransformation:
  """Adam's direction from 8-bit moments (the aim of arXiv 2110.02861).

  It differs from that paper in two ways. Moments are float8 with one scale per row and
  the parameter's shape, so that they are sharded like the parameter. And they are rounded
  stochastically, so that their mean is exact: with rounding to nearest, a moment that
  changes by less than half a step would never change again. The second moment is stored
  as its root, whose exponents have half the range; it is rounded to 0 only if its entire
  row is 0.
  """

  def init(params):
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, _FLOAT8), params)
    ones = jax.tree.map(lambda p: jnp.ones((*p.shape[:-1], 1)), params)
    # The two moments need separate buffers: each is donated.
    moments = (Rounded(*jax.tree.map(jnp.copy, (zeros, ones))) for _ in range(2))
    return Adam8State(jnp.zeros((), jnp.int32), *moments)

  def update(updates, state, params=None):
    del params
    count = state.count + 1
    leaves, structure = jax.tree.flatten(updates)
    moments = (state.mu.codes, state.mu.scales, state.root_nu.codes, state.root_nu.scales)
    columns = zip(leaves, *(structure.flatten_up_to(m) for m in moments), strict=True)
    results = []
    for number, (g, *old) in enumerate(columns):
      key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), count), number)
      g, (m, r) = g.astype(jnp.float32), (_decode(*old[:2]), _decode(*old[2:]))
      m = b1 * m + (1 - b1) * g
      v = b2 * jnp.square(r) + (1 - b2) * jnp.square(g)
      step = (m / (1 - b1**count)) / (jnp.sqrt(v / (1 - b2**count)) + eps)
      first, second = jax.random.split(key)
      new = (*_encode(m, first), *_encode(jnp.sqrt(v), second, least=_SMALLEST))
      results.append((step, *new))
    steps, *new = map(structure.unflatten, zip(*results, strict=True))
    return steps, Adam8State(count, Rounded(*new[:2]), Rounded(*new[2:]))

  return optax.GradientTransformation(init, update)


def scale_by_muon() -> optax.GradientTransformation:
  """Muon's direction for kernels of layers, with updates of Adam's size (see `muon`).

  This is optax's, with five Newton-Schulz steps and Nesterov momentum of 0.95. Their
  coefficients are left out of the state: they are constants, and cannot be sharded.
  """
  inner = contrib.scale_by_muon(weight_dimension_numbers=_dimensions)

  def init(params):
    state: Any = inner.init(params)
    return MuonState(state.count, state.mu)

  def update(updates, state, params=None):
    full: Any = inner.init({})
    full = full._replace(count=state.count, mu=state.mu)
    steps, full = inner.update(updates, full, params)
    steps = sharding.map_named(_scale_by_shape, steps)
    return steps, MuonState(full.count, full.mu)

  return optax.GradientTransformation(init, update)


def _label(params: Any) -> Any:
  """Names the optimizer of each leaf."""
  label = lambda path, _: 'muon' if path in _KERNELS else 'adamw'
  return sharding.map_named(label, params)


def _dimensions(params: Any) -> Any:
  """Splits the dimensions of each kernel [L, *inputs, *outputs] for optax."""

  def divide(path, x):
    first_output = 1 + len(_KERNELS[path].inputs)
    return contrib.MuonDimensionNumbers(
      tuple(range(1, first_output)), tuple(range(first_output, x.ndim))
    )

  return sharding.map_named(divide, params)


def _scale_by_shape(path: str, x: Array) -> Array:
  inputs = math.prod(x.shape[1 : 1 + len(_KERNELS[path].inputs)])
  outputs = x[0].size // inputs
  return _UPDATE_RMS * math.sqrt(max(inputs, outputs)) * x


def _decode(codes, scales):
  return codes.astype(jnp.float32) * scales


def _encode(x: Array, key: Array, least: float = 0.0) -> tuple[Array, Array]:
  """Rounds x stochastically, without bias where the codes are above 2⁻⁶.

  All codes of a row are at least `least`, unless the row is all zeros, which is exact:
  the first gradient of LoRA's A is such a row.
  """
  largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / _LARGEST
  scales = jnp.where(largest > 0, largest, 1.0)
  bits = jax.lax.bitcast_convert_type(jnp.abs(x) / scales, jnp.uint32)
  noise = jax.random.bits(key, x.shape, jnp.uint32) >> (32 - _CUT)
  cut = ((bits + noise) >> _CUT) << _CUT
  size = jnp.minimum(jax.lax.bitcast_convert_type(cut, jnp.float32), _LARGEST)
  size = jnp.where(largest > 0, jnp.maximum(size, least), size)
  return jnp.copysign(size, x).astype(_FLOAT8), scales
