"""Reward models: losses by hand, what is read, and how a trained one is used."""

import asyncio

import jax
import jax.numpy as jnp
from jax.test_util import check_grads
import numpy as np
import optax
import pytest
import tiny

from agent_r1_jax import types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.guided import reward_model as trained
from agent_r1_jax.guided import reward_training as reward_model
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import packing
from agent_r1_jax.tasks import rewards as rewards_lib
from experiments import tables as tables_lib

# Two groups; the pairs are (0, 1), (0, 2) and (3, 4).
SCORES = np.array([0.5, -0.25, 1.0, 2.0, 0.0])
REWARDS = np.array([1.0, 0.0, 0.0, 0.5, -1.0])
GROUPS = np.array([0, 0, 0, 1, 1])
SHAPE = packing.MicrobatchShape(rows=2, row_tokens=24)
LOSSES = {
  'bradley_terry': reward_model.bradley_terry,
  'cross_entropy': reward_model.cross_entropy(0.4),
}
log_sigmoid = lambda x: -np.log1p(np.exp(-x))


def _loss(name, scores=SCORES, rewards=REWARDS, groups=GROUPS):
  return LOSSES[name](*map(jnp.array, (scores, rewards, groups)))


def test_bradley_terry_by_hand():
  found = _loss('bradley_terry')
  assert float(found) == pytest.approx(-np.mean(log_sigmoid(np.array([0.75, -0.5, 2.0]))))
  # dL/ds of the first: -(σ(-0.75) + σ(0.5)) / 3.
  gradient = jax.grad(lambda scores: _loss('bradley_terry', scores))(jnp.array(SCORES))
  by_hand = -(np.exp(log_sigmoid(-0.75)) + np.exp(log_sigmoid(0.5))) / 3
  assert float(gradient[0]) == pytest.approx(by_hand)
  # One prompt's prior does not count: only differences within a group do.
  moved = _loss('bradley_terry', SCORES + 3.0 * GROUPS)
  assert float(moved) == pytest.approx(float(found), rel=1e-5)
  assert float(_loss('bradley_terry', rewards=np.zeros(5))) == 0.0


def test_cross_entropy_by_hand():
  found = _loss('cross_entropy')
  signed = np.where(REWARDS > 0.4, SCORES, -SCORES)
  assert (REWARDS > 0.4).tolist() == [True, False, False, True, False]
  assert float(found) == pytest.approx(-np.mean(log_sigmoid(signed)))
  # dL/ds is (σ(s) - y) / n.
  gradient = jax.grad(lambda scores: _loss('cross_entropy', scores))(jnp.array(SCORES))
  by_hand = (np.exp(log_sigmoid(SCORES)) - (REWARDS > 0.4)) / 5
  np.testing.assert_allclose(gradient, by_hand, rtol=1e-5)
  assert float(_loss('cross_entropy', SCORES * 1e4)) == pytest.approx(2000, rel=1e-3)


@pytest.mark.parametrize('name', LOSSES)
def test_gradients_are_the_losses(name):
  check_grads(
    lambda scores: _loss(name, scores),
    (jnp.array(SCORES),),
    order=2,
    atol=2e-2,
    rtol=2e-2,
  )


def _texts(n=5):
  rng = np.random.default_rng(0)
  return [rng.integers(0, 200, k).astype(np.int32) for k in [9, 4, 14, 21, 6][:n]]


def _params(config):
  params = decoder.add_value_head(tiny.params(config))
  kernel = np.random.default_rng(1).normal(size=(16, 1)).astype(np.float32)
  return params | {'value_head': {'kernel': jnp.array(kernel), 'bias': jnp.ones(1)}}


@pytest.mark.parametrize('name', LOSSES)
def test_a_step_has_the_gradient_of_all_scores_however_they_are_batched(name):
  """Pairs lie in different micro-batches; SGD at rate 1 shows the gradient."""
  config, optimizer = tiny.config(layers=1), optax.sgd(1.0)
  lengths = np.array([len(text) for text in _texts()])
  rows = np.stack([np.pad(text, (0, 24 - len(text))) for text in _texts()])
  positions = np.tile(np.arange(24), (5, 1))
  used = (positions < lengths[:, None]).astype(np.int32)

  def whole(params):
    packed = tiny.rows(*map(jnp.array, (rows, positions, used)))
    values = decoder.values(params, decoder.hidden(params, config, packed))
    return _loss(name, values[np.arange(5), lengths - 1])

  loss, gradient = jax.jit(jax.value_and_grad(whole))(_params(config))
  seen = []
  after = reward_model.fit(
    _params(config),
    _texts(),
    REWARDS,
    GROUPS,
    config=config,
    loss=LOSSES[name],
    optimizer=optimizer,
    shape=SHAPE,
    steps=1,
    groups_per_step=2,
    on_step=lambda step, metrics: seen.append(metrics),
  )
  assert seen[0]['loss'] == pytest.approx(float(loss), rel=1e-4)
  step = jax.tree.map(lambda a, b: a - b, _params(config), after)
  norm = float(optax.tree.norm(gradient))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3 * norm), step, gradient
  )


def test_a_score_is_the_value_after_the_last_token_and_its_own():
  config, params = tiny.config(layers=1), _params(tiny.config(layers=1))
  options = {'config': config, 'shape': SHAPE}
  scores = reward_model.score(params, _texts(), **options)
  for text, found in zip(_texts(), scores, strict=True):
    (alone,) = reward_model.score(params, [text], **options)
    assert alone == found  # To the last bit, whatever is scored beside it.
  changed = [np.append(t[:-1], t[-1] + 1) for t in _texts()]
  assert (reward_model.score(params, changed, **options) != scores).all()
  with pytest.raises(ValueError, match='25 tokens does not fit a row of 24'):
    reward_model.score(params, [np.zeros(25, np.int32)], **options)
  assert len(reward_model.score(params, [], **options)) == 0


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


def _save(directory, auc):
  policy = tiny.config(layers=1)
  given = {'tokenizer_from': tiny.tokenizer_dir(), 'row_tokens': 64, 'auc': auc}
  how = {'loss': 'cross_entropy', 'limit': 0.5, 'mean': 0.5, 'std': 2.0}
  trained.save(directory, policy, _params(policy), **given, **how)


def test_one_that_knows_too_little_is_refused(saved, tmp_path):
  with pytest.raises(ValueError, match='AUC of 0.700 on held-out tasks, below .* = 0.75'):
    trained.load(saved, min_auc=0.75)
  _save(tmp_path / 'model', auc=float('nan'))
  with pytest.raises(ValueError, match='AUC of nan'):
    trained.load(tmp_path / 'model')
  with pytest.raises(ValueError, match='does not say in value_head how a reward model'):
    trained.load(tiny.save(tmp_path / 'policy'))


def test_another_tokenizer_is_refused(tmp_path):
  _save(tmp_path / 'model', auc=0.7)
  with open(tmp_path / 'model' / 'tokenizer.json', 'a') as file:
    file.write(' ')
  with pytest.raises(ValueError, match='tokenizer is not the one'):
    trained.load(tmp_path / 'model')


async def test_it_is_a_part_of_a_reward_a_selector_and_a_potential(saved):
  model = trained.load(saved, clip=1.0, rows=2)
  replies = ['three', 'four five six', 'seven', 'eight nine']
  trajectories = [
    types.Trajectory(TASK, 0, i, [], [], _said(r), 'done') for i, r in enumerate(replies)
  ]
  texts = [trained.encode(tiny.chat(), _said(r), ()) for r in replies]
  shape = packing.MicrobatchShape(2, 64)
  raw = reward_model.score(
    model._params, texts, config=tiny.config(layers=1), shape=shape
  )
  scores = model.score(trajectories)
  np.testing.assert_allclose(scores, np.clip((raw - 0.5) / 2.0, -1, 1), rtol=1e-6)
  assert len({*scores}) > 1
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
  before = await model(TASK, TASK.messages)  # The state before the reply.
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
  model = trained.load(saved, clip=100.0)
  for words, same in ((3, False), (60, True)):
    reply = {'role': 'assistant', 'content': 'nine ' * words}
    asked = [[{'role': 'user', 'content': text}, reply] for text in ('one', 'two')]
    first, second = model._score([model._encode(messages) for messages in asked])
    assert (first == second) == same


def test_steps_take_as_many_groups_also_where_an_epoch_ends():
  groups = np.repeat([0, 1, 2], 2)
  steps = reward_model._draw_groups(groups, 2, np.random.default_rng(0))
  drawn = [np.unique(groups[next(steps)]).tolist() for _ in range(60)]
  assert {len(names) for names in drawn} == {2}
  # Three steps are two epochs.
  for epochs in zip(*[iter(drawn)] * 3, strict=True):
    assert np.bincount(sum(epochs, [])).tolist() == [2, 2, 2]


def test_learning_ranks_what_it_has_seen():
  """Replies that end in one token succeed, those that end in another fail."""
  rng = np.random.default_rng(0)
  texts = [np.append(rng.integers(0, 200, 8), 200 + i % 2) for i in range(32)]
  rewards, groups = np.arange(32) % 2 * 1.0, np.arange(32) // 4
  config = tiny.config(layers=1)
  params = reward_model.fit(
    decoder.add_value_head(tiny.params(config)),
    texts,
    rewards,
    groups,
    config=config,
    loss=reward_model.bradley_terry,
    optimizer=optax.adam(1e-2),
    shape=SHAPE,
    steps=12,
    groups_per_step=4,
  )
  scores = reward_model.score(params, texts, config=config, shape=SHAPE)
  assert tables_lib.auc(scores, rewards > 0.5) > 0.95
