"""The data that flows through the system: host records and one device batch.

Task -> Trajectory (text and tokens, on the host) -> Batch (packed arrays, on devices).
Letters: B rows, T tokens of a row.
"""

from collections.abc import Iterable
import dataclasses
import functools
import itertools
import string
from typing import Any, NamedTuple

from jax import Array
from jaxtyping import Bool, Float, Int
import numpy as np

# A chat message in the Hugging Face form: {'role': ..., 'content': ...}. Its strings are
# data; see ControlText for what is not.
Message = dict[str, Any]

# How an episode ended. 'done': the environment said so. 'truncated': a turn or the row
# ran out of tokens. 'max_turns': the turn budget was used. 'error': the environment or
# the reward raised or took too long; such a trajectory is masked out, never scored 0.
STATUSES = ('done', 'truncated', 'max_turns', 'error')
# A budget ended these, not the environment.
BUDGETS = ('truncated', 'max_turns')


class ControlText(str):
  """Text of a task's own, in which control tokens are meant as control tokens.

  Everything else that gets into a prompt is data: '<answer>' in it is encoded as ordinary
  characters, even where the tokenizer has a control token of that name. Mark the words of
  the task itself, and only these:

    ASK = types.ControlText('Answer inside <answer> and </answer>: {question}')
    task = types.Task('1', [{'role': 'user', 'content': ASK.format(question=question)}])

  `format` keeps the marks, and what it fills in stays data unless it is a ControlText
  itself. All other methods, `+` too, give plain strings, which are data.

  Attributes:
    parts: The text in pieces, by turns control text and data; it begins with the former.
  """

  parts: tuple[str, ...]

  def __new__(cls, text: str, parts: tuple[str, ...] | None = None):
    """Marks all of a text, or with `parts`, which join to it, every second part of it."""
    self = super().__new__(cls, text)
    self.parts = (str(text),) if parts is None else parts
    return self

  @classmethod
  def joined(cls, pieces: Iterable[tuple[str, bool]]) -> 'ControlText':
    """Joins pieces of text, each with whether it is control text."""
    parts = ['']
    for text, control in pieces:
      if not text:
        continue
      # Control text has even numbers. Neighbours of one kind become one part, so that two
      # pieces of data cannot make up a control token between them.
      if (len(parts) % 2 == 1) != control:
        parts.append('')
      parts[-1] += text
    return cls(''.join(parts), tuple(parts))

  def format(self, *args: Any, **kwargs: Any) -> 'ControlText':
    """As str.format, with simple fields: '{name}', '{0.attribute}', '{:5.2f}'.

    Raises:
      ValueError: The text has data in it already.
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
  """One row of a data set: what the agent is asked, and what its reward needs."""

  id: str
  messages: list[Message]
  answer: Any = None
  info: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Step:
  """An environment's answer to one reply.

  Attributes:
    messages: What the agent sees next; empty when `done`.
    reward: For this turn; it will sit on the turn's last action token.
    done: The episode is over.
    fresh: Forget the context: `messages` is a whole new prompt and starts a new segment.
    metrics: Named numbers to log for the trajectory; never part of the reward.
  """

  messages: list[Message]
  reward: float = 0.0
  done: bool = False
  fresh: bool = False
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Segment:
  """A contiguous context, token-exact: what was fed and what was sampled.

  Attributes:
    tokens: int32 [T].
    action_mask: bool [T], True where the policy chose the token.
    logprobs: float32 [T], of the behaviour policy; 0 off the action mask.
    policy_steps: int32 [T], the updates that the policy had seen which chose the token;
      0 off the action mask, and by default everywhere.
  """

  tokens: np.ndarray
  action_mask: np.ndarray
  logprobs: np.ndarray
  policy_steps: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))

  def __post_init__(self):
    if not len(self.policy_steps):
      self.policy_steps = np.zeros(len(self.tokens), np.int32)


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
    task: What was asked.
    group: Trajectories of one group answer the same task; the id is unique in a batch.
    sample: The member's number in its group.
    segments: At least one, unless the status is 'error' or the prompt did not fit a row.
    turns: In order; rewards sit at `turn.stop - 1`.
    messages: The conversation as text, for people and rewards.
    status: One of STATUSES.
    metrics: Named numbers to log (summed over the steps' metrics). 'timeouts' is 1 where
      something of a user's was late, 'abandoned_calls' how many calls were given up that
      did not end, and 'abandoned/<name>' those of one tool or function.
    error: What was raised or late, when status is 'error'; or why there is no turn.
  """

  task: Task
  group: int
  sample: int
  segments: list[Segment]
  turns: list[Turn]
  messages: list[Message]
  status: str
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)
  error: str | None = None

  @property
  def policy_steps(self) -> np.ndarray:
    """int32, the updates that the policy had seen which chose each action token."""
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

  The text side makes one of stop strings or a grammar (agent/automata.py), and the engine
  runs it. Letters: V tokens, Q states, C classes of tokens.

  Attributes:
    classes: int32 [V]; tokens of one class lead from each state to the same one.
    table: int [Q, C]; table[state, classes[token]] is the next state, and -1 says that
      the token is forbidden there. Some token is allowed in every state.
    ends: bool [Q]; a reply ends with the token that leads to such a state.
  """

  classes: np.ndarray
  table: np.ndarray
  ends: np.ndarray

  @functools.cached_property
  def restricts(self) -> bool:
    """Whether it forbids anything."""
    return bool((self.table < 0).any())


class Batch(NamedTuple):
  """Packed rows on the device; several segments share a row.

  Attributes:
    tokens: The text.
    positions: Restart at 0 in each segment.
    segment_ids: 1, 2, ... within a row; 0 is padding.
    action_mask: True where the policy chose the token (the paper's action mask).
    logprobs: Of the policy that the ratio starts from: the behaviour policy's, or where
      there is a correction, of the policy before the update; 0 off the action mask.
    advantages: Per action token, 0 off the action mask.
    weights: The token's share in the loss; in RL 0 off the action mask, in supervised
      fine-tuning small there. They carry the aggregation with its global denominators,
      so a loss is Σ weights · loss a token.
    ref_logprobs: Of the reference policy, where a KL term needs them.
    kl_weights: The token's share in the KL term of the loss, coefficient included.
    correction: Importance weights of stale trajectories; they multiply the policy loss.
    values: Of the critic at rollout, where there is one.
    returns: The critic's targets, where there is one.
  """

  tokens: Int[Array, 'B T']
  positions: Int[Array, 'B T']
  segment_ids: Int[Array, 'B T']
  action_mask: Bool[Array, 'B T']
  logprobs: Float[Array, 'B T']
  advantages: Float[Array, 'B T']
  weights: Float[Array, 'B T']
  ref_logprobs: Float[Array, 'B T'] | None = None
  kl_weights: Float[Array, 'B T'] | None = None
  correction: Float[Array, 'B T'] | None = None
  values: Float[Array, 'B T'] | None = None
  returns: Float[Array, 'B T'] | None = None
