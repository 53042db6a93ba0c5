"""First light, part 4: times decodes and prefills, and compares them with their bounds.

A decode of `rows` sequences with `used` slots each must read the weights once per step,
and each sequence's keys and values: its bound is their bytes at the bandwidth of a copy.
A prefill's bound is its operations. The programs are the engine's, with random
parameters.
"""

from collections.abc import Callable, Iterator
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.engine import active_request, automaton_guide, drafts
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import programs as programs_lib
from agent_r1_jax.models import costs, decoder, engine_params, kv_cache
from agent_r1_jax.models.kernels import attention_kernels
from experiments.bench import common
from experiments.bench.light import card, lines
from experiments.bench.light import update as update_lib

_GUIDES = (automaton_guide.AUTOMATA, guide_lib.TRUNCATION)
_TILE = 128
# The fraction of memory that cache and weights may take.
_FULL = 0.85


class Case(NamedTuple):
  """A decode to measure."""

  shape: str  # A key of common.SHAPES.
  rows: int
  used: tuple[int, ...] = (512, 1024, 2048, 4096)
  steps: int = 32  # Calls of the policy in one decode.
  cache: str = 'model'
  drafts: int = 0

  @property
  def name(self) -> str:
    """The name of the case in its lines."""
    cache = '' if self.cache == 'model' else f', cache of {self.cache}'
    k = f', {self.drafts} drafted' if self.drafts else ''
    return f'{self.shape}, {self.rows} rows{cache}{k}'

  def name_line(self, used: int) -> str:
    """Returns the name of the line for `used` slots."""
    return f'decode, {self.name}, {used} used'


CASES = (
  Case('3b', 64),
  Case('3b', 256),
  Case('3b', 64, (2048,), cache='int8'),
  Case('3b', 64, (2048,), drafts=4),
  Case('0.6b', 64),
  Case('0.6b', 256, (512, 1024)),
)
REHEARSAL = (
  Case('tiny', 4, (64,), 8),
  Case('tiny', 4, (64,), 8, cache='int8'),
  Case('tiny', 4, (64,), 8, drafts=2),
)


def decode() -> Iterator[lines.Line]:
  """Yields a line for each case and number of used slots."""
  cases = REHEARSAL if lines.is_tiny() else CASES
  lower = {case: functools.partial(_lower, case) for case in cases}
  yield from update_lib.measure_compiled(lower, measure, 'decode, {}')


def prefill() -> Iterator[lines.Line]:
  """Times a prefill that continues sequences which use half of their slots."""
  shape, rows, T, S = ('tiny', 2, 32, 128) if lines.is_tiny() else ('3b', 8, 256, 4096)
  config = _make_config(shape)
  params = _make_params(config)
  cache = kv_cache.empty(config, rows, S)
  tokens = np.random.default_rng(0).integers(0, config.vocab_size, (rows, T))
  positions = np.tile(S // 2 + np.arange(T), (rows, 1))
  text: Any = tokens.astype(np.int32), positions.astype(np.int32)
  index: Any = np.arange(rows, dtype=np.int32)
  batch = programs_lib.PrefillBatch(index, types.Rows(*text))

  def call():
    nonlocal cache
    cache, _ = programs_lib.prefill(params, cache, batch, config=config, bucket=S)
    return cache

  first, seconds = lines.measure_seconds(call, calls=3)
  whole: Any = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
  size = costs.count_parameters(whole, config)
  operations = costs.count_forward(size, config, positions.reshape(-1), 0)
  yield lines.make(
    f'prefill, {shape}, {rows} rows of {T} tokens after {S // 2}',
    1e3 * seconds,
    'ms',
    1e3 * operations / card.find_peak(),
    tokens_per_second=round(rows * T / seconds),
    first_seconds=first,
  )


def sync() -> Iterator[lines.Line]:
  """Times the engine's copy of new parameters."""
  shape = 'tiny' if lines.is_tiny() else '3b'
  config = _make_config(shape)
  params = jax.jit(decoder.init, static_argnums=0)(config, jax.random.key(0))
  copy = functools.partial(engine_params.unstack, params, config)
  first, seconds = lines.measure_seconds(copy)
  moved = sum(x.nbytes for tree in (params, copy()) for x in jax.tree.leaves(tree))
  bound = moved / card.find_bandwidth()
  yield lines.make(
    f"the engine's copy of {shape}", seconds, 's', bound, bytes=moved, first_seconds=first
  )


class Decoder(NamedTuple):
  """A decode to call, and the bytes that it must read."""

  call: Callable[[int], programs_lib.Decoded]  # The argument: used slots per sequence.
  weights: int
  a_token: float  # Bytes of a token's keys and values.


def make_decoder(case: Case) -> Decoder:
  """Makes the parameters and the cache of a case."""
  config = _make_config(case.shape)
  params, slots = _make_params(config), _count_slots(case)
  cache = kv_cache.empty(config, case.rows, slots, case.cache)
  size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
  weights, a_token = size(params), size(cache) / case.rows / slots
  tables = jax.device_put(_make_tables(config)), None
  options = _make_options(case, config)

  def call(used: int) -> programs_lib.Decoded:
    nonlocal cache
    batch = _make_batch(case, config, used)
    cache, _, out = programs_lib.decode(
      params, cache, batch, tables, _make_places(case), **options
    )
    return out

  return Decoder(call, weights, a_token)


def measure(case: Case) -> Iterator[lines.Line]:
  """Measures a case at each number of used slots."""
  decoder_ = make_decoder(case)
  for used in case.used:
    first, seconds = lines.measure_seconds(functools.partial(decoder_.call, used))
    out = decoder_.call(used)
    calls, sampled = int(np.max(out.calls)), int(np.sum(out.count))
    read = case.rows * (used + sampled / case.rows / 2) * decoder_.a_token
    floor = (decoder_.weights + read) / card.find_bandwidth()
    yield lines.make(
      case.name_line(used),
      1e3 * seconds / calls,
      'ms a call',
      1e3 * floor,
      tokens_per_second=round(sampled / seconds),
      tokens_per_call=round(sampled / calls / case.rows, 3),
      reads_used_slots=_reads_used_slots(case, _make_config(case.shape)),
      first_seconds=first,
    )


def _make_config(shape: str) -> decoder.DecoderConfig:
  return dataclasses.replace(common.SHAPES[shape], dtype='bfloat16')


def _make_params(config: decoder.DecoderConfig) -> decoder.Params:
  """Makes the engine's parameters, and frees the learner's."""
  params = jax.jit(decoder.init, static_argnums=0)(config, jax.random.key(0))
  return engine_params.unstack(params, config)


def _make_tables(config: decoder.DecoderConfig) -> automaton_guide.Tables:
  pool = automaton_guide.AutomatonPool(config.vocab_size)
  return automaton_guide.make_tables(pool.entries)


def _make_places(case: Case) -> drafts.Places | None:
  return drafts.Index().offer() if case.drafts else None


def _count_slots(case: Case) -> int:
  """Counts the slots of a row, in multiples of a tile, as the kernels need."""
  most = max(case.used) + drafts.count_most(case.steps, case.drafts)
  return -(-most // _TILE) * _TILE


def _reads_used_slots(case: Case, config: decoder.DecoderConfig) -> bool:
  shape = case.rows, config.num_kv_heads, _count_slots(case), config.head_dim
  return attention_kernels.reads_used_slots(
    shape, config.dtype, 1 + case.drafts, case.cache != 'model'
  )


def _make_options(case: Case, config: decoder.DecoderConfig) -> dict[str, Any]:
  return {
    'config': config,
    'guides': _GUIDES,
    'steps': case.steps,
    'bucket': _count_slots(case),
    'in_place': True,
    'k': case.drafts,
  }


def _make_batch(case: Case, config: decoder.DecoderConfig, used: int) -> Any:
  """Makes a batch that decodes every row, with `used` slots each."""
  empty = active_request.make_decode_batch({}, case.rows, _GUIDES, unused_row=case.rows)
  return empty._replace(
    rows=np.arange(case.rows, dtype=np.int32),
    length=np.full(case.rows, used, np.int32),
    ends=np.full_like(empty.ends, used % config.vocab_size),
    budget=np.full(case.rows, case.steps, np.int32),
  )


def _fits(case: Case) -> bool:
  """Whether the learner's and the engine's parameters, and the cache, fit in memory."""
  config = _make_config(case.shape)
  cache: Any = jax.eval_shape(
    lambda: kv_cache.empty(config, case.rows, _count_slots(case), case.cache)
  )
  params: Any = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
  size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
  stats = jax.devices()[0].memory_stats() or {}
  most = max(size(params), size(cache)) + size(params) / 2
  return most < _FULL * stats.get('bytes_limit', float('inf'))


def _lower(case: Case) -> list[Any]:
  if not _fits(case):
    raise MemoryError('weights and cache are more than the memory')
  config = _make_config(case.shape)
  params: Any = jax.eval_shape(lambda: _make_params(config))
  cache: Any = jax.eval_shape(
    lambda: kv_cache.empty(config, case.rows, _count_slots(case), case.cache)
  )
  batch = _make_batch(case, config, case.used[0])
  tables = _make_tables(config), None
  options = _make_options(case, config)
  return [
    programs_lib.decode.lower(params, cache, batch, tables, _make_places(case), **options)
  ]


MEASUREMENTS = (decode, prefill, sync)

if __name__ == '__main__':
  lines.run(MEASUREMENTS)
