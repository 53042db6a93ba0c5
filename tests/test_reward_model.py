"""Reward models: what they know of rewards, what they read, and how one is used."""

import asyncio
from typing import Any

import numpy as np
import pytest
import tiny

from agent_r1_jax import types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.guided import implicit_value
from agent_r1_jax.guided import reward_model as trained
from agent_r1_jax.rl import packing, table
from agent_r1_jax.tasks import rewards as rewards_lib
from experiments import tables as tables_lib
from experiments import train_reward_model
from experiments.worlds import arithmetic

ODDS = implicit_value.Odds(0.5, 0.2, -2.0)
# Two groups; the pairs are (0, 1), (0, 2) and (3, 4).
SCORES = np.array([0.5, -0.25, 1.0, 2.0, 0.0])
REWARDS = np.array([1.0, 0.0, 0.0, 0.5, -1.0])
GROUPS = np.array([0, 0, 0, 1, 1])


def test_what_is_known_of_rewards_by_hand():
  success = np.array([True, False, True, False])
  # Of four pairs three are right and one is a tie.
  assert tables_lib.auc(np.array([2.0, 1.0, 1.0, 0.0]), success) == 3.5 / 4
  assert np.isnan(tables_lib.auc(np.ones(2), np.ones(2, bool)))
  margins = tables_lib.pair_margins(SCORES, REWARDS, GROUPS)
  assert sorted(margins) == [-0.5, 0.75, 2.0]
  error, rows = tables_lib.calibration(np.array([0.1, 0.15, 0.9, 1.0]), success)
  assert [n for *_, n in rows] == [2, 2] and rows[1][:2] == (0.95, 0.5)
  assert error == pytest.approx((abs(0.125 - 0.5) + abs(0.95 - 0.5)) / 2)


# A trained one.

TASK = types.Task('t', [{'role': 'user', 'content': 'one two'}])


def _said(reply):
  return [*TASK.messages, {'role': 'assistant', 'content': reply}]


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  directory = tmp_path_factory.mktemp('reward_model') / 'model'
  _save(directory, auc=0.7)
  return directory


def _save(directory, **measured):
  config, policy = tiny.config(layers=1), directory.parent / 'policy'
  tiny.save(policy)
  measured = {'row_tokens': 64, **measured}
  implicit_value.save(directory, config, tiny.params(config), policy, ODDS, **measured)


def test_one_that_knows_too_little_is_refused(saved, tmp_path):
  with pytest.raises(ValueError, match='AUC of 0.700 on held-out tasks, below .* = 0.75'):
    trained.load(saved, min_auc=0.75)
  _save(tmp_path / 'model', auc=float('nan'))
  with pytest.raises(ValueError, match='AUC of nan'):
    trained.load(tmp_path / 'model')
  _save(tmp_path / 'model')
  with pytest.raises(ValueError, match='does not say the AUC'):
    trained.load(tmp_path / 'model')
  with pytest.raises(ValueError, match='policy has no implicit_value.json'):
    trained.load(tmp_path / 'policy')


def test_another_tokenizer_is_refused(tmp_path):
  _save(tmp_path / 'model', auc=0.7)
  with open(tmp_path / 'model' / 'tokenizer.json', 'a') as file:
    file.write(' ')
  with pytest.raises(ValueError, match='tokenizer is not the one'):
    trained.load(tmp_path / 'model')


async def test_it_is_a_part_of_a_reward_a_selector_and_a_potential(saved):
  model = trained.load(saved, rows=2)
  replies = ['three', 'four five six', 'seven', 'eight nine']
  trajectories = [
    types.Trajectory(TASK, 0, i, [], [], _said(r), types.Status.DONE)
    for i, r in enumerate(replies)
  ]
  scores = model.score(trajectories)
  texts = [trained.encode(tiny.chat(), _said(r), ()) for r in replies]
  config, shape = tiny.config(layers=1), packing.MicrobatchShape(2, 64)
  log_odds = implicit_value.log_odds(
    tiny.params(config), table.from_segments(texts), ODDS, config=config, shape=shape
  )
  np.testing.assert_allclose(scores, 1 / (1 + np.exp(-log_odds)), rtol=1e-5)
  assert len({*scores}) == 4
  # Those that arrive together are scored together, each as it is alone.
  batches, score = [], model._batcher._function
  model._batcher._function = lambda asked: batches.append(len(asked)) or score(asked)
  assert [*await asyncio.gather(*(model(TASK, t.messages) for t in trajectories))] == [
    *scores
  ]
  assert batches == [4]
  part = rewards_lib.hybrid(model=(lambda step: 0.5, model))
  shaped = rewards_lib.potential_based(model)
  env = env_lib.ToolEnv([], part, process_reward=shaped)
  await env.reset(TASK)
  step = await env.step('seven')
  # Before the first reply nothing is known but how often the policy succeeds.
  before = await model(TASK, TASK.messages)
  assert before == pytest.approx(1 / (1 + np.exp(-0.5)))
  assert step.reward == pytest.approx(0.5 * scores[2] - before)


async def test_what_cannot_be_encoded_is_refused_alone(saved):
  model = trained.load(saved)
  picture = {'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,'}}
  shown = [{'role': 'user', 'content': [picture]}]
  asked = [model(TASK, messages) for messages in (_said('three'), shown, _said('four'))]
  first, refused, last = await asyncio.gather(*asked, return_exceptions=True)
  assert isinstance(first, float) and isinstance(last, float)
  assert isinstance(refused, ValueError) and 'picture' in str(refused)


def test_of_what_is_too_long_the_end_is_read(saved):
  model = trained.load(saved)
  for words, same in ((3, False), (60, True)):
    reply = {'role': 'assistant', 'content': 'nine ' * words}
    asked = [[{'role': 'user', 'content': text}, reply] for text in ('one', 'two')]
    first, second = model._score([model._encode(messages) for messages in asked])
    assert (first == second) == same


def test_the_tasks_of_a_world_are_not_those_that_its_policy_was_trained_on():
  ((tasks, make_env),) = train_reward_model.practise('arithmetic', 0, 50)
  env: Any = make_env()
  assert [tool.name for tool in env.tools] == ['calculator']
  learned = {task.messages[0]['content'] for task in arithmetic.WORLD.tasks(0, 4096)}
  asked = {task.messages[0]['content'] for task in tasks}
  assert len(tasks) == 50 and not asked & learned


def test_log_odds_by_hand():
  logprobs, owner = np.array([-1.0, -4.0, -2.5, -9.0]), np.array([0, 0, 1, 1])
  found = ODDS.of(logprobs, np.array([True, True, True, False]), owner)
  np.testing.assert_allclose(found, [0.5 + 0.2 * (1.0 - 2.0), 0.5 - 0.2 * 0.5])
