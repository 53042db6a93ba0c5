"""Requests under way: what a decode is given of them, and what they get from it."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from agent_r1_jax.engine import automaton as automaton_lib
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import programs as programs_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.engine import rows as rows_lib


class Running:
  """A request under way.

  Attributes:
    generation: The reply, as the client sees it.
    automata: The state of AUTOMATA in which the request began.
    row: The row of its text, once it has one.
    states: The state of each of the engine's guides, after the last segment.
    used: bool [G], whether each guide changes the request's logits.
  """

  def __init__(
    self,
    generation: request_lib.Generation,
    guides: Sequence[guide_lib.Guide],
    automata: guide_lib.State,
  ):
    """Makes a request without a row.

    Args:
      generation: The reply, as the client sees it.
      guides: All guides of the engine; AUTOMATA and TRUNCATION come first.
      automata: The state of AUTOMATA, from AutomatonPool.acquire.
    """
    request = generation.request
    self.generation, self.automata = generation, automata
    self.row: rows_lib.Row | None = None
    given = {
      automaton_lib.AUTOMATA: automata,
      guide_lib.TRUNCATION: guide_lib.truncation_state(request.sampling),
      **request.guides,
    }
    self.states = [given.get(guide, guide.off) for guide in guides]
    self.used = np.array([guide in request.guides for guide in guides])
    self.used[0] = any(automaton.restricts for automaton in request.automata)
    self.used[1] = request.sampling.truncated

  def add_chunk(self, out: Any, m: int, step: int, states: list):
    """Adds what a segment sampled in place m to the text and the reply.

    Args:
      out: The decode's programs.Decoded, in numpy.
      m: The place of this request.
      step: The updates that the policy had seen.
      states: The state of each guide after the segment.
    """
    assert self.row is not None
    n, top = out.count[m], self.generation.request.top_logprobs
    chunk = request_lib.Chunk(
      out.tokens[m, :n],
      out.logprobs[m, :n],
      np.full(n, step, np.int32),
      bool(out.stopped[m]),
      out.top_tokens[m, :n, :top],
      out.top_logprobs[m, :n, :top],
      out.values[m, :n],
    )
    self.states = states
    self.row.extend(chunk.tokens)
    self.generation.add(chunk)

  def release_row(self):
    """Lets other texts have the row."""
    if self.row is not None and self.row.running is self.generation:
      self.row.running = None


def make_decode_arguments(
  requests: Mapping[int, Running],
  size: int,
  guides: Sequence[guide_lib.Guide],
  unused_row: int,
) -> tuple[programs_lib.Places, np.ndarray, tuple[guide_lib.State, ...]]:
  """Makes the arguments of `programs.decode` that tell of requests.

  Args:
    requests: Requests whose rows are prefilled, by their place in the decode.
    size: Places of the decode.
    guides: All guides of the engine.
    unused_row: The row of a place without a request.

  Returns:
    The places; which of them use each guide, bool [G, size]; and the guides' states.
  """
  numpy: Any = np  # The fields of Places become JAX's arrays in the call.
  places: Any = programs_lib.Places(
    rows=numpy.full(size, unused_row, np.int32),
    length=numpy.zeros(size, np.int32),
    last=numpy.zeros(size, np.int32),
    budget=numpy.zeros(size, np.int32),
    keys=numpy.zeros((size, 2), np.uint32),
    temperature=numpy.ones(size, np.float32),
    top=numpy.zeros(size, bool),
  )
  used = np.zeros((len(guides), size), bool)
  for m, running in requests.items():
    row, request = running.row, running.generation.request
    assert row is not None and row.text is not None
    places.rows[m], places.length[m] = row.index, row.cached
    places.last[m] = row.text.tokens[-1]
    places.budget[m] = running.generation.remaining
    places.keys[m], places.top[m] = request.key, request.top_logprobs > 0
    places.temperature[m] = request.sampling.temperature
    used[:, m] = running.used
  states = tuple(
    jax.tree.map(
      lambda *places: np.stack(places),
      *(requests[m].states[g] if m in requests else guide.off for m in range(size)),
    )
    for g, guide in enumerate(guides)
  )
  return places, used, states
