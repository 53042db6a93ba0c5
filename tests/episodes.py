"""Trajectories drawn as text, and the peers' numbers, for the tests of rl."""

from collections.abc import Sequence
import functools
import pathlib
import types as types_lib

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.rl import episodes


def trajectory(
  *pictures: str, rewards: Sequence[float] = (), group: int = 0, seed: int = 0
) -> types.Trajectory:
  """One picture a segment: a digit is an action token of that turn, '.' is given.

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


def varied(n: int = 6) -> list[types.Trajectory]:
  """Groups of two with every shape: one turn, several, over two segments, short, long."""
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


@functools.cache
def golden() -> types_lib.MappingProxyType[str, np.ndarray]:
  """What golden/make_ref_algos.py kept; read-only."""
  path = pathlib.Path(__file__).parent / 'golden' / 'ref_algos.npz'
  with np.load(path) as file:
    arrays = dict(file)
  for array in arrays.values():
    array.flags.writeable = False
  return types_lib.MappingProxyType(arrays)


def golden_mask() -> np.ndarray:
  """Of the peers' episodes, bool [12, 24]; environment tokens lie between the turns."""
  return golden()['in/mask'] > 0


def golden_actions(
  rewards: str, *, joined: bool = False, masked: bool = True
) -> list[episodes.Episode]:
  """The peers' episodes, through Trajectory.

  Args:
    rewards: 'rewards_outcome' or 'rewards_process'.
    joined: Agent-R1's view: rows, in the order `perm`, are steps of the trajectories
      `traj` of the groups `uid`. Its steps are our segments.
    masked: Off, every token takes part; each row begins with an action.
  """
  g = golden()
  rows, group = _rows(joined), g['in/uid' if joined else 'in/index']
  traj = g['in/traj'] if joined else np.arange(12)
  out = []
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
    number = sorted(set(group)).index(group[traj == t][0])
    task = types.Task('golden', [])
    whole = types.Trajectory(task, number, 0, segments, turns, [], 'done')
    episode = episodes.episode(whole, masked=masked)
    at = lambda key, t=t: g[key][rows][traj == t]
    seen = golden_mask()[rows[traj == t]] | (not masked)
    episode.values, episode.ref_logprobs = at('in/values')[seen], at('in/ref_logp')[seen]
    out.append(episode)
  return out


def golden_at_actions(key: str, *, joined: bool = False) -> np.ndarray:
  """A golden [12, 24] at its action tokens, flat in the order of `golden_actions`."""
  return _on(golden()[key], _rows(joined), np.full(12, True))


def _rows(joined: bool) -> np.ndarray:
  """Which episode stands in each row."""
  return golden()['in/perm'] if joined else np.arange(12)


def _on(ordered: np.ndarray, rows: np.ndarray, chosen: np.ndarray) -> np.ndarray:
  """The values at the action tokens of the chosen rows."""
  return ordered[chosen][golden_mask()[rows[chosen]]]
