"""The shapes of the programs that an engine compiles."""

import bisect
import logging
from typing import NamedTuple

from agent_r1_jax.engine import drafts as drafts_lib
from agent_r1_jax.models import decoder, kv_cache, ops
from agent_r1_jax.models.kernels import attention_kernels

_LOGGER = logging.getLogger(__name__)
# How many tokens a ring can rewind at least, without recomputation; its slots are a
# multiple of _TILE.
_MAX_REWIND, _TILE = 256, 128


class ProgramSizes(NamedTuple):
  """The shapes of all compiled programs; see `make` for what each costs.

  A call uses the smallest size in an ascending list that is large enough.
  """

  rows: int  # Sequences in the cache (B).
  slots: int  # The most tokens of a sequence (S).
  window_slots: int  # The slots of a sliding layer; see `count_window_slots`.
  decode_steps: int  # Calls of the policy in one decode.
  prefill_tokens: int  # Tokens per row in one prefill (T).
  prefill_rows: list[int]  # Rows of one prefill.
  decode_rows: list[int]  # Rows of one decode.
  buckets: list[int]  # Slots that a prefill or a copy reads of each row.
  decode_buckets: list[int]  # Slots that a decode reads of each row.
  drafts: int  # Tokens drafted for one call of the policy (k).
  cache: str  # The cache's number format; see `kv_cache.empty`.

  @property
  def programs(self) -> int:
    """The number of programs."""
    decodes = len(self.decode_buckets) * len(self.decode_rows)
    decodes *= 2 if self.drafts else 1
    return len(self.buckets) * (1 + len(self.prefill_rows)) + decodes

  @property
  def decode_tokens(self) -> int:
    """The most tokens that one decode samples for a row."""
    return drafts_lib.count_most(self.decode_steps, self.drafts)

  def make_cache(self, config: decoder.DecoderConfig) -> kv_cache.Cache:
    """Makes an empty cache for a model of this shape."""
    layers = self.slots, self.cache, self.window_slots
    return kv_cache.empty(config, self.rows, *layers)

  def decodes_in_place(self, rows: int, bucket: int) -> bool:
    """Whether a decode covers all rows and slots, and so copies none."""
    return rows == self.rows and bucket == self.slots


def make(
  config: decoder.DecoderConfig,
  *,
  rows: int = 64,
  slots: int = 1024,
  decode_steps: int = 32,
  width: int = 0,
  prefill_rows: int = 16,
  prefill_tokens: int = 64,
  bucket: int = 256,
  narrow: bool = True,
  drafts: int = 0,
  replicas: int = 1,
  cache: str = 'model',
) -> ProgramSizes:
  """Chooses the sizes of one replica's programs, on the current mesh.

  Args:
    config: The policy's shape.
    rows: Sequences in the cache (B), per chip (or per `tensor` chips of a replica).
    slots: The most tokens of a sequence (S).
    decode_steps: Calls of the policy in one decode, each of which samples one token, or
      several with drafts; a new request waits for at most one decode.
    width: The most rows decoded at a time; 0 is all. With slow tools, twice as many rows
      as this keep the device busy.
    prefill_rows: Rows of one prefill (M).
    prefill_tokens: Tokens per row in one prefill (T).
    bucket: Cache reads are rounded up to this, twice this, four times this ...
    narrow: True also compiles programs for a quarter of the rows, which prefill and
      decode fewer rows faster.
    drafts: How many tokens are drafted for one call of the policy (k); see drafts.py.
      Each decode then has two programs, with drafts and without. Nothing is drafted if
      the kernel of a decode has only one query (TPUs).
    replicas: Replicas per chip. They share its parameters and divide its rows and width.
      On a CPU, one per core keeps all cores busy: XLA computes a decode mostly on one
      core.
    cache: The number format of keys and values, one of kv_cache.NUMBERS.

  A log-prob's last bits depend on the program that computed it: runs with tools of
  varying latency repeat bit for bit only with bucket = slots and narrow = False.

  Raises:
    ValueError: A size is below 1, replicas does not divide rows and width, or `cache` is
      unknown.
  """
  if cache not in kv_cache.NUMBERS:
    raise ValueError(f'cache is {cache!r}; give one of {", ".join(kv_cache.NUMBERS)}.')
  width = min(width or rows, rows)
  checked = {'rows': rows, 'slots': slots, 'decode_steps': decode_steps}
  checked |= {'prefill_rows': prefill_rows, 'prefill_tokens': prefill_tokens}
  checked |= {'width': width, 'bucket': bucket, 'replicas': replicas, 'drafts': drafts}
  for name, size in checked.items():
    least = 0 if name == 'drafts' else 1
    if size < least:
      raise ValueError(f'{name} is {size}; it must be at least {least}.')
  if rows % replicas or width % replicas:
    raise ValueError(
      f'rows = {rows} and width = {width} must divide by {replicas}, replicas.'
    )
  rows, width = rows // replicas, width // replicas
  if config.recurrent:
    bucket = max(bucket, kv_cache.STATES)  # States are read with each row's slots.
    if drafts:
      _LOGGER.warning('Nothing is drafted: layers with a state cannot go back.')
      drafts = 0
  with_quarter = lambda n: sorted({max(1, n // 4), n}) if narrow else [n]
  # bucket = 7, slots = 40: 7, 14, 28, 40.
  buckets = [b for i in range(32) if (b := bucket << i) < slots] + [slots]
  decode_rows, decode_buckets = with_quarter(width), buckets
  heads = [config.get_heads(sees_all) for sees_all in {False, config.facts.has_full}]
  reads_used_slots = lambda queries: all(
    attention_kernels.reads_used_slots(
      (rows, K, slots, H), config.dtype, queries, cache != 'model'
    )
    for K, H in heads
  )
  if width == rows and reads_used_slots(1):
    # Smaller programs would read as many slots, and copy them first.
    decode_rows, decode_buckets = [rows], [slots]
    if drafts and not reads_used_slots(drafts + 1):
      _LOGGER.warning('Nothing is drafted: the kernel of a decode has one query.')
      drafts = 0
  prefills = prefill_tokens, with_quarter(min(prefill_rows, rows))
  decodes = decode_rows, buckets, decode_buckets
  most = max(prefill_tokens, drafts_lib.count_most(decode_steps, drafts))
  ring = count_window_slots(config, slots, most)
  return ProgramSizes(rows, slots, ring, decode_steps, *prefills, *decodes, drafts, cache)


def count_window_slots(config: decoder.DecoderConfig, slots: int, most: int) -> int:
  """Returns the slots of a sliding layer, if a call writes at most `most` tokens.

  Besides the window, the ring has room for the tokens of one call and for a rewind: after
  a reply was cut off, or when another sequence shares all but the last tokens. A sequence
  that rewinds further is recomputed (rows.py).
  """
  if not config.window or not ops.choose(config).rings:
    return slots
  needed = config.window + max(_MAX_REWIND, 2 * most)
  return min(slots, -(-needed // _TILE) * _TILE)


def round_up(sizes: list[int], n: int) -> int:
  """Returns the smallest of ascending sizes that is at least n, else the largest."""
  return sizes[min(bisect.bisect_left(sizes, n), len(sizes) - 1)]
