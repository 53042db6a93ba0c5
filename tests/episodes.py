"""Trajectories from pictures, and the peers' numbers, for the tests of rl."""

from collections.abc import Sequence
import dataclasses
import functools
import pathlib
import types as types_lib

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.rl import table as table_lib


def trajectory(
  *pictures: str, rewards: Sequence[float] = (), group: int = 0, seed: int = 0
) -> types.Trajectory:
  """Makes a trajectory of one picture a segment; a digit is an action token of that turn.

  '..00...1' is a prompt of 2, a reply of 2, a tool's answer of 3 and a reply of 1 token.
  """
  rng = np.random.default_rng([seed, group])
  segments, turns = [], []
  for number, picture in enumerate(pictures):
    mask = np.array([c != '.' for c in picture])
    tokens = rng.integers(0, 64, len(picture)).astype(np.int32)
    logprobs = np.where(mask, rng.uniform(-3, 0, len(picture)), 0).astype(np.float32)
    segments.append(types.Segment(tokens, mask, logprobs))
    for digit in sorted(set(picture) - {'.'}):
      turns.append(types.Turn(number, picture.index(digit), picture.rindex(digit) + 1))
  for turn, reward in zip(turns, rewards, strict=True) if rewards else ():
    turn.reward = reward
  task = types.Task(f'task {group}', [])
  return types.Trajectory(task, group, seed, segments, turns, [], 'done')


def make_varied(n: int = 6) -> list[types.Trajectory]:
  """Makes groups of two of different shapes, some of several turns or segments."""
  pictures = [
    ('...00..111....2222',),
    ('..0',),
    ('....000..11', '.....22222'),
    ('..00000000...1111111.....',),
    ('.0.1.2.3',),
    ('......0000000', '...11...22..'),
  ]
  rng = np.random.default_rng(0)
  out = []
  for i in range(n):
    picture = pictures[i % len(pictures)]
    turns = len(set(''.join(picture)) - {'.'})
    rewards = rng.normal(size=turns).tolist()
    out.append(trajectory(*picture, rewards=rewards, group=i // 2, seed=i))
  return out


def visible_table(
  *trajectories: types.Trajectory, masked: bool = True, **columns
) -> table_lib.TokenTable:
  """Makes the table of the tokens that an estimator sees, with further columns."""
  table = table_lib.build(trajectories)
  table = table.take(table.find_visible(masked))
  columns = {name: np.array(column) for name, column in columns.items()}
  return dataclasses.replace(table, **columns)


def assert_close(actual, expected, tolerance: float = 1e-12) -> None:
  """Asserts that numbers are equal but for the tolerance, of each and of 1."""
  np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def make_table(
  turns: Sequence[Sequence[int]], group: Sequence[int] | None = None, **columns
) -> table_lib.TokenTable:
  """Makes a table of action tokens whose log-probs and rewards are 0.

  Args:
    turns: The number of tokens of each turn of each trajectory.
    group: The group of each trajectory; by default there is one group.
    **columns: Columns that replace the default ones.
  """
  sizes = [n for some in turns for n in some]
  owner = np.repeat(np.arange(len(turns)), [len(some) for some in turns])
  turn = np.repeat(np.arange(len(sizes)), sizes)
  zeros = np.zeros(len(turn))
  return table_lib.TokenTable(
    **{
      'tokens': zeros.astype(np.int32),
      'action_mask': zeros == 0,
      'old_logprobs': zeros,
      'behaviour_logprobs': zeros,
      'policy_steps': zeros.astype(np.int32),
      'rewards': zeros,
      'segment': owner[turn],
      'turn': turn,
      'trajectory': owner[turn],
      'turn_trajectory': owner,
      'states': np.zeros(len(owner), int),
      'group': np.zeros(len(turns), int) if group is None else np.array(group, int),
      'truncated': np.zeros(len(turns), bool),
    }
    | columns
  )


def reorder(table: table_lib.TokenTable, order: Sequence[int]) -> table_lib.TokenTable:
  """Puts the trajectories of a table into another order."""
  order = np.asarray(order)
  rows = table.take(table.find_tokens(order.tolist()))
  turns = np.concatenate([np.flatnonzero(table.turn_trajectory == i) for i in order])
  # The new number of each trajectory, and of each turn; -1, for no turn, stays -1.
  number, of_turn = np.argsort(order), np.append(np.argsort(turns), -1)
  changed = {'states': table.states[turns]}
  for name in ('group', 'truncated', 'baselines', 'final_values'):
    column = getattr(table, name)
    changed[name] = None if column is None else column[order]
  return dataclasses.replace(
    rows,
    turn=of_turn[rows.turn],
    trajectory=number[rows.trajectory],
    turn_trajectory=number[table.turn_trajectory[turns]],
    parts={name: part[order] for name, part in table.parts.items()},
    **changed,
  )


def split_by_trajectory(
  table: table_lib.TokenTable, column: np.ndarray
) -> list[np.ndarray]:
  """Splits a column into the parts of the trajectories."""
  return np.split(column, np.cumsum(table.lengths)[:-1]) if len(table.group) else []


@functools.cache
def golden() -> types_lib.MappingProxyType[str, np.ndarray]:
  """Loads what golden/make_ref_algos.py saved, as read-only arrays."""
  path = pathlib.Path(__file__).parent / 'golden' / 'ref_algos.npz'
  with np.load(path) as file:
    arrays = dict(file)
  for array in arrays.values():
    array.flags.writeable = False
  return types_lib.MappingProxyType(arrays)


def golden_mask() -> np.ndarray:
  """The action mask of the peers' episodes, bool [12, 24]."""
  return golden()['in/mask'] > 0


def golden_actions(
  rewards: str, *, joined: bool = False, masked: bool = True
) -> table_lib.TokenTable:
  """Makes the table of the peers' episodes.

  Args:
    rewards: 'rewards_outcome' or 'rewards_process'.
    joined: Agent-R1's view: rows, in the order `perm`, are steps of the trajectories
      `traj` of the groups `uid`. Its steps are our segments.
    masked: Whether only action tokens take part; each row begins with an action.
  """
  g = golden()
  rows, group = _rows(joined), g['in/uid' if joined else 'in/index']
  traj = g['in/traj'] if joined else np.arange(12)
  out, numbers = [], {'in/values': [], 'in/ref_logp': []}
  for t in np.unique(traj):
    segments, turns = [], []
    for number, row in enumerate(rows[traj == t].tolist()):
      mask = golden_mask()[row]
      segments.append(
        types.Segment(np.arange(24), mask, np.where(mask, g['in/old_logp'][row], 0))
      )
      edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
      for start, stop in edges.reshape(-1, 2).tolist():
        reward = float(g[f'in/{rewards}'][row, stop - 1])
        turns.append(types.Turn(number, start, stop, reward))
      for key, columns in numbers.items():
        columns.append(g[key][row])
    number = sorted(set(group)).index(group[traj == t][0])
    task = types.Task('golden', [])
    out.append(types.Trajectory(task, number, 0, segments, turns, [], 'done'))
  table = dataclasses.replace(
    table_lib.build(out),
    values=np.concatenate(numbers['in/values']),
    ref_logprobs=np.concatenate(numbers['in/ref_logp']),
  )
  return table.take(table.find_visible(masked))


def golden_at_actions(key: str, *, joined: bool = False) -> np.ndarray:
  """Selects the action tokens of a golden [12, 24], in the order of `golden_actions`."""
  return golden()[key][golden_mask()[_rows(joined)]]


def _rows(joined: bool) -> np.ndarray:
  """The episode of each row."""
  return golden()['in/perm'] if joined else np.arange(12)
