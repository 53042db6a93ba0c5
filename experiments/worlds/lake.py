"""Gymnasium's FrozenLake as a text game on new maps.

The map is drawn each turn; the line below it says where one can go without falling. A
reply names a move. With probability SLIP the agent slips to one of the two sides. An
episode ends on the goal, in a hole, or after STEPS moves.

The base policy practises the games of a wanderer: its moves end on ice if it does not
slip, and are otherwise random, by the weights FORWARD. Four of five examples are one such
move, given only the line below the map: so it learns to look where it goes, and RL has
something to choose from.
"""

import collections
from collections.abc import Iterator
import functools
import hashlib
import random
from typing import Any

from agent_r1_jax import config as config_lib
from agent_r1_jax import sft, types
from agent_r1_jax.tasks import games
from experiments.worlds import world as world_lib

STEPS = 20  # The maximum moves of an episode.
SLIP = 1 / 3  # The probability of a step to the side.
# In the order of Gymnasium's actions.
MOVES = ('go left', 'go down', 'go right', 'go up')
FORWARD = {'go down': 1.5, 'go right': 1.5}  # Left and up have weight 1.
# Sides of the maps: those of RL, and those that only the base policy practises.
TRAINED, PRACTISED = (4, 5), (6,)
_CHANGES = ((0, -1), (1, 0), (0, 1), (-1, 0))
_SIGNS = {'S': '.', 'F': '.', 'H': 'O', 'G': 'G'}
_ALONE = 0.8  # Share of examples with a move but no map.
_FROZEN = 0.8  # Share of the cells that are ice.


class Lake:
  """Gymnasium's FrozenLake, seen and played as text, with process rewards.

  Gymnasium rewards the goal with 1. Process rewards add at most .5 in an episode: one
  half for steps that bring the agent closer to the goal than ever before, the other half
  for cells that are new to it.
  """

  def __init__(self, rows: list[str], slip: float = SLIP):
    """Makes the lake; `rows` are Gymnasium's map, of the letters S, F, H and G."""
    self._lake = _make_lake(rows, slip)
    self._rows, self._cell = rows, (0, 0)
    self._distances = distances(rows)

  def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
    """Begins on the first cell; the seed determines the slips."""
    self._moves = 0
    self._place(self._lake.reset(seed=seed)[0])
    self._closest, self._seen = self._distances[self._cell], {self._cell}
    return draw(self._rows, self._cell), {}

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """Moves; anything not in MOVES gets a message, and changes nothing."""
    if action not in MOVES:
      return f'You can {", ".join(MOVES)}.', 0.0, False, False, {}
    state, goal, ended, _, _ = self._lake.step(MOVES.index(action))
    self._moves += 1
    late = self._moves == STEPS
    self._place(state)
    reward = float(goal) + self._progress()
    info = {'won': float(goal)} if ended or late else {}
    return draw(self._rows, self._cell), reward, ended, late, info

  def _place(self, state):
    self._cell = divmod(int(state), len(self._rows))

  def _progress(self) -> float:
    """Returns the process reward of the last move; a hole has none."""
    if self._cell not in self._distances:
      return 0.0
    start, cells = self._distances[0, 0], len(self._distances) - 1
    closer = max(0, self._closest - self._distances[self._cell]) / start
    new = (self._cell not in self._seen) / cells
    self._closest = min(self._closest, self._distances[self._cell])
    self._seen.add(self._cell)
    return 0.25 * closer + 0.25 * new


def _make_lake(rows, slip):
  from gymnasium.envs.toy_text import frozen_lake

  return frozen_lake.FrozenLakeEnv(desc=rows, is_slippery=True, success_rate=1 - slip)


def distances(rows: list[str]) -> dict[tuple[int, int], int]:
  """Returns each cell's distance to the goal, around holes (breadth-first search)."""
  last = len(rows) - 1
  found, queue = {(last, last): 0}, collections.deque([(last, last)])
  while queue:
    cell = queue.popleft()
    for row, column in ((cell[0] + r, cell[1] + c) for r, c in _CHANGES):
      inside = 0 <= row <= last and 0 <= column <= last
      if inside and rows[row][column] != 'H' and (row, column) not in found:
        found[row, column] = found[cell] + 1
        queue.append((row, column))
  return found


def draw(rows: list[str], cell: tuple[int, int]) -> str:
  """Draws a map, and says where around the agent there is ice or the goal.

  A is the agent, O a hole, G the goal, and a point ice.
  """
  signs = [[_SIGNS[letter] for letter in row] for row in rows]
  signs[cell[0]][cell[1]] = 'A'
  ice = []
  for name, (down, right) in zip(MOVES, _CHANGES, strict=True):
    row, column = cell[0] + down, cell[1] + right
    if 0 <= row < len(rows) and 0 <= column < len(rows) and rows[row][column] != 'H':
      ice.append(name)
  lines = [''.join(f' {sign}' for sign in row) for row in signs]
  return '\n'.join([*lines, describe_ice(ice)])


def describe_ice(moves: list[str]) -> str:
  """Lists the moves that end on ice, or on the goal."""
  return f'Ice if you {", ".join(moves)}.'


def make_map(rng: random.Random, size: int, split: str) -> list[str]:
  """Draws a map of a split; no other split has it."""
  from gymnasium.envs.toy_text import frozen_lake

  while True:
    rows = frozen_lake.generate_random_map(size, _FROZEN, seed=rng.getrandbits(31))
    place = hashlib.blake2b(''.join(rows).encode(), digest_size=1).digest()[0]
    if split == ('test' if place < 32 else 'dev' if place < 64 else 'train'):
      return rows


def make_tasks(seed: int, n: int, split: str, sizes: tuple[int, ...]) -> list[types.Task]:
  """Makes tasks of n maps of a split; the sizes alternate."""
  rng = random.Random(f'lake {seed} {split} {sizes}')
  return [
    games.make_task(
      f'lake-{split}-{seed}-{sizes[i % len(sizes)]}-{i}',
      rows=make_map(rng, sizes[i % len(sizes)], split),
    )
    for i in range(n)
  ]


def held_out(seed: int, n: int, split: str) -> dict[str, list[types.Task]]:
  """Makes maps of the trained sizes, and of a size that RL does not train on."""
  return {
    'new_maps': make_tasks(seed, n, split, TRAINED),
    'new_size': make_tasks(seed, n, split, PRACTISED),
  }


def make_env(slip: float = SLIP) -> games.GameEnv:
  """Makes the environment of a task of this world."""
  return games.GameEnv(lambda task: Lake(task.info['rows'], slip))


def examples(seed: int) -> Iterator[world_lib.Example]:
  """Yields first moves of games, and single moves without a map."""
  rng = random.Random(f'lake examples {seed}')
  while True:
    lake = Lake(make_map(rng, rng.choice(TRAINED + PRACTISED), 'train'))
    text, _ = lake.reset(seed=rng.getrandbits(31))
    if rng.random() < _ALONE:
      some = rng.sample(MOVES, rng.choice((1, 2, 2, 3, 3, 4)))
      text = describe_ice([move for move in MOVES if move in some])
      yield world_lib.talk(text, _write(_draw(rng, text)), 'move')
      continue
    messages = list(games.make_task('').messages)
    for _ in range(6):
      move = _draw(rng, text)
      messages += [{'role': 'user', 'content': text}, world_lib.say(_write(move))]
      text, _, ended, _, _ = lake.step(move)
      if ended:
        break
    yield world_lib.Example(messages, kind='game')


def _draw(rng: random.Random, text: str) -> str:
  chances = wander(text)
  return rng.choices([*chances], [*chances.values()])[0]


def _write(move: str) -> str:
  return f'<action> {move}</action>'


def wander(text: str) -> dict[str, float]:
  """Returns the wanderer's probability of each move; uniform if none is safe."""
  weights = {m: FORWARD.get(m, 1) for m in MOVES if m in text} or dict.fromkeys(MOVES, 1)
  return {move: weight / sum(weights.values()) for move, weight in weights.items()}


WORLD = world_lib.World(
  examples=examples,
  text=world_lib.texts_of,
  schemas=list,
  tasks=functools.partial(make_tasks, split='train', sizes=TRAINED),
  held_out=held_out,
  methods=lambda sets: {'tools': (sets, make_env)},
  labels={'tools': 'Base policy'},
  score='won',
  kinds={f'{n} x {n}': lambda task, n=n: len(task.info['rows']) == n for n in TRAINED},
  config=config_lib.Config(
    schedule=config_lib.Schedule(steps=40, tasks=12, samples=8, eval_every=10),
    limits=config_lib.Limits(max_turns=STEPS + 2, max_turn_tokens=16),
    evaluation=config_lib.Sampling(temperature=1.0),
    optimizer=config_lib.Optimizer(learning_rate=3e-4, critic_learning_rate=1e-3),
    engine=config_lib.Engine(slots=1152, decode_steps=4, replicas=2),
  ),
  base=sft.Config(
    steps=400, rows=8, row_tokens=384, learning_rate=2e-3, other_weight=0.0
  ),
  vocab=384,
  more_tokens=('<action>', '</action>'),
)
