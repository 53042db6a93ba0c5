"""The device side of a replica: its KV cache and the calls of the jitted programs.

Arguments are numpy arrays; rows.py is the host's record of the cache's contents.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import itertools
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.engine import (
  active_request,
  automaton_guide,
  drafts,
  prompt_scores,
  row_pictures,
)
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import programs as programs_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.engine import rows as rows_lib
from agent_r1_jax.engine import sizes as sizes_lib
from agent_r1_jax.models import decoder, lora, sharding


class Device:
  """The cache of a replica, and the programs that read and write it.

  Attributes:
    cache: The keys and values.
    guides: All guides that requests can use (G).
    pool: The automata that requests use.
    pictures: The pictures in the sequences; None if the policy takes no pictures.
  """

  def __init__(
    self,
    config: decoder.DecoderConfig,
    sizes: sizes_lib.ProgramSizes,
    guides: Mapping[guide_lib.Guide, Any],
    mesh: Mesh | None = None,
  ):
    """Allocates the cache on `mesh`."""
    self.config, self.sizes, self.mesh = config, sizes, mesh
    self.cache = sizes.make_cache(config)
    if mesh is not None:
      self.cache = sharding.shard_cache(self.cache, mesh)
    self.pictures = row_pictures.RowPictures(config, mesh) if config.vision else None
    self.pool = automaton_guide.AutomatonPool(config.vocab_size)
    self._guide_params = {
      automaton_guide.AUTOMATA: None,  # The tables; see _load_automata.
      guide_lib.TRUNCATION: None,
      **guides,
    }
    self.guides = tuple(self._guide_params)
    # Tables of the size that the programs are compiled for, in numpy; and the automata
    # and such tables that the tables on the device were made from.
    self._compiled: automaton_guide.Tables | None = None
    self._loaded: tuple[Any, Any] = (None, None)
    # The abstract arguments of all decodes called so far; the executor that compiles them
    # again for larger automata, and its pending future.
    self._called: dict[Any, tuple[list, dict[str, Any]]] = {}
    self._compiler, self._growing = futures.ThreadPoolExecutor(1), None

  def warm_up(
    self,
    params: decoder.Params,
    on_done: Callable[[], None],
    automata: Sequence[types.Automaton],
    select: Callable[[np.ndarray], lora.Adapters | None] = lambda slots: None,
  ):
    """Compiles every program with calls that use no row; calls `on_done` after each.

    Decodes are compiled for tables large enough for `automata`. `select` maps the adapter
    slots of entries to their adapters.
    """
    sizes = self.sizes
    for bucket in sizes.buckets:
      for size in sizes.prefill_rows:
        options = size, sizes.prefill_tokens, sizes.rows
        batch, slots = active_request.make_prefill_batch((), *options)
        batch = self.look(params, None, (), batch)
        rows = batch.rows._replace(adapters=select(slots))
        self.prefill(params, batch._replace(rows=rows), bucket)
        on_done()
      most = sizes.prefill_rows[-1]  # The row after the last marks an unused entry.
      unused = np.full(most, sizes.rows, np.int32)
      self.copy(np.zeros(most, np.int32), unused, bucket)
      if self.config.num_experts:
        programs_lib.read_routes(self.cache, 0, bucket=bucket)
      on_done()
    acquired = [self.pool.acquire([automaton]) for automaton in automata]
    self._compiled = automaton_guide.make_tables(self.pool.entries, self._compiled)
    places = [None, drafts.Index().offer()] if sizes.drafts else [None]
    for bucket, size, place in itertools.product(
      sizes.decode_buckets, sizes.decode_rows, places
    ):
      batch = active_request.make_decode_batch(
        {}, size, self.guides, sizes.rows, sees=self.config.vision is not None
      )
      batch = batch._replace(adapters=select(np.zeros(size, np.int32)))
      self.decode(params, batch, bucket, place)
      on_done()
    for state in acquired:
      self.pool.release(state)

  def copy(self, source, rows, bucket: int):
    """Copies prefixes between rows; see programs.copy."""
    with sharding.use_mesh(self.mesh):
      self.cache = programs_lib.copy(self.cache, source, rows, bucket=bucket)

  def check(self, request: request_lib.Request):
    """Raises ValueError for a request that cannot be answered."""
    request_lib.check(
      request,
      vocab_size=self.config.vocab_size,
      slots=self.sizes.slots,
      guides=self.guides,
      more_ids=self.pictures.list_ids(request.prompt) if self.pictures else (),
    )
    if self.pictures:
      self.pictures.check(request, self.sizes.prefill_tokens)

  def add(self, sequence: request_lib.Sequence, request: request_lib.Request):
    """Records the pictures of a sequence after a request's tokens were appended to it."""
    if self.pictures:
      self.pictures.add(sequence, request)

  def look(
    self,
    params,
    version,
    cached: Sequence[rows_lib.Row],
    batch: programs_lib.PrefillBatch,
  ) -> programs_lib.PrefillBatch:
    """Adds the pictures of a prefill's tokens; see RowPictures.look."""
    if not self.pictures:
      return batch
    rows = self.pictures.look(params, version, cached, batch.rows)
    return batch._replace(rows=rows)

  def prefill(
    self, params, batch: programs_lib.PrefillBatch, bucket: int
  ) -> prompt_scores.Scored | None:
    """Writes tokens to rows; returns the scores of any targets, in numpy."""
    options = {'config': self.config, 'bucket': bucket}
    with sharding.use_mesh(self.mesh):
      self.cache, scored = programs_lib.prefill(params, self.cache, batch, **options)
    return scored and jax.device_get(scored)

  def decode(
    self,
    params,
    batch: programs_lib.DecodeBatch,
    bucket: int,
    places: drafts.Places | None = None,
  ) -> tuple[tuple[guide_lib.State, ...], programs_lib.Decoded]:
    """Samples tokens.

    With `places`, sizes.drafts tokens are drafted for each call of the policy.

    Returns:
      The states of the guides and the tokens, in numpy.
    """
    with sharding.use_mesh(self.mesh):
      self._load_automata()
      given = tuple(self._guide_params.values())
      args = [params, self.cache, batch, given, places]
      options: dict[str, Any] = {
        'config': self.config,
        'guides': self.guides,
        'steps': self.sizes.decode_steps,
        'bucket': bucket,
        'in_place': self.sizes.decodes_in_place(len(batch.rows), bucket),
        'k': self.sizes.drafts if places else 0,
      }
      called = len(batch.rows), bucket, options['k']
      if called not in self._called:
        self._called[called] = programs_lib.describe(args), options
      self.cache, guide_states, decoded = programs_lib.decode(*args, **options)
    if not np.any(batch.top):  # These arrays are large: copy them only on request.
      none = np.zeros((*decoded.tokens.shape, 0), np.int32)
      decoded = decoded._replace(top_tokens=none, top_logprobs=np.float32(none))
    guide_states, decoded = jax.device_get((guide_states, decoded))
    return guide_states, decoded._replace(routes=self._read_routes(batch, decoded))

  def _read_routes(self, batch, decoded) -> dict[int, np.ndarray]:
    """Reads the experts of the sequences that have ended, [tokens, L, k] by entry."""
    if not self.config.num_experts:
      return {}
    ended = decoded.stopped | (decoded.count == batch.budget)
    entries = np.flatnonzero(batch.replay & ended).tolist()
    lengths = {m: int(batch.length[m] + decoded.count[m]) for m in entries}
    read = {}
    for m, length in lengths.items():
      bucket = sizes_lib.round_up(self.sizes.buckets, length)
      with sharding.use_mesh(self.mesh):
        row = int(batch.rows[m])
        read[m] = programs_lib.read_routes(self.cache, row, bucket=bucket)
    # All reads are dispatched before the first is waited for.
    return {m: x[: lengths[m]] for m, x in jax.device_get(read).items()}

  def fits(self, state: guide_lib.State) -> bool:
    """Whether the compiled programs can run the automata of a request.

    If not, larger programs are compiled in another thread, while others are served.
    `state` comes from AutomatonPool.acquire.

    Raises:
      RuntimeError: The larger programs do not compile.
    """
    entries, tables = self.pool.entries, self._compiled
    if tables is None or all(
      number < len(tables.classes) and automaton_guide.fits(entries[number], tables)
      for number in state['automaton']
    ):
      return True
    if self._growing is None:
      self._growing = self._compiler.submit(self._grow)
    elif self._growing.done():
      growing, self._growing = self._growing, None
      if error := growing.exception():
        raise RuntimeError(
          'the programs for so large an automaton do not compile: give a smaller '
          f'grammar or schema, or fewer stop strings ({error})'
        ) from error
    return False

  def _grow(self):
    tables = automaton_guide.make_tables(self.pool.entries, self._compiled)
    with sharding.use_mesh(self.mesh):
      for args, options in [*self._called.values()]:
        given = programs_lib.describe(tables), *args[3][1:]
        programs_lib.decode.lower(*args[:3], given, *args[4:], **options).compile()
    self._compiled = tables

  def _load_automata(self):
    """Copies the automata that fit to the device, if they have changed."""
    if self._compiled is None:
      self._compiled = automaton_guide.make_tables(self.pool.entries)
    entries, tables = wanted = self.pool.entries, self._compiled
    if not (entries is self._loaded[0] and tables is self._loaded[1]):
      some = entries[: len(tables.classes)]  # The first entry allows everything.
      some = [x if automaton_guide.fits(x, tables) else entries[0] for x in some]
      loaded = automaton_guide.make_tables(some, tables)
      self._guide_params[automaton_guide.AUTOMATA] = jax.device_put(loaded)
      self._loaded = wanted
