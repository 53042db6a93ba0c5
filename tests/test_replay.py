"""A mixture's tokens are trained with the experts that computed them in the sampler."""

import dataclasses
from unittest import mock

import clients
import jax
import numpy as np
import pytest
import runs
import tiny

from agent_r1_jax import types
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.host import records
from agent_r1_jax.models import decoder, engine_params, experts, kv_cache
from agent_r1_jax.models.files import weights
from agent_r1_jax.rl import packing
from agent_r1_jax.rl import table as table_lib
from agent_r1_jax.rollout import store as store_lib
from agent_r1_jax.train import loop

SHAPE = tiny.config('qwen3_moe', 2)
L, E, k = SHAPE.num_layers, SHAPE.num_experts, SHAPE.experts_per_token


def _choose(params, tokens):
  """The experts that the layers take where all tokens are computed at once, [n, L, k].

  The tokens are padded to one length, which is compiled once.
  """
  padded = np.zeros((1, clients.SLOTS), np.int32)
  padded[0, : len(tokens)] = tokens
  return np.asarray(_choose_padded(params, padded))[: len(tokens)]


@jax.jit
def _choose_padded(params, tokens):
  copy, at = engine_params.unstack(params, SHAPE), jax.numpy.arange(clients.SLOTS)[None]
  cache = kv_cache.empty(SHAPE, 1, clients.SLOTS)
  _, cache = decoder.extend(copy, SHAPE, types.Rows(tokens, at), cache)
  return jax.numpy.stack([layer.experts[0].T for layer in cache], axis=1)


def _segment(n, routes=None, tokens=None):
  tokens = np.arange(3, 3 + n, dtype=np.int32) if tokens is None else tokens
  return types.Segment(tokens, tokens > 4, np.zeros(n, np.float32), routes=routes)


def test_a_reply_reports_the_experts_of_its_text_from_the_first_token_on():
  """Prefilled in chunks, decoded, copied to a fork, and in a turn after that."""
  params = tiny.params(SHAPE)
  prompt = np.arange(20, 60, dtype=np.int32)

  async def play():
    ask = lambda tokens, **options: engine.submit(
      request_lib.Request(tokens, max_tokens=9, **{'replay': True} | options)
    )
    first = ask(prompt)
    replies = [await first]
    length = len(first.sequence)
    fork = ask(prompt[:3], parent=request_lib.Fork(first.sequence, 30))
    replies.append(await fork)
    replies.append(await ask(prompt[:5], parent=first.sequence))
    assert (await ask(prompt, replay=False)).routes is None
    texts = first.sequence.tokens[:length], fork.sequence.tokens, first.sequence.tokens
    return replies, texts

  engine = tiny.engine(params, shape=SHAPE, bucket=clients.SLOTS)
  replies, texts = engine.run([play()])[0]
  for reply, text in zip(replies, texts, strict=True):
    assert reply.routes.dtype == np.int8
    assert reply.routes.shape == (len(text) - 1, L, k)  # The last is not computed yet.
    np.testing.assert_array_equal(reply.routes, _choose(params, text)[:-1])


def test_a_router_gives_the_experts_that_are_named_its_own_weights():
  rng = np.random.default_rng(0)
  x, router = (rng.standard_normal(shape, np.float32) for shape in ((1, 3, 6), (6, 5)))
  named = np.array([[[4, 0], [-1, -1], [2, 3]]], np.int8)
  route = jax.jit(experts.route, static_argnums=(2, 3))
  free = np.asarray(route(x, router, 2, False)[1])
  chances = np.exp(x @ router)
  chances /= chances.sum(-1, keepdims=True)
  for normalize in (False, True):
    weight, expert = jax.device_get(route(x, router, 2, normalize, named))
    np.testing.assert_array_equal(expert[0], [[4, 0], free[0, 1], [2, 3]])
    want = np.take_along_axis(chances, expert, -1)
    want = want / want.sum(-1, keepdims=True) if normalize else want
    np.testing.assert_allclose(weight, want, rtol=1e-5)
  worth = lambda router: route(x, router, 2, False, named)[0][0, 0, 0]
  slope = np.asarray(jax.jit(jax.grad(worth))(router))
  assert np.abs(slope[:, 4]).max() > 0  # The router learns what the expert is worth.


@pytest.mark.parametrize('trees', [False, True])
def test_the_learner_computes_each_token_by_the_experts_of_its_column(trees):
  """Of each layer; and what is not known is left to the router."""
  routes = np.stack([np.full((6, k), (layer, layer + 2)) for layer in range(L)], 1)
  routes = routes.astype(np.int8)
  routes[-1] = types.NO_EXPERT
  other = _segment(3)  # It begins as the first does, and has recorded nothing.
  table = table_lib.from_segments([_segment(6, routes), other])
  assert (table.routes[6:] == types.NO_EXPERT).all()
  shape = packing.MicrobatchShape(1, 12, trees)
  (batch,), layout = packing.pack_microbatches(table, shape)
  assert isinstance(batch.rows.sees, types.Tree if trees else types.Segments)
  assert layout.computed == (6 if trees else 9)
  run = jax.jit(decoder.hidden_and_loads, static_argnums=1)
  _, loads = run(tiny.params(SHAPE), SHAPE, batch.rows)
  free = 1 if trees else 4
  for layer, counts in enumerate(np.asarray(loads)):
    named = np.bincount([layer, layer + 2], minlength=E) * 5
    assert (counts >= named).all() and counts.sum() == 2 * (5 + free), layer


def test_log_probs_are_those_of_the_experts_that_sampled():
  """A learner whose routers changed takes them all the same, unless told otherwise."""
  params = tiny.params(SHAPE)
  tokens = np.random.default_rng(0).integers(3, 200, 12).astype(np.int32)
  routes = _choose(params, tokens)
  far = jax.tree.map(lambda x: x, params)
  far['layers']['moe']['router']['kernel'] = -params['layers']['moe']['router']['kernel']
  assert not np.array_equal(np.sort(_choose(far, tokens)), np.sort(routes))
  score = lambda params, routes: tiny.learned(
    params, [_segment(12, routes, tokens)], shape=SHAPE
  )[0]
  np.testing.assert_allclose(score(params, routes), score(params, None), atol=1e-5)
  assert np.abs(score(far, routes) - score(far, None)).max() > 1e-2


def test_records_and_tables_keep_experts_and_other_models_choose_their_own():
  routes = np.arange(5 * L * k, dtype=np.int8).reshape(5, L, k) % E
  segments = [_segment(5, routes), _segment(4)]
  t = types.Trajectory(
    types.Task('t', []), 0, 0, segments, [types.Turn(0, 2, 5), types.Turn(1, 2, 4)], [],
    'done',
  )  # fmt: skip
  back = store_lib.make_trajectory(
    records.unpack(records.pack(store_lib.list_fields(t))), t.task
  )
  np.testing.assert_array_equal(back.segments[0].routes, routes)
  assert back.segments[1].routes is None
  broken = store_lib.list_fields(t)
  broken['segments'][0]['routes'] = routes[:3]
  with pytest.raises(ValueError, match='the arrays of a segment'):
    store_lib.make_trajectory(broken, t.task)
  table = table_lib.build([t])
  np.testing.assert_array_equal(table.take(np.array([1, 3])).routes, routes[[1, 3]])
  assert table.add_prefixes([np.array([7, 8])])[0].routes is None
  assert 'routes' not in table.list_tokens()


def test_a_run_that_replays_nothing_records_no_experts(tmp_path, no_curves):
  """A row of test_resume.py does."""
  shape, played = dataclasses.replace(SHAPE, num_layers=1), []
  params, tokenizer = tiny.params(shape), tiny.tokenizer_dir()
  weights.save(tmp_path / 'base', shape, params, tokenizer_from=tokenizer)

  def stop(train_state, trajectories, *args, **kwargs):
    played.extend(trajectories)
    raise KeyboardInterrupt

  config = runs.config(
    tmp_path / 'base', max_turns=2, decode_steps=6, replay=False, eval_every=0
  )
  with (
    mock.patch.object(loop.updates, 'learn', stop),
    pytest.raises(KeyboardInterrupt),
  ):
    runs.run(config, tmp_path / 'run', make_env=runs.Talks, evals=None)
  assert played and all(s.routes is None for t in played for s in t.segments)
