"""Gymnasium's Blackjack as a text game: cards are drawn with replacement.

A reply is to hit or to stick. The reward is Gymnasium's: 1 for a win, 0 for a draw, -1
for a loss. Nothing can be memorised but how to play: the cards of a test are new.

The base policy practises games of a player who mostly tosses a coin (COIN), and otherwise
hits with the more probability the less it has. So it looks at its cards.
"""

from collections.abc import Iterator
import random
from typing import Any

from agent_r1_jax import config as config_lib
from agent_r1_jax import sft, types
from agent_r1_jax.tasks import games
from experiments.worlds import world as world_lib

# In the order of Gymnasium's actions.
MOVES = ('stick', 'hit')
COIN = 0.75
_LEAST, _MOST = 4, 21
_TURNS = 12


class Blackjack:
  """Gymnasium's Blackjack of Sutton and Barto's book, seen and played as text."""

  def __init__(self):
    """Makes the game."""
    from gymnasium.envs.toy_text import blackjack

    self._game = blackjack.BlackjackEnv(sab=True)

  def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
    """Deals; the seed is that of all cards."""
    return draw(*self._game.reset(seed=seed)[0]), {}

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """Hits or sticks; what is none of MOVES is told so, and changes nothing."""
    if action not in MOVES:
      return f'You can {" or ".join(MOVES)}.', 0.0, False, False, {}
    state, reward, ended, late, _ = self._game.step(MOVES.index(action))
    info = {'won': float(reward > 0)} if ended else {}
    return draw(*state), float(reward), ended, late, info


def draw(total: int, dealer: int, ace: int) -> str:
  """Says what the player has, and which card of the dealer is seen; an ace is 1."""
  counted = 'with an ace of 11' if ace else 'hard'
  return f'You have {total} {counted}. The dealer shows {dealer}.'


def play_basic(total: int, dealer: int, ace: bool) -> str:
  """Returns the move of the basic strategy (Thorp 1966), without doubling."""
  if ace:
    hits = total <= 17 or (total == 18 and dealer in (1, 9, 10))
  else:
    hits = total <= 11 or (total == 12 and dealer in (2, 3)) or (
      total <= 16 and dealer in (1, 7, 8, 9, 10)
    )  # fmt: skip
  return MOVES[hits]


def make_tasks(seed: int, n: int, split: str) -> list[types.Task]:
  """Makes n games; the cards are those of an episode's own number."""
  return [games.make_task(f'blackjack-{split}-{seed}-{i}') for i in range(n)]


def make_env() -> games.GameEnv:
  """Makes the environment of a task of this world."""
  return games.GameEnv(lambda task: Blackjack())


def examples(seed: int) -> Iterator[world_lib.Example]:
  """Yields games."""
  rng = random.Random(f'blackjack examples {seed}')
  game = Blackjack()
  while True:
    messages = list(games.make_task('').messages)
    text, _ = game.reset(seed=rng.getrandbits(31))
    ended = False
    while not ended:
      move = play_practised(text, rng)
      messages.append({'role': 'user', 'content': text})
      messages.append({'role': 'assistant', 'content': f'<action> {move}</action>'})
      text, _, ended, _, _ = game.step(move)
    yield world_lib.Example(messages)


def play_practised(text: str, rng: random.Random) -> str:
  """Returns the move of the player whose games are practised."""
  total = int(text.split()[2])
  chance = 0.5 if rng.random() < COIN else (_MOST - total) / (_MOST - _LEAST)
  return MOVES[rng.random() < chance]


WORLD = world_lib.World(
  examples=examples,
  text=world_lib.texts_of,
  schemas=list,
  tasks=lambda seed, n: make_tasks(seed, n, 'train'),
  held_out=lambda seed, n, split: {'new_cards': make_tasks(seed, n, split)},
  methods=lambda sets: {'tools': (sets, make_env)},
  labels={'tools': 'Base policy'},
  score='won',
  kinds={},
  config=config_lib.Config(
    schedule=config_lib.Schedule(steps=40, tasks=32, samples=8, eval_every=10),
    limits=config_lib.Limits(max_turns=_TURNS, max_turn_tokens=16),
    evaluation=config_lib.Sampling(temperature=1.0),
    optimizer=config_lib.Optimizer(learning_rate=3e-4, critic_learning_rate=1e-3),
    engine=config_lib.Engine(slots=512, decode_steps=4, replicas=2),
  ),
  base=sft.Config(
    steps=200, rows=8, row_tokens=384, learning_rate=2e-3, other_weight=0.0
  ),
  vocab=384,
  more_tokens=('<action>', '</action>'),
)
