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
    truncation = guide_lib.truncation_state(request.sampling)
    states = {automaton_lib.AUTOMATA: automata, guide_lib.TRUNCATION: truncation}
    states |= request.guides
    self.states = [states.get(guide, guide.off) for guide in guides]
    # Automata that only end replies, such as stop strings, need no `logits`.
    guiding = {
      automaton_lib.AUTOMATA: any(automaton.restricts for automaton in request.automata),
      guide_lib.TRUNCATION: request.sampling.truncated,
    }
    self.guided = np.array([guiding.get(g, g in request.guides) for g in guides], bool)

  def add_chunk(self, out: Any, m: int, step: int, states: list):
    """Adds the tokens that a decode sampled in place m to the text and the reply.

    `out` is the programs.Decoded, in numpy; `step` the policy's policy_step;
    `states` those of the guides after the tokens.
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
    if self.row is not None and self.row.running is self.generation:
      self.row.running = None


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
  places = [
    _make_place(requests[m]) if m in requests else _make_unused_place(unused_row)
    for m in range(size)
  ]
  guided = np.zeros((len(guides), size), bool)
  for m, running in requests.items():
    guided[:, m] = running.guided
  states = tuple(
    jax.tree.map(
      lambda *leaves: np.stack(leaves),
      *(requests[m].states[g] if m in requests else guide.off for m in range(size)),
    )
    for g, guide in enumerate(guides)
  )
  columns: dict[str, Any] = {
    name: np.array([place[name] for place in places]) for name in places[0]
  }
  return programs_lib.Places(**columns), guided, states


def _make_place(running: ActiveRequest) -> dict[str, Any]:
  """Returns the fields of Places for one request."""
  row, request = running.row, running.generation.request
  assert row is not None and row.text is not None
  return {
    'rows': np.int32(row.index),
    'length': np.int32(row.cached),
    'last': row.text.tokens[-1],
    'budget': np.int32(running.generation.remaining),
    'keys': np.asarray(request.key, np.uint32),
    'temperature': np.float32(request.sampling.temperature),
    'top': np.bool_(request.top_logprobs > 0),
  }


def _make_unused_place(row: int) -> dict[str, Any]:
  """Returns the fields of a place that does not run, for its budget is 0."""
  return {
    'rows': np.int32(row),
    'length': np.int32(0),
    'last': np.int32(0),
    'budget': np.int32(0),
    'keys': np.zeros(2, np.uint32),
    'temperature': np.float32(1),
    'top': np.False_,
  }
