"""First light, part 2: checks each of our kernels against a plain reference.

Inputs are new random numbers in each run (the seed is in the line), and outputs go to
arrays filled with NaN, so that numbers which a kernel does not write show up. The
reference computes the same in float32. A gap is the largest difference of an output or a
gradient, as a fraction of the reference's largest number.

Hopper GPUs have row_attention and slot_attention, TPUs tree_attention and
prefill_attention; a CPU interprets all four, on a few tokens. GPUs and TPUs use JAX's
kernels for the products of experts.
"""

from collections.abc import Callable, Iterator
import contextlib
import functools
import os
import secrets
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from agent_r1_jax.models import experts, kv_cache
from agent_r1_jax.models.kernels import (
  block_attention,
  group_products,
  hopper,
  row_attention,
  slot_attention,
)
from experiments.bench.light import card, lines

_WHAT = flags.DEFINE_enum(
  'what',
  'rows',
  ['rows', 'slots', 'groups', 'time'],
  'Which kernels to check, or to time them.',
  flag_values=lines.FLAGS,
)
# A few bits of bfloat16; hopper.py disables a kernel from .05 on.
LARGEST_GAP = 0.02


def check() -> Iterator[lines.Line]:
  """Checks the kernels for this platform; on a CPU all of them, interpreted."""
  platform = jax.default_backend()
  found: dict[str, tuple[Callable[..., Any], Callable[..., Iterator[lines.Line]]]] = {}
  if _WHAT.value == 'rows':
    if platform != 'tpu':
      found['row_attention'] = row_attention.attend, _check_rows
    if platform != 'gpu':
      from agent_r1_jax.models.kernels import tpu_attention

      found['tree_attention'] = tpu_attention.attend_along_trees, _check_rows
  elif _WHAT.value == 'slots':
    if platform != 'tpu':
      found['slot_attention'] = slot_attention.attend, _check_slots
    if platform != 'gpu':
      from agent_r1_jax.models.kernels import tpu_attention

      found['prefill_attention'] = tpu_attention.attend_to_slots, _check_prefill
  for name, (attend, compare) in found.items():
    interpreted = contextlib.nullcontext()
    if platform == 'cpu':
      attend, interpreted = _interpret(name, attend)
    elif platform == 'gpu' and not hopper.is_here():
      yield {'what': name, 'failed': 'this GPU is not of Hopper: cuDNN or XLA attends'}
      continue
    with interpreted:
      for line in compare(name, attend):
        yield line | {'interpreted': platform == 'cpu'}


def _interpret(name: str, attend: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
  """Returns a kernel for interpretation on a CPU, and the context to call it in."""
  if name in ('tree_attention', 'prefill_attention'):
    from jax.experimental.pallas import tpu as pltpu

    return attend, pltpu.force_tpu_interpret_mode()
  try:
    from jax.experimental.pallas import mosaic_gpu

    params: Any = mosaic_gpu.InterpretGPUParams  # pyright: ignore
  except AttributeError:  # Before jax 0.11 it has no public name.
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams as params
  return functools.partial(attend, interpret=params()), contextlib.nullcontext()


def _check_rows(name: str, attend: Callable[..., Any]) -> Iterator[lines.Line]:
  """Checks attention over rows of sequences and of trees: output and gradients."""
  T = 256 if lines.is_tiny() else 2048
  cases = ((128, 4, 2),) if lines.is_tiny() else ((128, 16, 2), (64, 14, 2))
  # Heads of 64 numbers do not fill a TPU's tiles.
  for H, N, K in cases[:1] if name == 'tree_attention' else cases:
    rng, seed = _make_rng()
    q, k, v, dout = (_draw(rng, 2, T, heads, H) for heads in (N, K, K, N))
    ends = jnp.asarray(np.stack([_draw_texts(rng, T), _draw_tree(rng, T)]))

    def differentiate(function, q, k, v, dout, ends=ends):
      out, pull = jax.vjp(lambda *qkv: function(*qkv, ends), q, k, v)
      return out, *pull(dout.astype(out.dtype))

    found = _fill_nan(functools.partial(differentiate, attend), q, k, v, dout)
    wide = [x.astype(jnp.float32) for x in (q, k, v, dout)]
    plain = jax.jit(functools.partial(differentiate, block_attention.attend))(*wide)
    gaps = [hopper.find_gap(x, y) for x, y in zip(found, plain, strict=True)]
    yield _describe(f'{name}, heads of {H}', max(gaps), seed=seed, gaps=gaps)


def _check_slots(name: str, attend: Callable[..., Any]) -> Iterator[lines.Line]:
  """Checks attention to the used slots of a cache, in 16 and in 8 bits."""
  S = 256 if lines.is_tiny() else 4096
  cases = (128, 1, False), (64, 5, True), (64, 1, False), (128, 5, True)
  for H, T, rounded in cases[:2] if lines.is_tiny() else cases:
    rng, seed = _make_rng()
    B, N, K = (2, 4, 2) if lines.is_tiny() else (16, 16, 2)
    q, k, v = _draw(rng, B, T, N, H), _draw(rng, B, K, S, H), _draw(rng, B, K, S, H)
    first = jnp.asarray(rng.integers(0, S - T + 1, (B, 1)))
    positions, scales = first + jnp.arange(T)[None], None
    if rounded:
      (k, k_scales), (v, v_scales) = map(kv_cache.round_heads, (k, v))
      scales = k_scales, v_scales
    call = functools.partial(attend, positions_BT=positions, scales=scales)
    found = _fill_nan(call, q, k, v)
    plain = slot_attention.attend_plainly(q, k, v, positions, scales)
    what = f'{name}, heads of {H}, {T} queries' + (', 8 bits' if rounded else '')
    yield _describe(what, hopper.find_gap(found, plain), seed=seed)


def _check_prefill(name: str, attend: Callable[..., Any]) -> Iterator[lines.Line]:
  """Checks attention of a prefill to the slots of a cache."""
  rng, seed = _make_rng()
  (B, T, N, K, S), H = (
    (1, 128, 2, 1, 256) if lines.is_tiny() else (4, 256, 16, 2, 4096),
    128,
  )
  q, k, v = _draw(rng, B, T, N, H), _draw(rng, B, K, S, H), _draw(rng, B, K, S, H)
  first = jnp.asarray(rng.integers(0, S - T + 1, (B, 1)))
  positions = first + jnp.arange(T)[None]
  call = functools.partial(attend, positions_BT=positions, first=0, heads=K)
  found = _fill_nan(call, q, k, v)
  plain = slot_attention.attend_plainly(q, k, v, positions)
  yield _describe(name, hopper.find_gap(found, plain), seed=seed)


def time_rows() -> Iterator[lines.Line]:
  """Times output and gradients of one long sequence, by our kernel and by cuDNN."""
  if _WHAT.value != 'time' or jax.default_backend() != 'gpu':
    return
  T, N, K, H = 16_384, 16, 8, 128
  q, k, v, dout = (_draw(np.random.default_rng(0), 1, T, n, H) for n in (N, K, K, N))
  whole = jnp.full((1, T), T)
  # Scores and values, and five products backward, each of half of T x T.
  operations = 7 * 2 * N * H * T * T / 2
  ways: dict[str, Callable[..., Any]] = {}
  if os.environ.get(row_attention.VARIABLE) != '0':
    ways['row_attention'] = lambda q, k, v: row_attention.attend(q, k, v, whole)
  ways['cuDNN'] = lambda q, k, v: jax.nn.dot_product_attention(
    q, k, v, is_causal=True, implementation='cudnn'
  )
  for name, way in ways.items():

    @jax.jit
    def step(q, k, v, dout, way=way):
      out, pull = jax.vjp(way, q, k, v)
      return out, pull(dout)

    first, seconds = lines.measure_seconds(
      functools.partial(step, q, k, v, dout), calls=3
    )
    yield lines.make(
      f'{name}, one text of {T} tokens, output and gradients',
      1e3 * seconds,
      'ms',
      1e3 * operations / card.find_peak(),
      first_seconds=first,
    )


def _describe(what: str, gap: float, **more: Any) -> lines.Line:
  line = lines.make(what, gap, 'of the largest number', **more)
  # A gap of NaN fails: comparisons with NaN are False.
  return line if gap < LARGEST_GAP else line | {'failed': f'the gap is {gap:.3g}'}


def _fill_nan(call: Callable[..., Any], *inputs: jax.Array) -> Any:
  """Computes a call whose outputs overwrite arrays of NaN."""
  shapes = jax.eval_shape(call, *inputs)
  poison = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), shapes)
  # Freed arrays of NaN also fill the memory of a call's temporaries.
  jax.block_until_ready([jnp.full((1 << 20,), jnp.nan) for _ in range(16)])
  # XLA writes the outputs to donated arrays of their shapes.
  write = jax.jit(lambda _, *inputs: call(*inputs), donate_argnums=0, keep_unused=True)
  return write(poison, *inputs)


def _make_rng() -> tuple[np.random.Generator, int]:
  seed = secrets.randbits(32)
  return np.random.default_rng(seed), seed


def _draw(rng: np.random.Generator, *shape: int) -> jax.Array:
  return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)


def _draw_texts(rng: np.random.Generator, T: int) -> np.ndarray:
  """Draws the ends of sequences that fill a row up to some padding, [T]."""
  cuts = np.sort(rng.choice(np.arange(1, T - 10), 4, replace=False))
  ends = np.arange(1, T + 1)  # Padding sees itself.
  for start, end in zip([0, *cuts[:-1]], cuts, strict=True):
    ends[start:end] = end
  return ends


def _draw_tree(rng: np.random.Generator, T: int) -> np.ndarray:
  """Draws the ends of a tree: a root with two branches, one of which branches, [T]."""
  a, b, c, d = np.sort(rng.choice(np.arange(1, T), 4, replace=False))
  ends = np.full(T, T)
  ends[a:d], ends[b:c] = d, c
  return ends


def check_groups() -> Iterator[lines.Line]:
  """Checks JAX's kernels for products of sorted rows, which no CPU interprets."""
  if _WHAT.value != 'groups' or jax.default_backend() == 'cpu':
    return
  if jax.default_backend() == 'gpu' and not hopper.is_here():
    yield {'what': 'group_products', 'failed': 'this GPU is not of Hopper: in rounds'}
    return
  rng, seed = _make_rng()
  S, E, D, I = 8192, 32, 2048, 768
  sizes = jnp.asarray(rng.multinomial(S - 100, rng.dirichlet(np.ones(E))), jnp.int32)
  given = _draw(rng, S, D), _draw(rng, E, D, I), _draw(rng, S, I)

  def differentiate(multiply, x, kernel, dout):
    out, pull = jax.vjp(lambda *given: multiply(*given, sizes), x, kernel)
    return out, *pull(dout.astype(out.dtype))

  found = _fill_nan(functools.partial(differentiate, group_products.multiply), *given)
  wide = [x.astype(jnp.float32) for x in given]
  plainly = functools.partial(differentiate, group_products.multiply_plainly)
  plain = jax.jit(plainly)(*wide)
  gaps = [hopper.find_gap(x, y) for x, y in zip(found, plain, strict=True)]
  yield _describe('group_products', max(gaps), seed=seed, gaps=gaps)


def time_experts() -> Iterator[lines.Line]:
  """Times experts of a layer of Qwen3-30B-A3B and gradients, with and without kernels."""
  if _WHAT.value != 'groups' or jax.default_backend() == 'cpu':
    return
  M, k, E, D, I = 8192, 8, 128, 2048, 768
  rng = np.random.default_rng(0)
  shapes = (E, D, I), (E, D, I), (E, I, D)
  gate, up, down = (_draw(rng, *shape) * 0.02 for shape in shapes)
  kernels = experts.Kernels(gate, up, down)
  x, dout = _draw(rng, 1, M, D), _draw(rng, 1, M, D)
  weight = jnp.full((1, M, k), 1 / k)
  expert = jnp.asarray(rng.permuted(np.tile(np.arange(E), (M, 1)), axis=1)[None, :, :k])
  # Three products per pair of token and expert, and twice as many for the gradient.
  operations = 9 * 2 * M * k * D * I
  ways = {'group_products': '1', 'without': '0'}
  if jax.default_backend() == 'tpu':
    del ways['without']  # The variable is for GPUs.
  elif os.environ.get(group_products.VARIABLE) == '0':
    del ways['group_products']  # The kernels failed their check.
  for name, variable in ways.items():
    os.environ[group_products.VARIABLE] = variable
    hopper.passes_check.cache_clear()

    @jax.jit
    def step(x, kernels, dout):
      activate = lambda gate, up: jax.nn.silu(gate) * up
      mix = lambda x, kernels: experts.mix(x, weight, expert, kernels, activate)
      out, pull = jax.vjp(mix, x, kernels)
      return out, pull(dout)

    first, seconds = lines.measure_seconds(
      functools.partial(step, x, kernels, dout), calls=3
    )
    yield lines.make(
      f'{name}, {k} of {E} experts, {M} tokens, output and gradients',
      1e3 * seconds,
      'ms',
      1e3 * operations / card.find_peak(),
      first_seconds=first,
    )


MEASUREMENTS = (check, time_rows, check_groups, time_experts)

if __name__ == '__main__':
  lines.run(MEASUREMENTS)
