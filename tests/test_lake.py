"""The world of the frozen lake: its maps, its rewards, and what is practised."""

import collections
import itertools

import pytest

from agent_r1_jax import testing
from agent_r1_jax.tasks import games
from experiments.worlds import lake

ROWS = ['SFF', 'FHF', 'FFG']
LEFT, DOWN, RIGHT, UP = lake.MOVES
WAY = [RIGHT, RIGHT, DOWN, DOWN]


def play(moves, *, slip=0.0, seed=0):
  game = lake.Lake(ROWS, slip)
  texts, rewards = [game.reset(seed=seed)[0]], []
  for move in moves:
    text, gain, ended, late, info = game.step(move)
    texts.append(text)
    rewards.append(gain)
    if ended or late:
      break
  return texts, rewards, info


def test_a_map_is_drawn_and_described():
  assert lake.draw(ROWS, (1, 0)) == ' . . .\n A O .\n . . G\nIce if you go down, go up.'
  assert lake.draw(ROWS, (1, 2)) == ' . . .\n . O A\n . . G\nIce if you go down, go up.'
  assert lake.distances(['SHF', 'FHF', 'FFG'])[0, 0] == 4
  assert (0, 0) not in lake.distances(['SHF', 'HFF', 'FFG'])


def test_process_rewards():
  _, rewards, info = play(WAY)
  # Eight cells can be reached, the first one among them; the goal is four steps away.
  gains = [0.25 / 4 + 0.25 / 7] * 3 + [1 + 0.25 / 4 + 0.25 / 7]
  assert rewards == pytest.approx(gains) and info == {'won': 1.0}
  # Going back and forth earns nothing twice, and a hole earns nothing.
  _, rewards, _ = play([RIGHT, LEFT, RIGHT, DOWN])
  assert rewards == pytest.approx([gains[0], 0, 0, 0])


def test_an_episode_ends_in_a_hole_and_after_the_last_move():
  assert play([RIGHT, DOWN])[2] == {'won': 0.0}
  _, rewards, info = play([LEFT] * 100)
  assert len(rewards) == lake.STEPS and info == {'won': 0.0}


async def test_what_is_no_move_is_told():
  env = lambda: lake.make_env(0.0)
  replies = [f'<action>{move}</action>' for move in ['fly', *WAY]]
  task = games.make_task('three', rows=ROWS)
  steps = await testing.check_env(env, task, replies)
  assert steps[0].messages[0]['content'] == 'You can go left, go down, go right, go up.'
  assert [step.reward >= 1 for step in steps] == [False] * 4 + [True]


def test_who_wanders_goes_where_it_is_safe():
  # From the first cell of two by two, each move is safe and every second one is the way.
  assert lake.wander(lake.draw(['SF', 'FG'], (0, 0))) == {DOWN: 0.5, RIGHT: 0.5}


def test_an_episode_slips_by_its_own_number():
  first = play([DOWN] * 20, slip=0.5, seed=1)[0]
  assert first == play([DOWN] * 20, slip=0.5, seed=1)[0]
  ends = {tuple(play([DOWN] * 20, slip=0.5, seed=seed)[0]) for seed in range(30)}
  assert len(ends) > 5
  # From the first cell, `go down` with slip 1/3 goes right in a sixth of the cases.
  after = collections.Counter(
    play([DOWN], slip=1 / 3, seed=seed)[0][1] for seed in range(600)
  )
  assert 60 < after[lake.draw(ROWS, (0, 1))] < 140
  assert 360 < after[lake.draw(ROWS, (1, 0))] < 440


def test_splits_share_no_map():
  sets = {
    split: {tuple(task.info['rows']) for task in lake.make_tasks(0, 200, split, (4, 5))}
    for split in ('train', 'dev', 'test')
  }
  for one, other in itertools.combinations(sets.values(), 2):
    assert not one & other
  assert lake.make_tasks(3, 9, 'dev', (4,)) == lake.make_tasks(3, 9, 'dev', (4,))
  assert lake.make_tasks(3, 9, 'dev', (4,)) != lake.make_tasks(4, 9, 'dev', (4,))


def test_practice_wanders_on_ice():
  moves = collections.Counter()
  for example in itertools.islice(lake.examples(0), 400):
    for text, reply in itertools.pairwise(example.messages):
      if reply['role'] == 'assistant':
        move = games.find_action(reply['content'])
        moves[move] += 1
        assert move in text['content'] or 'go' not in text['content']
  assert moves['go right'] > 1.3 * moves['go left'] > 0
