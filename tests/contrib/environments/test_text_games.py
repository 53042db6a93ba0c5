"""Text games, really played: TextWorld, ALFWorld, Gymnasium, WebShop's protocol."""

import json
import os
import pathlib
import re
import shutil
import signal

import pytest
import script
from test_games import Guess, act
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import testing
from agent_r1_jax.contrib.environments import game_process, text_games
from agent_r1_jax.rollout import rollout
from agent_r1_jax.tasks import games
from agent_r1_jax.train import metrics


@pytest.fixture(scope='module')
def textworld_game(tmp_path_factory):
  pytest.importorskip('textworld', reason='the extra `environments` is not installed')
  return text_games.make_textworld(tmp_path_factory.mktemp('games'), [3], objects=3)[0]


class TestTextWorld:
  async def test_a_game_is_won(self, textworld_game):
    won = act('take latchkey', 'unlock safe with latchkey')
    replies = ['Where am I?', *act('fly'), *won]
    steps = await testing.check_env(text_games.textworld_env, textworld_game, replies)
    assert [step.reward for step in steps] == [0, 0, 0, 1]
    assert steps[-1].metrics == {'no_action': 0, 'inadmissible': 0, 'won': 1}
    assert steps[0].metrics == {'no_action': 1.0} and steps[1].metrics['inadmissible']
    assert steps[2].messages[0]['content'].startswith('You pick up the latchkey')
    assert 'Possible actions: ' in steps[2].messages[0]['content']

  def test_broken_games_cost_their_own_episodes(self, textworld_game, tmp_path):
    """One is cut off, one lacks its .json, one is noise, and one is whole."""
    whole = pathlib.Path(textworld_game.info['path'])
    cut, bare, noise = (tmp_path / f'{name}.z8' for name in ('cut', 'bare', 'noise'))
    data = whole.read_bytes()
    cut.write_bytes(data[: len(data) // 5])
    shutil.copy(whole.with_suffix('.json'), cut.with_suffix('.json'))
    bare.write_bytes(data)
    noise.write_bytes(b'\x08' + bytes(range(256)) * 300)
    params = tiny.params(tiny.config(), likely={tiny.chat().stop_ids[0]: 2.2})
    played = tiny.within(
      rollout.collect,
      tiny.engine(params, slots=1024, bucket=1024),
      tiny.chat(),
      text_games.load_games(cut, bare, noise, whole),
      text_games.textworld_env,
      limits=config_lib.Limits(max_turns=1, max_turn_tokens=80),
    )
    assert [t.status for t in played] == ['error'] * 3 + ['max_turns']
    assert all('GameError: ' + str(tmp_path) in t.error for t in played[:3])
    assert 'is its .json beside it?' in played[1].error

  def test_a_game_that_hangs_is_ended(self, textworld_game, monkeypatch):
    game = game_process.GameProcess(textworld_game.info['path'])
    fork_server = game_process._fork_server.process.pid
    os.kill(fork_server, signal.SIGSTOP)
    try:
      monkeypatch.setattr(game_process, '_START_SECONDS', 0.1)
      with pytest.raises(game_process.GameError, match='no answer within 0.1 seconds'):
        game_process.GameProcess(textworld_game.info['path'])
    finally:
      os.kill(fork_server, signal.SIGCONT)
    game.reset()  # It is not disturbed.
    game.close()
    with pytest.raises(game_process.GameError, match='has ended'):
      game.step('look')


# A kitchen of ALFWorld's own domain: the apple is to be put onto the table.
_KITCHEN = """(define (problem kitchen) (:domain alfred)
(:objects agent1 - agent here there - location Fridge_bar_1 Table_bar_1 - receptacle
  Apple_bar_1 - object FridgeType TableType - rtype AppleType - otype)
(:init (atLocation agent1 here) (= (total-cost) 0) (openable Fridge_bar_1)
  (receptacleAtLocation Fridge_bar_1 there) (receptacleAtLocation Table_bar_1 here)
  (receptacleType Fridge_bar_1 FridgeType) (receptacleType Table_bar_1 TableType)
  (canContain FridgeType AppleType) (canContain TableType AppleType)
  (objectType Apple_bar_1 AppleType) (pickupable Apple_bar_1)
  (inReceptacle Apple_bar_1 Fridge_bar_1) (objectAtLocation Apple_bar_1 there))
(:goal (inReceptacle Apple_bar_1 Table_bar_1)))"""


async def test_alfworld_is_played(tmp_path):
  alfworld = pytest.importorskip('alfworld', reason='the extra is not installed')
  data = pathlib.Path(alfworld.__file__).parent / 'data'
  lines = (data / 'alfred.twl2').read_text().replace('UNKNOWN GOAL', 'move the apple')
  domain = (data / 'alfred.pddl').read_text()
  game = {'pddl_domain': domain, 'grammar': lines, 'pddl_problem': _KITCHEN}
  (tmp_path / 'game.tw-pddl').write_text(json.dumps(game))
  (task,) = text_games.load_games(tmp_path)
  replies = act('go to fridge 1', 'open fridge 1', 'take apple 1 from fridge 1')
  replies += act('go to table 1', 'move apple 1 to table 1')
  steps = await testing.check_env(text_games.textworld_env, task, replies)
  assert [step.reward for step in steps] == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('a.z8', b'PK', 'version 8'),
    ('a.tw-pddl', b'{"grammar": 1}', 'lacks pddl_domain, pddl_problem'),
    ('a.tw-pddl', b'{', 'is no game: Expecting'),
    ('a.tw-pddl', b'3', 'is no game: '),
    ('a.txt', b'', 'has no game'),
  ],
)
def test_what_is_no_game_is_refused(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match=message):
    text_games.load_games(tmp_path)
  with pytest.raises(ValueError, match='No such file'):
    text_games.load_games(tmp_path / 'none.z8')


def test_the_script_names_what_is_no_game():
  flags = '--kind=files', '--name=none', '--config.schedule.steps=1'
  done = script.run('-m', 'experiments.games', *flags, timeout=120)
  assert done.returncode in (1, 2) and 'Traceback' not in done.stderr
  assert re.search('none is no game: .*No such file', done.stderr)


def test_each_game_has_an_id_of_its_own(tmp_path):
  for folder in ('a', 'b'):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / 'x.z8').write_bytes(b'\x08')
  first, second = tmp_path / 'a/x.z8', tmp_path / 'b/x.z8'
  assert [task.id for task in text_games.load_games(tmp_path / 'a', first)] == ['x.z8']
  assert [task.id for task in text_games.load_games(first, second)] == [
    str(first),
    str(second),
  ]


@pytest.fixture
def guess_id():
  gymnasium = pytest.importorskip('gymnasium')

  class Env(Guess, gymnasium.Env):
    action_space = gymnasium.spaces.Text(100, charset='0123456789')
    observation_space = gymnasium.spaces.Text(100, charset='Gues.l ft0123')

  gymnasium.register('Guess-v0', Env)
  gymnasium.register(
    'Wrong-v0', type('Wrong', (Env,), {'action_space': gymnasium.spaces.Discrete(2)})
  )
  yield 'Guess-v0'
  del gymnasium.registry['Guess-v0'], gymnasium.registry['Wrong-v0']


async def test_gymnasium_is_played(guess_id):
  make = lambda: text_games.gymnasium_env(guess_id)
  (task,) = text_games.gymnasium_tasks([7])
  steps = await testing.check_env(make, task, act('6', '7'))
  assert steps[-1].reward == 1.0
  with pytest.raises(ValueError, match=r'Wrong-v0: action_space is Discrete\(2\)'):
    text_games.gymnasium_env('Wrong-v0').reset(task)


class Shop:
  """WebShop's protocol with one product."""

  def reset(self, session):
    self.page = 'search'
    return f'Goal {session}: a red cup.', None

  def get_available_actions(self):
    links = {'search': [], 'results': ['back', 'b01'], 'b01': ['back', 'buy now']}
    found = links[self.page]
    return {'has_search_bar': self.page == 'search', 'clickables': found}

  def step(self, action):
    assert action in ('search[red [big] cup]', 'click[b01]', 'click[buy now]')
    self.page = {'search[red [big] cup]': 'results', 'click[b01]': 'b01'}.get(action)
    return self.page or 'Bought.', 0.75 * (not self.page), not self.page, None


async def test_webshop_is_played_by_its_protocol():
  make = lambda: games.GameEnv(
    lambda task: text_games.WebShop(Shop(), task.info['session'])
  )
  task = games.make_task('shop', session=4)
  replies = act('click[buy now]', 'search[red [big] cup]', 'click[b01]', 'click[buy now]')
  opening = make().reset(task)
  assert opening[-1]['content'].endswith('a red cup.\n\nPossible actions: search[...]')
  steps = await testing.check_env(make, task, replies)
  assert [step.reward for step in steps] == [0, 0, 0, 0.75]
  assert [step.metrics['inadmissible'] for step in steps] == [1, 0, 0, 0]
  assert steps[-1].metrics['won'] == 0
  assert 'Possible actions: click[back], click[b01]' in steps[1].messages[0]['content']


@pytest.mark.parametrize('kind', ['textworld', 'reasoning-gym'])
def test_a_model_is_trained(kind, tmp_path):
  package = 'textworld' if kind == 'textworld' else 'reasoning_gym'
  pytest.importorskip(package, reason='the extra `environments` is not installed')
  name = tmp_path / 'games' if kind == 'textworld' else 'chain_sum'
  fields = {
    'model.path': tiny.save(tmp_path / 'model'),
    'engine.rows': 4,
    'engine.prefill_tokens': 256,
    'batch.microbatch': 1,
    'limits.max_turns': 2,
    'limits.max_turn_tokens': 8,
    'schedule.steps': 1,
    'schedule.tasks': 2,
    'schedule.samples': 2,
    'schedule.eval_every': 0,
  }
  done = script.run(
    *('-m', 'experiments.games', f'--kind={kind}', f'--name={name}', '--tasks=3'),
    *(f'--workdir={tmp_path}/run', '--watched=1', *script.one_program(1024)),
    *(f'--config.{field}={value}' for field, value in fields.items()),
  )
  assert done.returncode == 0, done.stderr[-3000:]
  (line,) = metrics.read(tmp_path / 'run')
  assert line['rollout/status/error'] == 0 and line.get('rollout/close_failed', 0) == 0
