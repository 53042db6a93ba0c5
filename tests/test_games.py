"""How an agent acts in a text game, and what it is shown."""

import pytest

from agent_r1_jax import testing
from agent_r1_jax.tasks import games


def act(*actions):
  return [f'I think so. <action>{action}</action>' for action in actions]


@pytest.mark.parametrize(
  ('reply', 'action'),
  [
    ('<action>go north</action>', 'go north'),
    ('<action>a</action> no: <action>\n go   north </action>.', 'go north'),
    ('go north', None),
    ('<action> </action>', None),
    ('<action>go north', None),
    ('I write <action> marks. <action>go north</action>', 'go north'),
  ],
)
def test_the_last_action_counts(reply, action):
  assert games.find_action(reply) == action


class Guess:
  """Gymnasium's API without Gymnasium: guess the seed."""

  def reset(self, *, seed=None, options=None):
    self.seed, self.left = seed, 3
    return 'Guess.', {}

  def step(self, action):
    self.left -= 1
    won = action == str(self.seed)
    info = {'won': True} if won else {}
    return f'{self.left} left.', float(won), won, not self.left, info


async def test_a_game_of_ones_own():
  task = games.make_task('seed-7', seed=7)
  make = lambda: games.GameEnv(lambda task: Guess())
  steps = await testing.check_env(make, task, act('6', '7'))
  assert [step.reward for step in steps] == [0, 1] and steps[1].metrics['won'] == 1
  steps = await testing.check_env(make, task, act('6', '6', '6'))
  assert 'won' not in steps[-1].metrics
  with pytest.raises(ValueError, match='the observation is 3; wrap'):
    game = Guess()
    game.reset = lambda seed: (3, {})
    games.GameEnv(lambda task: game).reset(task)
