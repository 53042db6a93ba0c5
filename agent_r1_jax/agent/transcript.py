"""The transcript of an episode: its tokens, action mask, log-probs, turns and forks.

Whether an environment or a program behind an endpoint speaks: what the episode trains is
written here. The action mask is decided here and nowhere else. A token is an action in
the passage in which the policy sampled it, and in no other; a fork's copy of it is not.
"""

from collections.abc import Sequence
import dataclasses
from typing import Protocol

import numpy as np

from agent_r1_jax import types


class SampledReply(Protocol):
  """What the policy sampled, such as an engine's Chunk."""

  @property
  def tokens(self) -> np.ndarray:
    """int32 [n], at least one."""
    ...

  @property
  def behaviour_logprobs(self) -> np.ndarray:
    """float32 [n], see types.Segment."""
    ...

  @property
  def policy_steps(self) -> np.ndarray:
    """int32 [n], see types.Segment."""
    ...

  @property
  def routes(self) -> np.ndarray | None:
    """The experts of the text up to the reply's last tokens, see types.Segment."""
    ...


class Passage:
  """A segment while it grows: the text of one context.

  Attributes:
    turns: The replies that were sampled in it.
    pictures: The pictures that its tokens stand for, uint8 [H, W, 3] each.
    routes: The experts that computed its first tokens, or None; see types.Segment.
  """

  def __init__(
    self, copied: np.ndarray | None = None, pictures: Sequence[np.ndarray] = ()
  ):
    """Begins with tokens copied from another passage, by default with none."""
    self.turns: list[types.Turn] = []
    self.pictures = tuple(pictures)
    self.routes: np.ndarray | None = None
    self._pieces = [] if copied is None else [_observe(copied)]

  @property
  def tokens(self) -> np.ndarray:
    """All tokens so far, int32 [T]."""
    return np.concatenate([np.zeros(0, np.int32), *(piece[0] for piece in self._pieces)])

  def __len__(self) -> int:
    return sum(len(piece[0]) for piece in self._pieces)

  def add_turn(
    self, observed: np.ndarray, reply: SampledReply, pictures: Sequence[np.ndarray] = ()
  ) -> types.Turn:
    """Appends what the policy read, which is no action, and then what it sampled.

    `pictures` are those in what it read.
    """
    self.pictures += tuple(pictures)
    start = len(self) + len(observed)
    turn = types.Turn(0, start, start + len(reply.tokens))
    is_action = np.ones(len(reply.tokens), bool)
    sampled = reply.tokens, is_action, reply.behaviour_logprobs, reply.policy_steps
    self._pieces += [_observe(observed), sampled]
    self._add_routes(reply.routes)
    self.turns.append(turn)
    return turn

  def _add_routes(self, routes: np.ndarray | None):
    """Adds those of tokens that had none; what was known first is what sampled."""
    if self.routes is not None and routes is not None:
      routes = np.concatenate([self.routes, routes[len(self.routes) :]])
    self.routes = self.routes if routes is None else routes

  def copy(self) -> 'Passage':
    """Returns an independent copy, whose turns may get other rewards."""
    other = Passage(pictures=self.pictures)
    other._pieces, other.routes = [*self._pieces], self.routes
    other.turns = [dataclasses.replace(turn) for turn in self.turns]
    return other

  def to_segment(self) -> types.Segment:
    """Joins its tokens, with the action mask."""
    dtypes = np.int32, bool, np.float32, np.int32
    columns = [np.concatenate(column) for column in zip(*self._pieces, strict=True)]
    return types.Segment(
      *(c.astype(d) for c, d in zip(columns, dtypes, strict=True)),
      pictures=self.pictures,
      routes=self._pad_routes(),
    )

  def _pad_routes(self) -> np.ndarray | None:
    """Returns the routes with an entry for each token; the last ones are unknown."""
    if self.routes is None:
      return None
    after = [(0, len(self) - len(self.routes)), (0, 0), (0, 0)]
    return np.pad(self.routes, after, constant_values=types.NO_EXPERT)


def _observe(tokens: np.ndarray) -> tuple[np.ndarray, ...]:
  """Makes the columns of a segment for tokens that are no actions."""
  zeros = np.zeros(len(tokens))
  return tokens, zeros, zeros, zeros


class Transcript:
  """The passages of an episode, and its turns in the order in which they were sampled."""

  def __init__(self):
    """Begins without a passage."""
    self._passages: list[Passage] = []
    self.turns: list[types.Turn] = []

  @property
  def count(self) -> int:
    """How many passages were begun."""
    return len(self._passages)

  @property
  def passage(self) -> Passage:
    """The passage that was begun last."""
    return self._passages[-1]

  def begin(self) -> Passage:
    """Begins a passage of its own: at the start, or where a context is forgotten."""
    self._passages.append(Passage())
    return self.passage

  def fork(self, passage: Passage, length: int) -> Passage:
    """Begins a passage with the first `length` tokens of another one.

    What the policy sampled before the fork is an action there, and not here.
    """
    self._passages.append(Passage(passage.tokens[:length], passage.pictures))
    return self.passage

  def drop(self, passage: Passage):
    """Forgets a passage in which nothing was sampled."""
    self._passages.remove(passage)

  def add_turn(
    self,
    passage: Passage,
    observed: np.ndarray,
    reply: SampledReply,
    pictures: Sequence[np.ndarray] = (),
  ) -> types.Turn:
    """Appends a turn to one of the passages; see Passage.add_turn."""
    self.turns.append(passage.add_turn(observed, reply, pictures))
    return self.turns[-1]

  def copy(self) -> 'Transcript':
    """Returns an independent copy, for an episode that goes on in another way."""
    other = Transcript()
    other._passages = [passage.copy() for passage in self._passages]
    pairs = zip(self._passages, other._passages, strict=True)
    copies = {
      id(turn): copied
      for old, new in pairs
      for turn, copied in zip(old.turns, new.turns, strict=True)
    }
    other.turns = [copies[id(turn)] for turn in self.turns]
    return other

  def list_played(self) -> list[Passage]:
    """Returns the passages that have a turn, in the order of their last turns.

    So the last one is what the episode ended with.
    """
    number = {id(turn): i for i, turn in enumerate(self.turns)}
    played = [passage for passage in self._passages if passage.turns]
    return sorted(played, key=lambda passage: number[id(passage.turns[-1])])

  def collect(self) -> tuple[list[types.Segment], list[types.Turn]]:
    """Returns what is trained: segments, and turns in the order of the segments."""
    played = self.list_played()
    for i, passage in enumerate(played):
      for turn in passage.turns:
        turn.segment = i
    turns = [turn for passage in played for turn in passage.turns]
    return [passage.to_segment() for passage in played], turns
