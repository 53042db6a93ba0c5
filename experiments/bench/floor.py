"""The floor of a measurement: what its matrix products take alone, on the same machine.

Ratios to other libraries differ from machine to machine with the same code. The share of
the floor says how much of the time is the products that the model consists of, and how
much is ours to save. The products are read off the programs that run, with their shapes:
the slots of a bucket that no text uses count too.
"""

import collections
from collections.abc import Callable, Iterator
import contextlib
import functools
import math
import time
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from agent_r1_jax.engine import programs
from agent_r1_jax.models import block_attention, head
from agent_r1_jax.rl import learner

_LEAST_SECONDS = 0.02  # For which a product is repeated.


class Product(NamedTuple):
  """A matrix product: the arguments of jax.lax.dot_general, without the numbers."""

  left: tuple[int, ...]
  right: tuple[int, ...]
  dtype: str
  dimensions: Any
  result: Any  # The dtype of the result.

  @property
  def operations(self) -> int:
    """Multiplications and additions."""
    (contracted, _), (batch, _) = self.dimensions
    shared = math.prod(self.left[i] for i in (*contracted, *batch))
    return 2 * math.prod(self.left) * math.prod(self.right) // shared


def measure(run: Callable[[], Any], cpu_seconds: float) -> dict[str, float]:
  """Runs once more and says what share of `cpu_seconds` the products take."""
  with _record() as products:
    run()
  overhead = _time(Product((1, 1), (1, 1), 'float32', (((1,), (0,)), ((), ())), None))
  seconds = sum(n * (_time(p) - overhead) for p, n in products.items())
  operations = sum(n * p.operations for p, n in products.items())
  return {
    'floor_seconds': round(seconds, 4),
    'of_floor': round(seconds / cpu_seconds, 3),
    'gflop': round(operations / 1e9, 1),
  }


@contextlib.contextmanager
def _record() -> Iterator[collections.Counter[Product]]:
  """Counts the matrix products of the engine and the learner inside `with`."""
  found: collections.Counter[Product] = collections.Counter()
  # How often a product in a loop is computed, from the program's arguments and result.
  passes: dict[tuple[Any, str], Callable[..., Callable[[Product], float]]] = {
    (programs, 'prefill'): lambda args, result: lambda product: 1,
    (programs, 'decode'): lambda args, result: lambda product: int(result[2].calls.max()),
    (learner, '_gradient'): lambda args, result: _gradient_passes(*args[:2]),
  }

  def recorded(program, count, *args, **static):
    # Before the call, which frees what is donated to it.
    leaves, structure = jax.tree.flatten(args)
    shapes = tuple((x.shape, x.dtype) for x in leaves)
    result = program(*args, **static)
    times = count(args, result)
    # The shapes and settings are the same in most calls.
    products = _list_products(program, structure, shapes, tuple(sorted(static.items())))
    for product, n, looped in products:
      found[product] += n * (times(product) if looped else 1)
    return result

  with contextlib.ExitStack() as stack:
    for (module, name), count in passes.items():
      wrapped = functools.partial(recorded, getattr(module, name), count)
      stack.enter_context(mock.patch.object(module, name, wrapped))
    yield found


@functools.lru_cache(256)
def _list_products(program, structure, shapes, static) -> list[tuple[Product, int, bool]]:
  """Lists a program's products, how many there are, and whether they are in its loop."""
  args = structure.unflatten(jax.ShapeDtypeStruct(*shape) for shape in shapes)
  closed = jax.make_jaxpr(functools.partial(program, **dict(static)))(*args)
  return list(_walk(closed.jaxpr, 1, False))


def _walk(jaxpr: Any, times: int, looped: bool) -> Iterator[tuple[Product, int, bool]]:
  for equation in jaxpr.eqns:
    name, params = equation.primitive.name, equation.params
    if name == 'dot_general':
      left, right = (x.aval for x in equation.invars)
      dimensions, dtype = params['dimension_numbers'], str(left.dtype)
      result = params['preferred_element_type']
      yield Product(left.shape, right.shape, dtype, dimensions, result), times, looped
    # Loops and calls have jaxprs among their parameters, closed or not.
    for part in jax.tree.leaves([*params.values()]):
      part = getattr(part, 'jaxpr', part)
      if not hasattr(part, 'eqns'):
        continue
      repeated = params['length'] if name == 'scan' else 1
      yield from _walk(part, times * repeated, looped or name == 'while')


def _gradient_passes(params, batch) -> Callable[[Product], float]:
  """The passes of a gradient's loops: blocks of the head, or of keys that are seen."""
  vocab_size = params['embed']['embedding'].shape[0]
  wanted = int((batch.weights != 0).sum())
  head_blocks = math.ceil(wanted / head.block_tokens(vocab_size))
  if batch.tree is None:
    ends_BT = block_attention.find_ends(jnp.asarray(batch.segment_ids))
  else:
    ends_BT = jnp.asarray(batch.tree.ends)
  seen = float(block_attention.count_seen(ends_BT).mean())
  return lambda product: (
    head_blocks if vocab_size in product.left + product.right else seen
  )


@functools.cache
def _time(product: Product) -> float:
  """CPU-seconds of one product."""
  numbers = (
    jnp.asarray(np.random.default_rng(0).normal(size=shape), product.dtype)
    for shape in (product.left, product.right)
  )
  left, right = numbers
  multiply = jax.jit(
    functools.partial(
      jax.lax.dot_general,
      dimension_numbers=product.dimensions,
      preferred_element_type=product.result,
    )
  )
  multiply(left, right).block_until_ready()
  times, n = [], 1
  while len(times) < 5:
    begun = time.process_time()
    for _ in range(n):
      multiply(left, right).block_until_ready()
    seconds = time.process_time() - begun
    if seconds < _LEAST_SECONDS:
      n *= 2
    else:
      times.append(seconds / n)
  return min(times)
