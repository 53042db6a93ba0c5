"""Requests under way: what a decode is given of them, and what they get from it."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from agent_r1_jax.engine import automaton_guide
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import programs as programs_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.engine import rows as rows_lib


class ActiveRequest:
  """A request under way.

  Attributes:
    generation: The reply, as the client sees it.
    automata: The state of AUTOMATA in which the request began; its automata are released
      with it.
    row: The row of its text, once it has one.
    states: The state of each of the engine's guides after the tokens so far.
    guided: bool [G], whether each guide's `logits` must run for the request.
  """

  def __init__(
    self,
    generation: request_lib.Generation,
    guides: Sequence[guide_lib.Guide],
    automata: guide_lib.State,
  ):
    """Makes a request without a row; `guides` are all that the engine has (G)."""
    request = generation.request
    self.generation, self.automata = generation, automata
    self.row: rows_lib.Row | None = None
    used = {automaton_guide.AUTOMATA: automata, **request.guides}
    if request.sampling.truncated:
      used[guide_lib.TRUNCATION] = guide_lib.truncation_state(request.sampling)
    self.states = [used.get(guide, guide.off) for guide in guides]
    if not any(automaton.restricts for automaton in request.automata):
      # Automata that only end replies, such as stop strings, need no `logits`.
      del used[automaton_guide.AUTOMATA]
    self.guided = np.array([g in used and g.logits is not None for g in guides], bool)

  def add_chunk(self, out: Any, m: int, step: int, states: list):
    """Adds the tokens that a decode sampled in place m to the text and the reply.

    Args:
      out: The programs.Decoded, in numpy.
      m: The place of the request in the decode.
      step: The policy's policy_step.
      states: The states of the guides after the tokens.
    """
    assert self.row is not None
    n, top = out.count[m], self.generation.request.top_logprobs
    chunk = request_lib.Chunk(
      tokens=out.tokens[m, :n],
      logprobs=out.logprobs[m, :n],
      policy_steps=np.full(n, step, np.int32),
      stopped=bool(out.stopped[m]),
      top_tokens=out.top_tokens[m, :n, :top],
      top_logprobs=out.top_logprobs[m, :n, :top],
      values=out.values[m, :n],
      behaviour_logprobs=out.behaviour_logprobs[m, :n],
    )
    self.states = states
    self.row.extend(chunk.tokens)
    self.generation.add(chunk)

  def release_row(self):
    """Lets other texts have the row."""
    if self.row is not None and self.row.generation is self.generation:
      self.row.generation = None


def make_decode_arguments(
  requests: Mapping[int, ActiveRequest],
  size: int,
  guides: Sequence[guide_lib.Guide],
  unused_row: int,
) -> tuple[programs_lib.Places, np.ndarray, tuple[guide_lib.State, ...]]:
  """Makes the arguments of `programs.decode` that tell of requests.

  Args:
    requests: Requests whose rows are prefilled, by their place in the decode.
    size: Number of places of the decode.
    guides: All guides of the engine.
    unused_row: The row of a place without a request.

  Returns:
    The places; which of them each guide changes, bool [G, size]; and the guides' states.
  """
  rows = np.full(size, unused_row, np.int32)
  # A place without a request does not run, for its budget is 0.
  length, last, budget = np.zeros((3, size), np.int32)
  keys, temperature = np.zeros((size, 2), np.uint32), np.ones(size, np.float32)
  top, guided = np.zeros(size, bool), np.zeros((len(guides), size), bool)
  for m, active in requests.items():
    row, request = active.row, active.generation.request
    assert row is not None and row.text is not None
    rows[m], length[m], last[m] = row.index, row.cached, row.text.tokens[-1]
    budget[m], keys[m] = active.generation.remaining, request.key
    temperature[m], top[m] = request.sampling.temperature, request.top_logprobs > 0
    guided[:, m] = active.guided
  states = tuple(
    jax.tree.map(
      lambda *leaves: np.stack(leaves),
      *(requests[m].states[g] if m in requests else guide.off for m in range(size)),
    )
    for g, guide in enumerate(guides)
  )
  columns: Any = (rows, length, last, budget, keys, temperature, top)  # In Places' order.
  return programs_lib.Places(*columns), guided, states
