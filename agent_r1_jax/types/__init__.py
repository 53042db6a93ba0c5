"""The data types shared by all rooms: records on the host, and the device's batch.

Task -> Trajectory (text and tokens, on the host) -> Batch (packed arrays, on devices).
Letters: B packed rows, T tokens and E entries per row, F features of pictures' tokens, D
embed, L layers, k experts per token.
"""

from collections.abc import Iterable
import dataclasses
import enum
import functools
import itertools
import string
from typing import Any, NamedTuple

from jax import Array
from jaxtyping import Bool, Float, Int
import numpy as np

from agent_r1_jax.types.segments import FIRST_PICTURE_ID as FIRST_PICTURE_ID
from agent_r1_jax.types.segments import NO_EXPERT as NO_EXPERT
from agent_r1_jax.types.segments import Prompt as Prompt
from agent_r1_jax.types.segments import SampledReply as SampledReply
from agent_r1_jax.types.segments import Segment as Segment
from agent_r1_jax.types.segments import make_picture_ids as make_picture_ids

# A chat message in the Hugging Face form: {'role': ..., 'content': ...}. Control tokens
# in its strings are encoded as plain text, unless they are ControlText.
Message = dict[str, Any]


class Status(enum.StrEnum):
  """How an episode ended; each member equals its string in files and metrics."""

  # The environment ended it.
  DONE = 'done'
  # A turn or the row ran out of tokens.
  OUT_OF_TOKENS = 'truncated'
  # The turn budget was used.
  OUT_OF_TURNS = 'max_turns'
  # The environment or the reward raised or timed out; such a trajectory is masked out,
  # never scored 0.
  FAILED = 'error'


BUDGET_STATUSES = (Status.OUT_OF_TOKENS, Status.OUT_OF_TURNS)


class ControlText(str):
  """A task's own text, whose control tokens are encoded as control tokens.

  All other text in a prompt is data: '<answer>' in it is encoded as ordinary characters,
  even if the tokenizer has a control token of that name. Mark only the task's own words:

    ASK = types.ControlText('Answer inside <answer> and </answer>: {question}')
    task = types.Task('1', [{'role': 'user', 'content': ASK.format(question=question)}])

  Values that `format` fills in are data unless they are ControlText themselves. All other
  methods, including `+`, return plain strings, which are data.

  Attributes:
    parts: The pieces of the text, alternately control text and data; the first is
      control.
  """

  parts: tuple[str, ...]

  def __new__(cls, text: str, parts: tuple[str, ...] | None = None):
    """Marks a text as control text, or only every other of the `parts` that form it."""
    self = super().__new__(cls, text)
    self.parts = (str(text),) if parts is None else parts
    return self

  @classmethod
  def joined(cls, pieces: Iterable[tuple[str, bool]]) -> 'ControlText':
    """Joins pieces of text; the flag of each says whether it is control text."""
    parts = ['']
    for text, control in pieces:
      if not text:
        continue
      # Control text has even indices. Adjacent pieces of one kind are merged, so that two
      # pieces of data cannot form a control token together.
      if (len(parts) % 2 == 1) != control:
        parts.append('')
      parts[-1] += text
    return cls(''.join(parts), tuple(parts))

  def format(self, *args: Any, **kwargs: Any) -> 'ControlText':
    """Formats as str.format, with simple fields: '{name}', '{0.x}', '{:5.2f}'.

    Raises:
      ValueError: The text already contains data.
    """
    if len(self.parts) != 1:
      raise ValueError('format: the text has been filled in already.')
    formatter, numbers = string.Formatter(), itertools.count()
    pieces: list[tuple[str, bool]] = []
    for literal, name, spec, conversion in formatter.parse(self.parts[0]):
      pieces.append((literal, True))
      if name is None:
        continue
      if not name or name[0] in '.[':
        name = f'{next(numbers)}{name}'
      value, _ = formatter.get_field(name, args, kwargs)
      if isinstance(value, ControlText) and not (spec or conversion):
        pieces += [(part, i % 2 == 0) for i, part in enumerate(value.parts)]
      else:
        value = formatter.convert_field(value, conversion)
        pieces.append((format(value, spec or ''), False))
    return ControlText.joined(pieces)


@dataclasses.dataclass(frozen=True)
class Task:
  """A row of a data set: the agent's prompt, and the data for its reward."""

  id: str
  messages: list[Message]
  answer: Any = None
  info: dict[str, Any] = dataclasses.field(default_factory=dict)

  def ask(self, content: str) -> 'Task':
    """Returns the task with a single user message."""
    return dataclasses.replace(self, messages=[{'role': 'user', 'content': content}])


@dataclasses.dataclass
class Step:
  """An environment's answer to one reply.

  Attributes:
    messages: The messages that the agent sees next; empty when `done`.
    reward: The reward of this turn; the turn's last action token gets it.
    done: Whether the episode is over.
    fresh: Whether to drop the context: `messages` is then a new prompt, which starts a
      new segment.
    metrics: Named numbers to log for the trajectory. 'reward/NAME' names a part of the
      reward, which gdpo reads; the number itself is not added to the reward.
  """

  messages: list[Message]
  reward: float = 0.0
  done: bool = False
  fresh: bool = False
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Turn:
  """One reply: `segments[segment].tokens[start:stop]` are its tokens, all actions."""

  segment: int
  start: int
  stop: int
  reward: float = 0.0


@dataclasses.dataclass
class Trajectory:
  """One episode.

  Attributes:
    task: The task.
    group: Number of the group; its trajectories answer the same task.
    sample: Number of the trajectory in its group.
    segments: The contexts; empty if the prompt did not fit a row, or after some errors.
    turns: The replies in order; each has its reward at token `turn.stop - 1`.
    messages: The conversation as text, for people and rewards.
    status: How it ended.
    metrics: Named numbers to log, summed over the steps' metrics. 'timeouts' is 1 if the
      user's code timed out; 'abandoned_calls' counts calls that never returned, and
      'abandoned/<name>' those of one tool or function.
    error: The exception or timeout, if the status is FAILED; or why there are no turns.
  """

  task: Task
  group: int
  sample: int
  segments: list[Segment]
  turns: list[Turn]
  messages: list[Message]
  status: Status
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)
  error: str | None = None

  @property
  def policy_steps(self) -> np.ndarray:
    """The policy_steps of all action tokens, int32."""
    return np.concatenate(
      [np.zeros(0, np.int32), *(s.policy_steps[s.action_mask] for s in self.segments)]
    )

  @property
  def reward(self) -> float:
    """The undiscounted sum of the turns' rewards."""
    return float(sum(turn.reward for turn in self.turns))


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
  """A finite automaton over the tokens of a vocabulary; it begins in state 0.

  agent/automata.py makes automata from stop strings, grammars/compiler.py from grammars.
  Letters: V tokens, Q states, C classes of tokens.

  Attributes:
    classes: int32 [V]; tokens of one class have the same transitions in all states.
    table: int [Q, C]; table[state, classes[token]] is the next state, or -1 if the token
      is forbidden there. Every state allows at least one token.
    ends: bool [Q]; a reply ends with the token that reaches such a state.
  """

  classes: np.ndarray
  table: np.ndarray
  ends: np.ndarray

  @functools.cached_property
  def restricts(self) -> bool:
    """Whether it forbids a token in some state."""
    return bool((self.table < 0).any())

  @functools.cached_property
  def kinds(self) -> tuple[np.ndarray, np.ndarray]:
    """The kind of each state, int32 [Q], and each kind's token mask, uint32 [K, W].

    States of one kind allow the same tokens; bit i of [kind, w] is for token 32 w + i.
    """
    number: dict[bytes, int] = {}
    kinds_Q = np.zeros(len(self.table), np.int32)
    words = -(-len(self.classes) // 32)
    masks_KW = []
    for q, allowed_C in enumerate(self.table >= 0):
      key = np.packbits(allowed_C).tobytes()
      if key not in number:
        number[key] = len(number)
        bits = np.packbits(allowed_C[self.classes], bitorder='little')
        # Little-endian words, so that bit i of a word is bit i % 8 of its byte i // 8.
        masks_KW.append(np.pad(bits, (0, 4 * words - len(bits))).view('<u4'))
      kinds_Q[q] = number[key]
    return kinds_Q, np.stack(masks_KW).astype(np.uint32, copy=False)


class Segments(NamedTuple):
  """Complete segments in packed rows: attention is causal within each segment."""

  ids: Int[Array, 'B T']  # 1, 2, ... within a packed row; 0 is padding.


class Tree(NamedTuple):
  """Prefix trees in packed rows: a shared prefix is stored once.

  rl/prefix_trees.py has an example.

  Attributes:
    parents: The column of the previous token; a segment's first token has its own.
    ends: The column after the token's last descendant: position t sees position s if
      s <= t < ends[s].
  """

  parents: Int[Array, 'B T']
  ends: Int[Array, 'B T']


class Pictures(NamedTuple):
  """The pictures in rows; rl/picture_rows.py and engine/row_pictures.py make them.

  Attributes:
    coordinates: The M-RoPE coordinates of each token: time, row and column; see
      models/pictures/picture_tokens.locate.
    index: The index of each token's feature, -1 for text; it counts per row with
      `patches`, else over all `features`. Like these two it is None for text alone, which
      may follow pictures.
    features: The embeddings of pictures' tokens, if already computed; each is followed by
      the terms that the first decoder layers add, in families that do so.
    patches: The patches of each row's pictures, from which the vision tower computes the
      features; see models/pictures/picture_tokens.PatchBatch.
  """

  coordinates: Int[Array, 'B T 3']
  index: Int[Array, 'B T'] | None = None
  features: Float[Array, 'F nD'] | None = None
  patches: Any = None


class Rows(NamedTuple):
  """All inputs of a model: packed rows, or the next tokens of cached rows.

  Optional fields are set at their source, and read by the layer that uses them.

  Attributes:
    tokens: Token ids.
    positions: The position of each token in its segment, from 0; with a cache, the slot
      to write, or kv_cache.NOWHERE.
    sees: The attention mask of packed rows; None with a cache, whose rows hold one
      sequence each.
    pictures: The pictures that tokens stand for, if any.
    routes: The experts that compute each token; NO_EXPERT where the router chooses. None
      if it always does.
    adapters: The adapter of each row, as models/lora.Adapters; None without adapters.
  """

  tokens: Int[Array, 'B T']
  positions: Int[Array, 'B T']
  sees: Segments | Tree | None = None
  pictures: Pictures | None = None
  routes: Int[Array, 'B T L k'] | None = None
  adapters: Any = None


class Batch(NamedTuple):
  """Packed rows on the device, and the entries of their loss.

  An entry is a token of a segment. In trees, a shared token has one entry per segment;
  without trees, entries and tokens have the same columns.

  Attributes:
    rows: The inputs of models.
    segment_ids: 1, 2, ... within a packed row; 0 is padding.
    action_mask: True where the policy sampled the token (the paper's action mask).
    old_logprobs: log π_old, the denominator of a loss's ratio: the behaviour log-probs,
      or with a correction those of the policy before the update; 0 off the action mask.
    advantages: Advantage of each action token; 0 off the action mask.
    weights: Weight of each token in the loss, Σ weights · token loss, including the
      global denominators. Off the action mask it is 0 in RL, and small in fine-tuning.
    ref_logprobs: Log-probs of the reference policy, if a KL term needs them.
    kl_weights: Weight of each token in the KL term of the loss, including its
      coefficient.
    correction: Importance weights of off-policy tokens; they multiply the policy loss.
    values: The critic's values at rollout, if there is a critic.
    returns: The critic's targets, if there is a critic.
    columns: The column of each entry's token in its row; None if the columns are equal.
  """

  rows: Rows
  segment_ids: Int[Array, 'B E']
  action_mask: Bool[Array, 'B E']
  old_logprobs: Float[Array, 'B E']
  advantages: Float[Array, 'B E']
  weights: Float[Array, 'B E']
  ref_logprobs: Float[Array, 'B E'] | None = None
  kl_weights: Float[Array, 'B E'] | None = None
  correction: Float[Array, 'B E'] | None = None
  values: Float[Array, 'B E'] | None = None
  returns: Float[Array, 'B E'] | None = None
  columns: Int[Array, 'B E'] | None = None
