"""Implicit values: their gradient, what they learn, and how the engine reads them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rollouts
import test_choice
import tiny

from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.guided import choice as choice_lib
from agent_r1_jax.guided import implicit_value
from agent_r1_jax.models.files import weights
from agent_r1_jax.rl import learner, packing, table

# Of equal odds and optimizers the update is compiled once.
_make_loss, _SGD = functools.cache(implicit_value._make_loss), optax.sgd(1.0)
SHAPE, LARGE = (packing.MicrobatchShape(rows, 256) for rows in (2, 4))


@pytest.fixture(autouse=True)
def few_losses(monkeypatch):
  monkeypatch.setattr(implicit_value, '_make_loss', _make_loss)


@functools.cache
def _played(fresh=False):
  """Half of them succeed. With `fresh` each turn is a segment of its own."""
  make_env = lambda: rollouts.Env(fresh=lambda turn: fresh)
  played = rollouts.collect(make_env, rollouts.make_tasks(6))
  for i, trajectory in enumerate(played):
    for turn in trajectory.turns:
      turn.reward = 0.0
    trajectory.turns[-1].reward = float(i % 2)
  return played


def _log_odds(params, played, odds):
  options = {'config': tiny.config(), 'shape': SHAPE}
  return implicit_value.log_odds(params, table.build(played), odds, **options)


def _fit(played, steps, optimizer, shape=SHAPE, seen=lambda step, metrics: None):
  return implicit_value.fit(
    tiny.params(tiny.config(), likely={tiny.chat().stop_ids[0]: 2.0}),
    played,
    config=tiny.config(),
    optimizer=optimizer,
    shape=shape,
    steps=steps,
    episodes=len(played),
    beta=0.1,
    on_step=seen,
  )


@pytest.mark.parametrize('fresh', [False, True])
def test_learns_what_succeeds_from_the_policy_on(fresh):
  played, losses = _played(fresh=fresh), []
  assert fresh == any(len(t.segments) > 1 for t in played)
  note = lambda step, metrics: losses.append(metrics['loss'])
  _, odds = _fit(played, 20, optax.adam(3e-2), seen=note)
  # The sampler's log-probs are the learner's; half of them succeed.
  first = _log_odds(rollouts.params(), played, odds)
  assert first.mean() == pytest.approx(0, abs=1e-3)
  expected = np.logaddexp(0, first) - (np.arange(len(played)) % 2) * first
  assert losses[0] == pytest.approx(expected.mean(), abs=1e-4)
  assert losses[-1] < losses[0] / 2


def test_an_episode_without_a_reply_is_left_out():
  played = _played()
  late = dataclasses.replace(played[0], group=9, segments=[], turns=[])
  results = [_fit(given, 1, _SGD) for given in (played, [*played, late])]
  (_, odds), (params, same) = results
  assert odds == same
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


def test_the_gradient_is_that_of_whole_episodes():
  """However many segments they have, and wherever these are packed; SGD shows it."""
  played = _played(fresh=True)
  assert {len(t.segments) for t in played} >= {1, 2}
  built, params = table.build(played), rollouts.params()
  (batch,), where = packing.pack_microbatches(built, LARGE)
  success = np.arange(len(played)) % 2

  def loss(params, odds):
    on_device = jax.tree.map(jnp.asarray, batch)
    logprobs = learner.token_stats(params, on_device, config=tiny.config()).logprobs
    found = jnp.where(built.action_mask, logprobs.reshape(-1)[where.index], 0.0)
    total = jax.ops.segment_sum(found, built.trajectory, len(played))
    lengths = np.bincount(built.trajectory, built.action_mask)
    log_odds = odds.prior + odds.beta * (total - odds.typical * lengths)
    chances = jax.nn.log_sigmoid(log_odds), jax.nn.log_sigmoid(-log_odds)
    return -jnp.mean(jnp.where(success, *chances))

  gradient = jax.jit(jax.grad(loss))
  for shape in (SHAPE, LARGE):
    fitted, odds = _fit(played, 1, _SGD, shape)
    step = jax.tree.map(np.subtract, params, fitted)
    expected = gradient(params, odds)
    for a, b in zip(jax.tree.leaves(step), jax.tree.leaves(expected), strict=True):
      np.testing.assert_allclose(a, b, atol=1e-5)
    assert np.abs(step['embed']['embedding']).max() > 1e-3


def test_the_engine_reads_what_the_learner_computes(tmp_path):
  own, critic = rollouts.params(), tiny.params(tiny.config(), likely={100: 0.5})
  policy, tokenizer = tmp_path / 'policy', tiny.tokenizer_dir()
  weights.save(policy, tiny.config(), own, tokenizer_from=tokenizer)
  odds = implicit_value.Odds(0.1, 0.3)
  implicit_value.save(
    tmp_path / 'critic', tiny.config(), critic, tmp_path / 'policy', odds
  )
  assert implicit_value.load(tmp_path / 'critic', tmp_path / 'policy')[1] == odds
  engine = tiny.engine(
    own, guides={guide_lib.FORCED: None}, slots=rollouts.SLOTS, bucket=rollouts.SLOTS
  )
  made = choice_lib.by_implicit_value(
    engine, tmp_path / 'critic', tmp_path / 'policy', candidates=2
  )
  seen = []

  def score(candidate):
    seen.append(candidate)
    return made.score(candidate)

  played = test_choice._play(made._replace(score=score), engine=engine)
  found = {c.tokens.tobytes(): c for c in seen}
  plain = _log_odds(critic, played, implicit_value.Odds(0.0, 1.0))
  for trajectory, total in zip(played, plain, strict=True):
    taken = [found[end.tobytes()] for end in test_choice._ends(trajectory)]
    assert sum(c.value for c in taken) == pytest.approx(total, abs=1e-3)
  with pytest.raises(ValueError, match='values of another policy'):
    implicit_value.load(tmp_path / 'critic', tmp_path / 'critic')
