"""The world of Blackjack: the game as text, and what is practised."""

import itertools
import random

from agent_r1_jax import testing
from agent_r1_jax.tasks import games
from experiments.worlds import blackjack


def win_rate(choose, count=3000):
  rng, game, won = random.Random(0), blackjack.Blackjack(), 0
  for seed in range(count):
    text, ended = game.reset(seed=seed)[0], False
    while not ended:
      text, reward, ended, _, info = game.step(choose(text, rng))
    assert info['won'] == (reward > 0)
    won += reward > 0
  return won / count


def basic(text, rng):
  del rng
  words = text.replace('.', '').split()
  return blackjack.play_basic(int(words[2]), int(words[-1]), 'ace' in text)


def test_the_basic_strategy_wins_more_than_the_player_of_the_practice():
  # From 20,000 games: .431 and .31; three standard errors of 3,000 are .027.
  best, practised = win_rate(basic), win_rate(blackjack.play_practised)
  assert abs(best - 0.431) < 0.03 and 0.27 < practised < 0.35


def test_the_seed_decides_all_cards():
  deals = [blackjack.Blackjack().reset(seed=seed)[0] for seed in [3, 3, *range(20)]]
  assert deals[0] == deals[1] and len({*deals}) > 10
  assert blackjack.draw(14, 7, 0) == 'You have 14 hard. The dealer shows 7.'
  assert blackjack.draw(14, 1, 1) == 'You have 14 with an ace of 11. The dealer shows 1.'


async def test_it_is_an_environment():
  replies = ['<action>fold</action>', '<action> stick</action>']
  task = games.make_task('one')

  def make():
    env = blackjack.make_env()
    env.set_seed(1)
    return env

  steps = await testing.check_env(make, task, replies)
  assert steps[0].messages[0]['content'] == 'You can stick or hit.'
  assert steps[-1].done


def test_practice_sticks_more_with_more():
  sticks = {True: [], False: []}
  for example in itertools.islice(blackjack.examples(0), 2000):
    for text, reply in itertools.pairwise(example.messages):
      if reply['role'] == 'assistant':
        total = int(text['content'].split()[2])
        sticks[total > 16].append('stick' in reply['content'])
  few, many = (sum(found) / len(found) for found in (sticks[False], sticks[True]))
  assert few < many - 0.05
