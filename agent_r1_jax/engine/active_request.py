"""Active requests: makes the arguments of each call, and adds its results to them."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.engine import automaton_guide, drafts, prompt_scores
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import programs as programs_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.engine import rows as rows_lib
from agent_r1_jax.models import kv_cache


def take_turns(actives: 'Sequence[ActiveRequest]') -> 'list[ActiveRequest]':
  """Orders requests: those with a row or no client first, others in turn by client."""
  before, rank = collections.Counter(), {}
  for active in actives:
    client = active.generation.request.client
    rank[active] = before[client] if client and active.row is None else 0
    before[client] += 1
  return sorted(actives, key=rank.__getitem__)


class ActiveRequest:
  """A request that is queued or being answered.

  Attributes:
    generation: The reply, as the client sees it.
    automata: The initial state of AUTOMATA, for `AutomatonPool.release` at the end.
    slot: The slot of its adapter, for `AdapterTable.release` at the end.
    row: The row of its sequence; None while it waits for a row.
    guide_states: The state of each of the engine's guides after the tokens so far.
    guide_mask: bool [G], whether each guide's `logits` must run for the request.
    scored: The prompt's scores so far, one Scores per prefilled chunk, if requested.
  """

  def __init__(
    self,
    generation: request_lib.Generation,
    guides: Sequence[guide_lib.Guide],
    automata: guide_lib.State,
    slot: int = 0,
  ):
    """Makes a request without a row; `guides` are all guides of the engine (G)."""
    request = generation.request
    self.generation, self.automata, self.slot = generation, automata, slot
    self.row: rows_lib.Row | None = None
    self.scored: list[request_lib.Scores] = []
    used = {automaton_guide.AUTOMATA: automata, **request.guides}
    if request.sampling.truncated:
      used[guide_lib.TRUNCATION] = guide_lib.truncation_state(request.sampling)
    self.guide_states = [used.get(guide, guide.off) for guide in guides]
    if not any(automaton.restricts for automaton in request.automata):
      # Automata that only end replies, such as stop strings, need no `logits`.
      del used[automaton_guide.AUTOMATA]
    self.guide_mask = np.array([g in used and g.logits is not None for g in guides], bool)

  def can_run(self, fits: Callable[[guide_lib.State], bool]) -> bool:
    """Whether compiled programs fit its automata; fails the request if none can."""
    try:
      return fits(self.automata)
    except RuntimeError as error:
      self.generation.fail(error)
      return False

  def add_scores(self, scored: Any, m: int, count: int):
    """Adds the scores of `count` tokens: entry m of a prompt_scores.Scored, in numpy."""
    top = self.generation.request.top_logprobs
    self.scored.append(
      request_lib.Scores(
        scored.logprobs[m, :count],
        scored.top_tokens[m, :count, :top],
        scored.top_logprobs[m, :count, :top],
      )
    )

  def add_chunk(self, decoded: Any, m: int, policy_step: int, guide_states: list):
    """Adds the tokens that a decode sampled to the sequence and the reply.

    Args:
      decoded: The programs.Decoded, in numpy.
      m: The request's entry in the decode.
      policy_step: The policy_step of the policy that sampled them.
      guide_states: The states of the guides after the tokens.
    """
    assert self.row is not None
    n, top = decoded.count[m], self.generation.request.top_logprobs
    chunk = request_lib.Chunk(
      tokens=decoded.tokens[m, :n],
      logprobs=decoded.logprobs[m, :n],
      policy_steps=np.full(n, policy_step, np.int32),
      stopped=bool(decoded.stopped[m]),
      top_tokens=decoded.top_tokens[m, :n, :top],
      top_logprobs=decoded.top_logprobs[m, :n, :top],
      values=decoded.values[m, :n],
      behaviour_logprobs=decoded.behaviour_logprobs[m, :n],
      routes=decoded.routes.get(m),
    )
    self.guide_states = guide_states
    if self.generation.request.score_prompt and self.generation.prompt is None:
      self.generation.prompt = self._join_scores()
    self.row.extend(chunk.tokens)
    self.generation.add(chunk)

  def _join_scores(self) -> request_lib.Scores:
    """Joins the scores of all chunks; the first token has no prediction and gets NaN."""
    request = self.generation.request
    unknown = np.full((1, request.top_logprobs), np.nan, np.float32)
    none = np.zeros(unknown.shape, np.int32)
    first = request_lib.Scores(np.full(1, np.nan, np.float32), none, unknown)
    columns = map(np.concatenate, zip(first, *self.scored, strict=True))
    scores = request_lib.Scores(*columns)
    is_text = request.prompt.tokens < types.FIRST_PICTURE_ID
    return scores._replace(
      logprobs=np.where(is_text, scores.logprobs, np.float32(np.nan))
    )

  def add_to(self, index: drafts.Index):
    """Adds the last chunk to an index, or the complete reply once it is done."""
    generation = self.generation
    new = len(generation.chunks[-1].tokens)
    if generation.done:  # As one piece: drafts end at the end of a piece.
      new = generation.request.max_tokens - generation.remaining
    index.add(generation.sequence.tokens, new)

  def release_row(self):
    """Frees the row for other sequences."""
    if self.row is not None and self.row.generation is self.generation:
      self.row.generation = None


def cut_chunk(missing: np.ndarray, most: int) -> np.ndarray:
  """Returns the next of missing tokens, so that they end in no picture."""
  if len(missing) <= most or missing[most] < types.FIRST_PICTURE_ID:
    return missing[:most]
  text = np.flatnonzero(missing[:most] < types.FIRST_PICTURE_ID)
  return missing[: text[-1] + 1]


def make_prefill_batch(
  rows: Sequence[rows_lib.Row],
  size: int,
  tokens: int,
  unused_row: int,
  whole_pictures: bool = False,
) -> tuple[programs_lib.PrefillBatch, np.ndarray]:
  """Makes the batch of `programs.prefill`, in numpy.

  Returns:
    The batch, and the number of tokens that it prefills for each entry.

  Args:
    rows: Rows whose next tokens are prefilled.
    size: Number of entries (M).
    tokens: Maximum number of tokens per row (T).
    unused_row: The row index of unused entries.
    whole_pictures: Whether the tokens of a picture are prefilled together, because they
      see each other.
  """
  index, count = np.full(size, unused_row, np.int32), np.zeros(size, np.int32)
  token_ids = np.zeros((size, tokens), np.int32)
  positions = np.full((size, tokens), kv_cache.NOWHERE, np.int32)
  begin, (keep, save) = (
    np.zeros(size, np.int32),
    np.full((2, size), kv_cache.STATES, np.int32),
  )
  for m, row in enumerate(rows):
    missing = row.missing
    missing = cut_chunk(missing, tokens) if whole_pictures else missing[:tokens]
    n = len(missing)
    index[m], count[m], token_ids[m, :n] = row.index, n, missing
    positions[m, :n] = np.arange(row.cached, row.cached + n)
    begin[m], keep[m], save[m], _ = row.plan_states(n)
  arrays: Any = token_ids, positions  # jit takes numpy arrays too.
  states: Any = begin, keep, save
  given: Any = index, types.Rows(*arrays), None, kv_cache.Slots(*states)
  return programs_lib.PrefillBatch(*given), count


def make_targets(
  requests: Sequence[ActiveRequest], size: int, tokens: int
) -> prompt_scores.Targets:
  """Makes the targets of the batch of `make_prefill_batch`, in numpy."""
  token_ids = np.zeros((size, tokens), np.int32)
  temperature, top = np.ones(size, np.float32), np.zeros(size, bool)
  for m, active in enumerate(requests):
    row, request = active.row, active.generation.request
    assert row is not None
    after = row.tokens[row.cached + 1 : row.size][:tokens]
    token_ids[m, : len(after)] = after
    temperature[m], top[m] = request.sampling.temperature, request.top_logprobs > 0
  columns: Any = token_ids, temperature, top
  return prompt_scores.Targets(*columns)


def make_slots(requests: Mapping[int, ActiveRequest], size: int) -> np.ndarray:
  """Returns the adapter slot of each of a call's `size` entries, int32 [M]."""
  slots = np.zeros(size, np.int32)
  for m, active in requests.items():
    slots[m] = active.slot
  return slots


def make_decode_batch(
  requests: Mapping[int, ActiveRequest],
  size: int,
  guides: Sequence[guide_lib.Guide],
  unused_row: int,
  sees: bool = False,
) -> programs_lib.DecodeBatch:
  """Makes the batch of `programs.decode`, in numpy.

  Args:
    requests: Requests whose rows are prefilled, by batch entry.
    size: Number of entries (M).
    guides: All guides of the engine (G).
    unused_row: The row index of entries without a request.
    sees: Whether the policy takes pictures, so that coordinates may lag positions.
  """
  rows = np.full(size, unused_row, np.int32)
  # Entries without a request have a budget of 0 and do not run.
  length, budget, saved, begin = np.zeros((4, size), np.int32)
  ends = np.full((size, drafts.WIDTH), drafts.NONE, np.int32)
  keys, temperature = np.zeros((size, 2), np.uint32), np.ones(size, np.float32)
  (top, replay), guide_mask = (
    np.zeros((2, size), bool),
    np.zeros((len(guides), size), bool),
  )
  for m, active in requests.items():
    row, request = active.row, active.generation.request
    assert row is not None and row.sequence is not None
    rows[m], length[m], end = row.index, row.cached, row.sequence.tokens[-drafts.WIDTH :]
    ends[m, -len(end) :] = end
    budget[m], keys[m] = active.generation.remaining, request.key
    temperature[m], top[m] = request.sampling.temperature, request.top_logprobs > 0
    guide_mask[:, m] = active.guide_mask
    replay[m], saved[m], begin[m] = request.replay, row.sequence.saved, row.begin
  states = tuple(
    jax.tree.map(
      lambda *leaves: np.stack(leaves),
      *(requests[m].guide_states[g] if m in requests else guide.off for m in range(size)),
    )
    for g, guide in enumerate(guides)
  )
  # In the order of DecodeBatch's fields.
  arrays: Any = rows, length, ends, budget, keys, temperature, top, replay, guide_mask
  first: Any = begin
  given: dict[str, Any] = {'saved': saved if sees else None}
  given['states'] = kv_cache.Slots(first)
  return programs_lib.DecodeBatch(*arrays, guide_states=states, **given)
