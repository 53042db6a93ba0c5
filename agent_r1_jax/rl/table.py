"""The token table: the tokens of a rollout, with a column for each quantity.

`build` makes a table from trajectories; models and estimators add columns (rl/scoring.py,
rl/credit.py). Reward transforms, advantages and corrections are functions of its columns
(rl/advantages.py, rl/losses.py), and packing copies columns into the device's batch
(rl/packing.py). Columns are NumPy arrays on the host; estimators compute in float64. A
table is never modified: `dataclasses.replace(table, rewards=...)` returns a new one.

Tokens are ordered by trajectory, by segment, and within the segment. The columns
`trajectory`, `turn` and `segment` say where a token belongs, as numbers that count over
the batch. They also broadcast: if x has a number for each trajectory,
`x[table.trajectory]` has one for each token.

Letters: n tokens, K turns, N trajectories.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import get_args

from jaxtyping import Bool, Float, Int
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.rl import spans

# Metrics of a trajectory with this prefix are named parts of its reward.
_PART = 'reward/'
_NO_TOKENS = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class TokenTable:
  """Tokens of trajectories, or the subset of them that an estimator sees, as columns.

  A column that has not been computed is None.
  """

  tokens: Int[np.ndarray, 'n']  # int32 token ids.
  action_mask: Bool[np.ndarray, 'n']  # True where the policy sampled the token.
  # log π_old, of the policy before the update: the denominator of a loss's ratio. Without
  # a correction these are the behaviour log-probs.
  old_logprobs: Float[np.ndarray, 'n']
  # The token's log-prob under the distribution that it was sampled from: of the policy of
  # `policy_steps`, after guides and truncation; 0 off the action mask.
  behaviour_logprobs: Float[np.ndarray, 'n']
  # int32, the number of rollouts that the sampling policy had been trained on; 0 off the
  # action mask.
  policy_steps: Int[np.ndarray, 'n']
  # The reward of a turn on its last action token, 0 on all other tokens.
  rewards: Float[np.ndarray, 'n']
  segment: Int[np.ndarray, 'n']  # The number of the token's segment.
  # The number of the token's turn. The environment's tokens after a reply belong to the
  # reply's turn; tokens before the first reply of a segment have -1.
  turn: Int[np.ndarray, 'n']
  trajectory: Int[np.ndarray, 'n']  # The number of the token's trajectory.
  turn_trajectory: Int[np.ndarray, 'K']  # The trajectory of each turn.
  # An id of the observation before each turn: the text since the policy's last turn, or a
  # complete new context. Equal texts have equal ids.
  states: Int[np.ndarray, 'K']
  # The group of each trajectory, counted from 0. The members of a group answered the same
  # task.
  group: Int[np.ndarray, 'N']
  # Whether a budget ended the trajectory, not the environment.
  truncated: Bool[np.ndarray, 'N']
  # Named parts of the trajectories' rewards; 0 where a trajectory lacks one.
  parts: Mapping[str, Float[np.ndarray, 'N']] = dataclasses.field(default_factory=dict)
  # The reward of the greedy episode of each trajectory's task.
  baselines: Float[np.ndarray, 'N'] | None = None
  # The critic's value of the state after each trajectory's last token.
  final_values: Float[np.ndarray, 'N'] | None = None
  # The critic's value of the state before the token.
  values: Float[np.ndarray, 'n'] | None = None
  # log π of the token under the reference policy.
  ref_logprobs: Float[np.ndarray, 'n'] | None = None
  advantages: Float[np.ndarray, 'n'] | None = None  # The advantage of the token.
  returns: Float[np.ndarray, 'n'] | None = None  # The regression target of the critic.
  weights: Float[np.ndarray, 'n'] | None = None  # The weight of the token in the loss.
  # The weight of the token in the KL term of the loss, coefficient included.
  kl_weights: Float[np.ndarray, 'n'] | None = None
  # The importance weight of the token; 1 off the action mask.
  correction: Float[np.ndarray, 'n'] | None = None
  # The distinct pictures that tokens stand for, uint8 [H, W, 3] each.
  pictures: tuple[np.ndarray, ...] = ()
  # The experts that computed each token in the sampler; see types.Segment.
  routes: Int[np.ndarray, 'n L k'] | None = None

  def __len__(self) -> int:
    """n."""
    return len(self.tokens)

  def column(self, name: str) -> np.ndarray:
    """Returns a column.

    Raises:
      ValueError: The column has not been computed; the message says what computes it.
    """
    if (column := getattr(self, name)) is None:
      remedy = _REMEDIES.get(name, 'nobody has computed them')
      raise ValueError(f'The table has no {name}: {remedy}.')
    return column

  @property
  def scores(self) -> Float[np.ndarray, 'N']:
    """The undiscounted reward of each trajectory."""
    return spans.sum_by(self.trajectory, self.rewards, len(self.group))

  @property
  def turn_rewards(self) -> Float[np.ndarray, 'K']:
    """The reward of each turn."""
    return spans.sum_by(self.turn, self.rewards, len(self.states))

  @property
  def lengths(self) -> Int[np.ndarray, 'N']:
    """The number of tokens of each trajectory."""
    return np.bincount(self.trajectory, minlength=len(self.group))

  @property
  def segment_lengths(self) -> Int[np.ndarray, 'S']:
    """The number of tokens of each segment that has any, in the table's order."""
    return np.diff(np.append(spans.starts(self.segment), len(self)))

  def take(self, which: Int[np.ndarray, 'm'] | Bool[np.ndarray, 'n']) -> 'TokenTable':
    """Selects tokens, in the given order; turns and trajectories keep their columns."""
    return self._map_tokens(lambda column: column[which])

  def for_other_model(self) -> 'TokenTable':
    """Returns the table for another model, whose routers choose their own experts."""
    return dataclasses.replace(self, routes=None)

  def find_tokens(self, trajectories: Sequence[int]) -> Int[np.ndarray, 'm']:
    """Returns the indices of the trajectories' tokens, in the order of `trajectories`."""
    numbers = np.split(np.arange(len(self)), np.cumsum(self.lengths))
    return np.concatenate([np.zeros(0, int), *(numbers[i] for i in trajectories)])

  def find_visible(self, action_mask: bool) -> Bool[np.ndarray, 'n']:
    """Returns a mask of the tokens that estimators see.

    With `action_mask` these are the action tokens. Without, they are all tokens after the
    first prompt of a segment (the paper's ablation), as if the policy had sampled the
    environment's tokens too.
    """
    if action_mask:
      return self.action_mask
    # The tokens of pictures are not in the vocabulary and have no log-probs.
    return (self.turn >= 0) & (self.tokens < types.FIRST_PICTURE_ID)

  def scatter(
    self, which: Bool[np.ndarray, 'n'], x: Float[np.ndarray, 'm'], rest: float = 0.0
  ) -> Float[np.ndarray, 'n']:
    """Returns a column with x where the mask `which` is True, and `rest` elsewhere."""
    column = np.full(len(self), rest)
    column[which] = x
    return column

  def add_prefixes(
    self, prefixes: Sequence[Int[np.ndarray, '_']]
  ) -> tuple['TokenTable', Bool[np.ndarray, 'm']]:
    """Inserts tokens before every segment.

    Returns:
      The longer table, and a mask of the original tokens in it.
    """
    first = spans.starts(self.segment)
    inserted = [prefixes[i] for i in self.trajectory[first]]
    before = np.repeat(first, [len(tokens) for tokens in inserted])
    table = self.for_other_model()  # A prefix changes the routes after it.
    longer = table._map_tokens(lambda column: np.insert(column, before, 0))
    longer = dataclasses.replace(
      longer,
      tokens=np.insert(self.tokens, before, np.concatenate([_NO_TOKENS, *inserted])),
      segment=np.insert(self.segment, before, self.segment[before]),
      turn=np.insert(self.turn, before, -1),
      trajectory=np.insert(self.trajectory, before, self.trajectory[before]),
    )
    return longer, np.insert(np.ones(len(self), bool), before, False)

  def list_tokens(self) -> dict[str, list]:
    """Returns the columns of tokens as lists, for a log.

    Action masks become 0 and 1, and other numbers are rounded to four decimals.
    `segments` has the number of tokens of each segment. Columns that have not been
    computed, or have several numbers per token, are left out.
    """
    # Segment, turn and trajectory numbers count over the batch, not over one episode.
    columns = {
      name: column
      for name, column in self._get_token_columns().items()
      if column.ndim == 1 and name not in ('segment', 'turn', 'trajectory')
    }
    return {'segments': self.segment_lengths.tolist()} | {
      name: (column + 0 if column.dtype == bool else np.round(column, 4)).tolist()
      for name, column in columns.items()
    }

  def _map_tokens(self, change: Callable[[np.ndarray], np.ndarray]) -> 'TokenTable':
    columns = self._get_token_columns()
    return dataclasses.replace(self, **{name: change(x) for name, x in columns.items()})

  def _get_token_columns(self) -> dict[str, np.ndarray]:
    """Returns the computed columns with an entry for each token."""
    columns = {name: getattr(self, name) for name in _list_token_columns()}
    return {name: column for name, column in columns.items() if column is not None}


@functools.cache
def _list_token_columns() -> list[str]:
  """Lists the columns with an entry for each token: those annotated with 'n ...'."""
  shapes = {
    f.name: (get_args(f.type) or [f.type])[0] for f in dataclasses.fields(TokenTable)
  }
  dims = {name: getattr(shape, 'dim_str', '').split() for name, shape in shapes.items()}
  return [name for name, found in dims.items() if found[:1] == ['n']]


# How a user gets a column that is missing.
_REMEDIES = {
  'values': 'set value_loss of the algorithm, so that there is a critic',
  'ref_logprobs': "set kl of the algorithm, or add 'ref_logprobs' to its reads, so that "
  'the reference policy scores the tokens',
  'baselines': "add 'baselines' to reads of the algorithm, so that a greedy episode of "
  'each task is played',
  'advantages': 'let advantages of the algorithm return a table that has them',
  'returns': 'let advantages of the algorithm return a table that has them, or leave '
  'value_loss out',
}


def build(
  trajectories: Sequence[types.Trajectory], baselines: Sequence[float] | None = None
) -> TokenTable:
  """Makes the table of all tokens of some trajectories; it shares no arrays with them.

  `baselines` has the reward of the greedy episode of each trajectory's task.

  Raises:
    ValueError: A turn has no tokens, or tokens that are not actions, so that its reward
      would be lost; or the turns do not contain every action token once and in order.
  """
  table = from_segments([s for t in trajectories for s in t.segments])
  numbers = np.arange(len(trajectories))
  owner = np.repeat(numbers, [len(t.segments) for t in trajectories])
  names = {name for t in trajectories for name in t.metrics if name.startswith(_PART)}
  part = lambda name: np.array([t.metrics.get(name, 0.0) for t in trajectories], float)
  turn, rewards, states = _turn_columns(trajectories, table)
  return dataclasses.replace(
    table,
    rewards=rewards,
    turn=turn,
    trajectory=owner[table.segment],
    turn_trajectory=np.repeat(numbers, [len(t.turns) for t in trajectories]),
    states=states,
    group=np.unique([t.group for t in trajectories], return_inverse=True)[1],
    truncated=np.array([t.status in types.BUDGET_STATUSES for t in trajectories], bool),
    parts={name.removeprefix(_PART): part(name) for name in sorted(names)},
    baselines=None if baselines is None else np.array(baselines, float),
  )


def _turn_columns(
  trajectories: Sequence[types.Trajectory], table: TokenTable
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns the columns `turn`, `rewards` and `states`; see TokenTable.

  Example: a trajectory of two segments. The second line has '.' for the environment's
  tokens, and the number of the turn for actions:

    index     0  1  2  3  4  5  6  7 |  8  9 10
    source    .  .  0  0  .  1  1  . |  .  .  2
    turn     -1 -1  0  0  0  1  1  1 | -1 -1  2

  Turn 1 starts at 5, stops at 7, and has its reward at 6. Its state is token 4, the text
  that the policy was shown since its last turn.

  Raises:
    ValueError: The turns do not hold every action token once and in order.
  """
  turns = [x for t in trajectories for x in t.turns]
  owner = np.repeat(np.arange(len(trajectories)), [len(t.turns) for t in trajectories])
  segments = [len(s.tokens) for t in trajectories for s in t.segments]
  edges = np.cumsum([0, *segments])  # Where segments begin, and the last one's end.
  before = np.cumsum([0, *(len(t.segments) for t in trajectories)])
  segment = before[owner] + np.array([x.segment for x in turns], int)
  begin, end = edges[segment], edges[segment + 1]
  start = begin + np.array([x.start for x in turns], int)
  stop = begin + np.array([x.stop for x in turns], int)
  _check_turns(trajectories, table, owner, begin, start, stop, end)
  turn, rewards, states = np.full(len(table), -1), np.zeros(len(table)), []
  texts: dict[bytes, int] = {}
  for k, x in enumerate(turns):
    # Later turns of the segment overwrite their part.
    turn[start[k] : end[k]] = k
    rewards[stop[k] - 1] = x.reward
    shown = begin[k]
    if k and owner[k - 1] == owner[k]:
      # The context up to the end of the last turn. It is in the same segment, or a new
      # segment repeats it, as in an append-only episode that is stored step by step.
      known = table.tokens[begin[k - 1] : stop[k - 1]]
      repeats = np.array_equal(table.tokens[shown : end[k]][: len(known)], known)
      shown += len(known) if repeats else 0
    text = table.tokens[shown : start[k]].tobytes()
    states.append(texts.setdefault(text, len(texts)))
  return turn, rewards, np.array(states, int)


def _check_turns(trajectories, table: TokenTable, owner, begin, start, stop, end) -> None:
  """Raises ValueError unless the turns hold every action token once and in order."""
  n = len(table)
  actions_before = np.append(0, np.cumsum(table.action_mask))  # Before each token.
  actions = actions_before[np.minimum(stop, n)] - actions_before[start.clip(0, n)]
  inside = (begin <= start) & (start < stop) & (stop <= end)
  for k in np.flatnonzero(~inside | (actions != stop - start))[:1]:
    number, t = k - np.searchsorted(owner, owner[k]), trajectories[owner[k]]
    raise ValueError(
      f'Turn {number} of task {t.task.id!r} spans tokens {start[k] - begin[k]}:'
      f'{stop[k] - begin[k]}, which are not all action tokens; its reward would be lost.'
    )
  ordered = np.ones(len(start), bool)
  ordered[1:] = start[1:] >= stop[:-1]
  for i, t in enumerate(trajectories):
    mine, count = owner == i, sum(s.action_mask.sum() for s in t.segments)
    if not ordered[mine].all() or (stop - start)[mine].sum() != count:
      raise ValueError(
        f'The turns of task {t.task.id!r} do not hold its action tokens, each once and '
        'in order.'
      )


def from_segments(segments: Sequence[types.Segment]) -> TokenTable:
  """Makes a table of segments without turns; each is a trajectory in its own group."""
  numbers = np.arange(len(segments))
  number = np.repeat(numbers, [len(s.tokens) for s in segments])
  joined = types.Segment.join(segments)
  logprobs = joined.behaviour_logprobs.astype(np.float64)
  none = np.zeros(0, int)
  return TokenTable(
    tokens=joined.tokens.astype(np.int32),
    action_mask=joined.action_mask.astype(bool),
    old_logprobs=logprobs,
    behaviour_logprobs=logprobs,
    policy_steps=joined.policy_steps.astype(np.int32),
    rewards=np.zeros(len(number)),
    segment=number,
    turn=np.full(len(number), -1),
    trajectory=number,
    turn_trajectory=none,
    states=none,
    group=numbers,
    truncated=np.zeros(len(segments), bool),
    pictures=_find_distinct(joined.pictures),
    routes=joined.routes,
  )


def _find_distinct(pictures: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
  return tuple({(x.shape, x.tobytes()): x for x in pictures}.values())
