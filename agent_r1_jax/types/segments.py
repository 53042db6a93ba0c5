"""Tokens on the host, with their pictures and experts.

Prompt (which a policy reads) + SampledReply (which it samples) + ... -> Segment, the
training data. On the device they are types.Rows. A new kind of input needs a field here,
and a layer that reads it.

Letters: T tokens, L layers, k experts per token.
"""

from collections.abc import Sequence
import dataclasses
import hashlib
from typing import Protocol

import numpy as np

# Token ids from here on stand for squares of pictures; vocabularies are smaller.
FIRST_PICTURE_ID = 2**30
# Marks tokens in `routes` whose experts are unknown, so that the router chooses.
NO_EXPERT = -1


def make_picture_ids(pixels: np.ndarray, side: int) -> np.ndarray:
  """Makes the token ids of a picture, int32 [n], one for each square of its pixels.

  They are a hash of its pixels: equal tokens mean equal pictures. So cache rows can share
  prefixes, and packed rows trees, by comparing tokens alone.

  Args:
    pixels: The picture, uint8 [H, W, 3]; two frames of a video form one, [H, W, 6].
    side: The width and height of a square in pixels, which must divide H and W.
  """
  content = f'{pixels.shape}'.encode() + pixels.tobytes()
  count = pixels.shape[0] * pixels.shape[1] // side**2
  numbers = np.frombuffer(hashlib.shake_256(content).digest(4 * count), '<u4')
  return (FIRST_PICTURE_ID + numbers % FIRST_PICTURE_ID).astype(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
  """Tokens for a policy to read: a complete prompt, or the next part of a sequence.

  Attributes:
    tokens: int32 [T].
    pictures: The pictures that they stand for, uint8 [H, W, 3] each; may include others.
  """

  tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
  pictures: Sequence[np.ndarray] = ()

  @classmethod
  def of(cls, tokens: 'np.ndarray | Prompt') -> 'Prompt':
    """Makes a prompt from tokens; returns a Prompt unchanged."""
    return tokens if isinstance(tokens, Prompt) else cls(np.asarray(tokens, np.int32))

  def __len__(self) -> int:
    return len(self.tokens)

  def __getitem__(self, part: slice) -> 'Prompt':
    return Prompt(self.tokens[part], self.pictures)

  def __add__(self, other: 'Prompt') -> 'Prompt':
    tokens = np.concatenate([self.tokens, other.tokens]).astype(np.int32)
    return Prompt(tokens, (*self.pictures, *other.pictures))


class SampledReply(Protocol):
  """A reply that the policy sampled, such as an engine's Chunk; see Segment."""

  @property
  def tokens(self) -> np.ndarray:
    """int32 [n]."""
    ...

  @property
  def behaviour_logprobs(self) -> np.ndarray:
    """float32 [n]."""
    ...

  @property
  def policy_steps(self) -> np.ndarray:
    """int32 [n]."""
    ...

  @property
  def routes(self) -> np.ndarray | None:
    """The experts of the sequence's tokens from its start; the last may be missing."""
    ...


@dataclasses.dataclass
class Segment:
  """The exact tokens of one context: prompts, observations and sampled replies.

  Attributes:
    tokens: int32 [T].
    action_mask: bool [T], True where the policy sampled the token.
    behaviour_logprobs: float32 [T], log-probs under the distribution that the tokens were
      sampled from, after guides and truncation; 0 off the action mask.
    policy_steps: int32 [T], the number of rollouts that the sampling policy had been
      trained on; 0 off the action mask. All 0 by default.
    pictures: The pictures that its tokens stand for, uint8 [H, W, 3] each.
    routes: The experts that computed each token in the sampler, int8 or int16 [T, L, k]
      for the k experts in each of L layers; NO_EXPERT if unknown. None if there are no
      experts, or none were recorded.
  """

  tokens: np.ndarray
  action_mask: np.ndarray
  behaviour_logprobs: np.ndarray
  policy_steps: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
  pictures: Sequence[np.ndarray] = ()
  routes: np.ndarray | None = None

  def __post_init__(self):
    if not len(self.policy_steps):
      self.policy_steps = np.zeros(len(self.tokens), np.int32)

  def check(self) -> None:
    """Raises ValueError unless all arrays have an entry for each token."""
    columns = self.action_mask, self.behaviour_logprobs, self.policy_steps
    shapes = {np.shape(column) for column in (self.tokens, *columns)}
    if self.routes is not None:
      shapes.add(np.shape(self.routes)[:1])
    if shapes != {(len(self.tokens),)}:
      raise ValueError(f'the arrays of a segment have the shapes {shapes}')

  @classmethod
  def read(cls, prompt: Prompt) -> 'Segment':
    """Makes a segment from tokens that the policy read, which are not actions."""
    none = np.zeros(len(prompt), np.float32)
    tokens = prompt.tokens.astype(np.int32)
    return cls(tokens, none > 0, none, pictures=tuple(prompt.pictures))

  @property
  def prompt(self) -> Prompt:
    """All tokens and pictures, for a policy to read."""
    return Prompt(self.tokens, self.pictures)

  def add_turn(self, prompt: Prompt, reply: SampledReply) -> 'Segment':
    """Returns the segment extended by what the policy read next and its reply."""
    sampled = Segment(
      reply.tokens.astype(np.int32),
      np.ones(len(reply.tokens), bool),
      reply.behaviour_logprobs.astype(np.float32),
      reply.policy_steps.astype(np.int32),
    )
    joined = Segment.join([self, Segment.read(prompt), sampled])
    if reply.routes is not None:
      after = len(joined.tokens) - len(reply.routes)
      routes = np.pad(
        reply.routes, [(0, after), (0, 0), (0, 0)], constant_values=NO_EXPERT
      )
      # Keep the first known experts, which sampled; a row may have been recomputed.
      first = routes if joined.routes is None else joined.routes
      joined.routes = np.where(first == NO_EXPERT, routes, first)
    return joined

  @classmethod
  def join(cls, segments: Sequence['Segment']) -> 'Segment':
    """Joins segments, one after the other."""
    segments = [cls.read(Prompt()), *segments]
    column = lambda name: np.concatenate([getattr(s, name) for s in segments])
    return cls(
      *map(column, ('tokens', 'action_mask', 'behaviour_logprobs', 'policy_steps')),
      pictures=tuple(x for s in segments for x in s.pictures),
      routes=_join_routes(segments),
    )


def _join_routes(segments: Sequence[Segment]) -> np.ndarray | None:
  known = [s.routes for s in segments if s.routes is not None]
  if not known:
    return None
  unknown = np.full((1, *known[0].shape[1:]), NO_EXPERT, known[0].dtype)
  fill = lambda s: np.repeat(unknown, len(s.tokens), 0) if s.routes is None else s.routes
  return np.concatenate([fill(s) for s in segments])
