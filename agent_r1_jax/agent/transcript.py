"""The transcript of an episode: its tokens, action mask, log-probs, turns and forks.

It records the training data of an episode, whether an environment or a program behind an
endpoint plays it, and is the only code that sets the action mask. A token is an action
only in the passage in which the policy sampled it, not in a fork's copy.
"""

import copy
import dataclasses

import numpy as np

from agent_r1_jax import types


class Passage:
  """A growing segment: the tokens of one context.

  Attributes:
    segment: All tokens so far, with the action mask.
    turns: The replies that were sampled in it.
  """

  def __init__(self, copied: types.Prompt):
    """Begins with tokens copied from another passage, if any."""
    self.segment = types.Segment.read(copied)
    self.turns: list[types.Turn] = []

  @property
  def tokens(self) -> np.ndarray:
    """All tokens so far, int32 [T]."""
    return self.segment.tokens

  def __len__(self) -> int:
    return len(self.tokens)

  def add_turn(
    self, observed: np.ndarray | types.Prompt, reply: types.SampledReply
  ) -> types.Turn:
    """Appends an observation, which is not an action, and then the sampled reply."""
    self.segment = self.segment.add_turn(types.Prompt.of(observed), reply)
    self.turns.append(types.Turn(0, len(self) - len(reply.tokens), len(self)))
    return self.turns[-1]

  def copy(self) -> 'Passage':
    """Returns an independent copy, whose turns may get other rewards."""
    other = copy.copy(self)
    other.turns = [dataclasses.replace(turn) for turn in self.turns]
    return other


class Transcript:
  """The passages of an episode, and its turns in sampling order."""

  def __init__(self):
    """Begins without passages."""
    self._passages: list[Passage] = []
    self.turns: list[types.Turn] = []

  @property
  def count(self) -> int:
    """The number of passages."""
    return len(self._passages)

  @property
  def passage(self) -> Passage:
    """The newest passage."""
    return self._passages[-1]

  def begin(self) -> Passage:
    """Begins an empty passage: at the start, or when a context is dropped."""
    self._passages.append(Passage(types.Prompt()))
    return self.passage

  def fork(self, passage: Passage, length: int) -> Passage:
    """Begins a passage with the first `length` tokens of another one.

    Tokens that the policy sampled before the fork are actions only in the original.
    """
    self._passages.append(Passage(passage.segment.prompt[:length]))
    return self.passage

  def drop(self, passage: Passage):
    """Removes a passage without turns."""
    self._passages.remove(passage)

  def add_turn(
    self,
    passage: Passage,
    observed: np.ndarray | types.Prompt,
    reply: types.SampledReply,
  ) -> types.Turn:
    """Appends a turn to one of the passages; see Passage.add_turn."""
    self.turns.append(passage.add_turn(observed, reply))
    return self.turns[-1]

  def copy(self) -> 'Transcript':
    """Returns an independent copy, for an episode that continues differently."""
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
    """Returns the passages with turns, in the order of their last turns.

    The episode ended in the last passage.
    """
    number = {id(turn): i for i, turn in enumerate(self.turns)}
    played = [passage for passage in self._passages if passage.turns]
    return sorted(played, key=lambda passage: number[id(passage.turns[-1])])

  def collect(self) -> tuple[list[types.Segment], list[types.Turn]]:
    """Returns the training data: segments, and turns in the order of the segments."""
    played = self.list_played()
    for i, passage in enumerate(played):
      for turn in passage.turns:
        turn.segment = i
    turns = [turn for passage in played for turn in passage.turns]
    return [passage.segment for passage in played], turns
