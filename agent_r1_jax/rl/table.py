"""The token table: one row for each token of a rollout, one column for each quantity.

`build` makes a table of trajectories, models add columns to it (rl/credit.py), estimators
are functions of its columns (rl/rewards.py, rl/advantages.py, rl/correction.py), and
packing copies its rows into the device's batch (rl/packing.py). Columns are NumPy arrays
on the host; estimators compute in float64. A table is never modified:
`dataclasses.replace(table, rewards=...)` returns another one.

Rows are in the order of trajectories, of their segments, and of the tokens in these.
Three columns say where a row belongs: `trajectory`, `turn` and `segment` hold numbers
that are counted over the whole batch. They also broadcast: if x has a number for each
trajectory, `x[table.trajectory]` has one for each row.

Letters: n rows, K turns, N trajectories.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses

from jaxtyping import Bool, Float, Int
import numpy as np

from agent_r1_jax import types

# Metrics of a trajectory with this prefix are named parts of its reward.
_PART = 'reward/'
_NO_TOKENS = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class TokenTable:
  """The tokens of some trajectories, or the subset of them that an estimator sees.

  A column that has not been computed is None.

  Attributes:
    tokens: int32 token ids.
    action_mask: True where the policy sampled the token.
    logprobs: log π of the token under the policy before the update, with which the ratio
      of a loss is formed. Without a correction these are the sampler's log-probs.
    behaviour_logprobs: log π of the token under the policy that sampled it; 0 off the
      action mask.
    policy_steps: int32, the number of updates that the sampling policy had received.
    rewards: The reward of a turn on its last action token, 0 on all other tokens.
    segment: The number of the row's segment.
    turn: The number of the row's turn. What the environment wrote after a reply belongs
      to the reply's turn; tokens before the first reply of a segment have -1.
    trajectory: The number of the row's trajectory.
    turn_trajectory: The trajectory of each turn.
    states: An id of the text that the policy was shown right before each turn; equal
      texts have equal ids.
    group: The group of each trajectory, counted from 0. The members of a group answered
      the same task.
    truncated: Whether a budget, and not the environment, ended the trajectory.
    parts: Named parts of the trajectories' rewards; 0 where a trajectory lacks one.
    baselines: The reward of the greedy episode of each trajectory's task.
    final_values: The critic's value of the state after each trajectory's last token.
    values: The critic's value of the state before the token.
    ref_logprobs: log π of the token under the reference policy.
    advantages: The advantage of the token.
    returns: The regression target of the critic.
    weights: The weight of the token in the loss.
    kl_weights: The weight of the token in the KL term of the loss, coefficient included.
    correction: The importance weight of the token; 1 off the action mask.
  """

  tokens: Int[np.ndarray, 'n']
  action_mask: Bool[np.ndarray, 'n']
  logprobs: Float[np.ndarray, 'n']
  behaviour_logprobs: Float[np.ndarray, 'n']
  policy_steps: Int[np.ndarray, 'n']
  rewards: Float[np.ndarray, 'n']
  segment: Int[np.ndarray, 'n']
  turn: Int[np.ndarray, 'n']
  trajectory: Int[np.ndarray, 'n']
  turn_trajectory: Int[np.ndarray, 'K']
  states: Int[np.ndarray, 'K']
  group: Int[np.ndarray, 'N']
  truncated: Bool[np.ndarray, 'N']
  parts: Mapping[str, Float[np.ndarray, 'N']] = dataclasses.field(default_factory=dict)
  baselines: Float[np.ndarray, 'N'] | None = None
  final_values: Float[np.ndarray, 'N'] | None = None
  values: Float[np.ndarray, 'n'] | None = None
  ref_logprobs: Float[np.ndarray, 'n'] | None = None
  advantages: Float[np.ndarray, 'n'] | None = None
  returns: Float[np.ndarray, 'n'] | None = None
  weights: Float[np.ndarray, 'n'] | None = None
  kl_weights: Float[np.ndarray, 'n'] | None = None
  correction: Float[np.ndarray, 'n'] | None = None

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
    return sum_by(self.trajectory, self.rewards, len(self.group))

  @property
  def turn_rewards(self) -> Float[np.ndarray, 'K']:
    """The reward of each turn."""
    return sum_by(self.turn, self.rewards, len(self.states))

  @property
  def lengths(self) -> Int[np.ndarray, 'N']:
    """The number of rows of each trajectory."""
    return np.bincount(self.trajectory, minlength=len(self.group))

  @property
  def segment_lengths(self) -> Int[np.ndarray, 'S']:
    """The number of rows of each segment that has any, in the table's order."""
    return np.diff(np.append(starts(self.segment), len(self)))

  def take(self, rows: Int[np.ndarray, 'm'] | Bool[np.ndarray, 'n']) -> 'TokenTable':
    """Selects rows, in the given order; all turns and trajectories keep their columns."""
    return self._map_rows(lambda column: column[rows])

  def find_rows(self, trajectories: Sequence[int]) -> Int[np.ndarray, 'm']:
    """Returns the rows of some trajectories, in the order given."""
    spans = np.split(np.arange(len(self)), np.cumsum(self.lengths))
    return np.concatenate([np.zeros(0, int), *(spans[i] for i in trajectories)])

  def visible_rows(self, action_mask: bool) -> Bool[np.ndarray, 'n']:
    """Returns a mask of the rows that estimators see.

    Args:
      action_mask: True selects the action tokens. False selects everything after the
        first prompt of a segment (the paper's ablation): the environment's tokens take
        part as if the policy had sampled them.
    """
    return self.action_mask if action_mask else self.turn >= 0

  def scatter(
    self, rows: Bool[np.ndarray, 'n'], x: Float[np.ndarray, 'm'], rest: float = 0.0
  ) -> Float[np.ndarray, 'n']:
    """Returns a column with x in the chosen rows and `rest` in the others."""
    column = np.full(len(self), rest)
    column[rows] = x
    return column

  def add_prefixes(
    self, prefixes: Sequence[Int[np.ndarray, '_']]
  ) -> tuple['TokenTable', Bool[np.ndarray, 'm']]:
    """Inserts further tokens before every segment.

    Args:
      prefixes: The tokens of each trajectory's prefix. Their other columns are 0.

    Returns:
      The longer table, and a mask of the rows that this table has too.
    """
    first = starts(self.segment)
    inserted = [prefixes[i] for i in self.trajectory[first]]
    before = np.repeat(first, [len(tokens) for tokens in inserted])
    longer = self._map_rows(lambda column: np.insert(column, before, 0))
    longer = dataclasses.replace(
      longer,
      tokens=np.insert(self.tokens, before, np.concatenate([_NO_TOKENS, *inserted])),
      segment=np.insert(self.segment, before, self.segment[before]),
      turn=np.insert(self.turn, before, -1),
      trajectory=np.insert(self.trajectory, before, self.trajectory[before]),
    )
    return longer, np.insert(np.ones(len(self), bool), before, False)

  def list_tokens(self) -> dict[str, list]:
    """Returns the columns that describe tokens as lists, for a log.

    Action masks become 0 and 1, and other numbers are rounded to four decimals.
    `segments` has the number of tokens of each segment. Columns that have not been
    computed are left out.
    """
    columns = {name: getattr(self, name) for name in _LOGGED}
    return {'segments': self.segment_lengths.tolist()} | {
      name: (column + 0 if column.dtype == bool else np.round(column, 4)).tolist()
      for name, column in columns.items()
      if column is not None
    }

  def _map_rows(self, change: Callable[[np.ndarray], np.ndarray]) -> 'TokenTable':
    names = {field.name for field in dataclasses.fields(self)} - _NOT_OF_ROWS
    columns = {name: getattr(self, name) for name in names}
    return dataclasses.replace(
      self, **{name: change(x) for name, x in columns.items() if x is not None}
    )


# These columns have a number for each turn or each trajectory, the others for each row.
_NOT_OF_ROWS = {'turn_trajectory', 'states', 'group', 'truncated', 'parts', 'baselines'}
_NOT_OF_ROWS |= {'final_values'}
# The columns of a token that are logged.
_LOGGED = ('tokens', 'action_mask', 'policy_steps', 'logprobs', 'behaviour_logprobs')
_LOGGED += ('ref_logprobs', 'rewards', 'values', 'advantages', 'returns', 'correction')
# What a user has to do to get a column that is missing.
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
  """Makes the table of all tokens of some trajectories.

  Args:
    trajectories: The trajectories; the table shares no array with them.
    baselines: The reward of the greedy episode of each trajectory's task.

  Raises:
    ValueError: A turn has no tokens, or some that are not actions: its reward would be
      lost. Or the turns do not contain every action token once and in order.
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
    truncated=np.array([t.status in types.BUDGETS for t in trajectories], bool),
    parts={name.removeprefix(_PART): part(name) for name in sorted(names)},
    baselines=None if baselines is None else np.array(baselines, float),
  )


def _turn_columns(trajectories, table: TokenTable):
  """Returns the columns `turn`, `rewards` and `states`; see TokenTable.

  Raises:
    ValueError: The turns do not hold every action token once and in order.
  """
  acted = np.append(0, np.cumsum(table.action_mask))  # Actions before each row.
  rewards, turn, states = np.zeros(len(table)), np.full(len(table), -1), []
  texts: dict[bytes, int] = {}
  begin = 0  # The row where the trajectory begins.
  for t in trajectories:
    edges = [begin]
    for segment in t.segments:
      edges.append(edges[-1] + len(segment.tokens))
    last, reached = None, begin  # The turn before, and the row where it stopped.
    for number, x in enumerate(t.turns):
      first, end = edges[x.segment : x.segment + 2]  # The rows of the turn's segment.
      start, stop = first + x.start, first + x.stop  # The rows of its reply.
      inside = first <= start < stop <= end
      if not inside or acted[stop] - acted[start] != stop - start:
        raise ValueError(
          f'Turn {number} of task {t.task.id!r} spans tokens {x.start}:{x.stop}, which '
          'are not all action tokens; its reward would be lost.'
        )
      if acted[start] != acted[reached]:
        raise _wrong_turns(t)
      # What the environment wrote after a reply belongs to the reply's turn.
      turn[start:end] = len(states)
      rewards[stop - 1] = x.reward
      # A state is named by the text that is new to the policy: what stands between the
      # end of its last turn and this turn. A segment may also repeat the text of the one
      # before, as in an append-only episode that is stored as steps.
      known = first
      if last and last.segment == x.segment:
        known = reached
      elif last and np.array_equal(
        before := t.segments[last.segment].tokens[: last.stop],
        t.segments[x.segment].tokens[: last.stop],
      ):
        known = first + len(before)
      text = table.tokens[known:start].tobytes()
      states.append(texts.setdefault(text, len(texts)))
      last, reached = x, stop
    begin = edges[-1]
    if acted[begin] != acted[reached]:
      raise _wrong_turns(t)
  return turn, rewards, np.array(states, int)


def _wrong_turns(trajectory: types.Trajectory) -> ValueError:
  return ValueError(
    f'The turns of task {trajectory.task.id!r} do not hold its action tokens, each once '
    'and in order.'
  )


def from_segments(segments: Sequence[types.Segment]) -> TokenTable:
  """Makes the table of texts without turns; each is a trajectory in its own group."""
  join = lambda arrays, dtype: np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
  numbers = np.arange(len(segments))
  number = np.repeat(numbers, [len(s.tokens) for s in segments])
  logprobs = join([s.logprobs for s in segments], np.float64)
  none = np.zeros(0, int)
  return TokenTable(
    tokens=join([s.tokens for s in segments], np.int32),
    action_mask=join([s.action_mask for s in segments], bool),
    logprobs=logprobs,
    behaviour_logprobs=logprobs,
    policy_steps=join([s.policy_steps for s in segments], np.int32),
    rewards=np.zeros(len(number)),
    segment=number,
    turn=np.full(len(number), -1),
    trajectory=number,
    turn_trajectory=none,
    states=none,
    group=numbers,
    truncated=np.zeros(len(segments), bool),
  )


# Functions of columns, for estimators. `ids` holds the trajectory, turn or segment to
# which each number belongs; equal ids are neighbours.


def starts(ids: Int[np.ndarray, 'n']) -> Int[np.ndarray, 'm']:
  """The first index of each run of equal ids."""
  return np.flatnonzero(np.diff(ids, prepend=-2))


def ends(ids: Int[np.ndarray, 'n']) -> Int[np.ndarray, 'm']:
  """The last index of each run of equal ids."""
  return np.flatnonzero(np.diff(ids, append=-2))


def sum_by(
  ids: Int[np.ndarray, 'n'], x: Float[np.ndarray, 'n'], count: int
) -> Float[np.ndarray, 'm']:
  """Σ x for each of the ids 0, 1, ..., count - 1, which may come in any order."""
  # bincount of an empty array returns integers even where it has weights.
  return np.bincount(ids, x, minlength=count).astype(np.float64)


def discounted_sum(
  ids: Int[np.ndarray, 'n'], x: Float[np.ndarray, 'n'], factor: float
) -> Float[np.ndarray, 'n']:
  """y_t = x_t + f y_{t+1} within each run of equal ids, in log₂ n array operations.

  After j rounds y_t is the sum of the first 2ʲ terms of x_t + f x_{t+1} + f² x_{t+2} ...
  """
  y, reach, longest = x.copy(), 1, np.max(ends(ids) - starts(ids), initial=-1) + 1
  while reach < longest:
    same = ids[reach:] == ids[:-reach]
    y[:-reach] += factor**reach * np.where(same, y[reach:], 0.0)
    reach *= 2
  return y


def next_values(
  ids: Int[np.ndarray, 'n'], x: Float[np.ndarray, 'n'], after: Float[np.ndarray, 'm']
) -> Float[np.ndarray, 'n']:
  """x_{t+1} within each run of equal ids, and after[id] at its end."""
  y, last = np.append(x[1:], np.zeros(1))[: len(x)], ends(ids)
  y[last] = after[ids[last]]
  return y


def previous_values(
  ids: Int[np.ndarray, 'n'], x: Float[np.ndarray, 'n']
) -> Float[np.ndarray, 'n']:
  """x_{t-1} within each run of equal ids, and 0 at its beginning."""
  y = np.append(np.zeros(1), x)[: len(x)]
  y[starts(ids)] = 0.0
  return y


def map_by(
  keys: Sequence[np.ndarray],
  x: Float[np.ndarray, 'n'],
  measure: Callable[[np.ndarray], np.ndarray | float],
) -> Float[np.ndarray, 'n']:
  """Applies a function to the numbers of each group.

  map_by([table.group], table.scores, np.mean) is, for each trajectory, the mean score of
  its group.

  Args:
    keys: Arrays of integers; the members of a group have equal integers in all of them.
    x: The numbers.
    measure: Takes the numbers of a group, in their order; returns as many, or one for
      all of them.
  """
  members: dict[tuple, list[int]] = {}
  for i, key in enumerate(zip(*(k.tolist() for k in keys), strict=True)):
    members.setdefault(key, []).append(i)
  out = np.zeros(len(x))
  for chosen in members.values():
    out[chosen] = measure(x[chosen])
  return out


def tied(scores: Float[np.ndarray, 'n']) -> bool:
  """Whether all scores are equal, up to the rounding of sums of rewards."""
  return len(scores) < 2 or bool(np.ptp(scores) <= 1e-12 * np.abs(scores).max())
