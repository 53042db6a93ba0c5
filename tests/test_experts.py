"""Mixtures of experts: every token is computed by its own, whatever the others take."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from agent_r1_jax import types
from agent_r1_jax.models import decoder, experts
from agent_r1_jax.rl import algorithms, learner, packing
from agent_r1_jax.rl import table as table_lib

_D, _E, _I = 6, 5, 7


def _swiglu(gate, up):
  return jax.nn.silu(gate) * up


def _inputs(M, k, seed=0, concentrated=False, biased=True):
  """Tokens in two rows, weights, experts and kernels, all random."""
  rng = np.random.default_rng(seed)
  make = lambda *shape: rng.normal(size=shape).astype(np.float32)
  kernels = experts.Kernels(make(_E, _D, _I), make(_E, _D, _I), make(_E, _I, _D))
  if biased:
    biases = make(_E, _I), make(_E, _I), make(_E, _D)
    kernels = kernels._replace(biases=biases)
  among = 2 if concentrated else _E
  expert = np.stack([rng.permutation(among)[:k] for _ in range(M)]).reshape(2, -1, k)
  return make(2, M // 2, _D), make(2, M // 2, k), expert, kernels


def _every_expert(x, weight, expert, kernels):
  """The definition: all experts compute all tokens, and most of it is not used."""
  add = [0.0 if bias is None else bias[None, None] for bias in kernels.biases]
  gate = jnp.einsum('btd,edi->btei', x, kernels.gate) + add[0]
  hidden = _swiglu(gate, jnp.einsum('btd,edi->btei', x, kernels.up) + add[1])
  out = jnp.einsum('btei,eid->bted', hidden, kernels.down) + add[2]
  chosen = jnp.take_along_axis(out, expert[..., None], axis=2)
  return (chosen * weight[..., None]).sum(2)


@functools.partial(jax.jit, static_argnums=0)
def _differentiate(f, slope, x, weight, expert, kernels):
  """The output of `f`, and its gradient."""

  def total(x, weight, kernels):
    out = f(x, weight, expert, kernels)
    return jnp.vdot(slope, out), out

  gradient, out = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(x, weight, kernels)
  return out, gradient


@pytest.fixture(params=['cpu', 'gpu', 'tpu'])
def platform(request, monkeypatch):
  """By blocks, in rounds, and by XLA's ragged product."""
  monkeypatch.setattr(experts.sharding, 'platform', lambda: request.param)


@pytest.mark.parametrize(('M', 'k'), [(2, 1), (30, 2), (300, 2)])
def test_experts_and_their_gradient_are_the_definition(platform, M, k):
  """If all tokens take two of the experts, none is dropped, and the others idle."""
  slope = np.random.default_rng(1).normal(size=(2, M // 2, _D)).astype(np.float32)
  mix = functools.partial(experts.mix, activate=_swiglu)
  for concentrated, biased in ((False, False), (False, True), (True, True)):
    given = _inputs(M, k, concentrated=concentrated, biased=biased)
    found, want = (_differentiate(f, slope, *given) for f in (mix, _every_expert))
    for y, z in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(y, z, rtol=0, atol=2e-5 * np.abs(z).max() + 1e-7)


def test_a_token_is_the_same_whatever_the_others_take(platform):
  """To the last bit: else a rollout would depend on what else is in the batch."""
  x, weight, expert, kernels = _inputs(60, 2)
  _, _, others, _ = _inputs(60, 2, seed=5, concentrated=True)
  mix = jax.jit(functools.partial(experts.mix, activate=_swiglu))
  out = np.asarray(mix(x, weight, expert, kernels))
  x[1] += 1.0
  expert[1] = others[1]
  moved = mix(x, weight, expert, kernels)
  np.testing.assert_array_equal(moved[0], out[0])
  assert not np.array_equal(moved[1], out[1])


def test_experts_of_another_chip_add_nothing(platform):
  x, weight, expert, kernels = _inputs(30, 2)
  half = lambda part: jax.tree.map(lambda x: x[part], kernels)
  mix = jax.jit(functools.partial(experts._mix, activate=_swiglu))
  parts = (
    mix(x, weight, expert, half(slice(0, 2))),
    mix(x, weight, expert - 2, half(slice(2, None))),
  )
  whole = mix(x, weight, expert, kernels)
  np.testing.assert_allclose(sum(parts), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  ('block', 'slot', 'token', 'sizes'),
  [
    (1, [1, 0, 2], [1, 0, 2], [1, 2]),
    (2, [2, 0, 3], [1, 3, 0, 2, 3, 3], [2, 2]),
  ],
)
def test_the_example_of_sorting(block, slot, token, sizes):
  """That of the docstring; the blocks that no expert needs come last."""
  sort = jax.jit(experts._sort, static_argnums=(1, 2))
  slots = sort(np.array([[1], [0], [1]]), 2, block)
  assert slots.slot[:, 0].tolist() == slot
  assert slots.token.tolist() == token
  assert slots.sizes.tolist() == sizes


def test_there_are_slots_enough_for_any_choice():
  """All to one expert, and as evenly as it goes; each pair has a slot of its own."""
  rng, sort = np.random.default_rng(0), jax.jit(experts._sort, static_argnums=(1, 2))
  for M, E, block in ((1, 5, 8), (17, 3, 4), (64, 8, 8), (9, 1, 2)):
    choices = np.zeros(M, int), np.arange(M) % E, rng.integers(0, E, M)
    for choice in choices:
      slots = jax.device_get(sort(choice[:, None], E, block))
      assert len(set(slots.slot[:, 0].tolist())) == M
      np.testing.assert_array_equal(slots.token[slots.slot[:, 0]], np.arange(M))
      assert (slots.token < M).sum() == M


@pytest.mark.parametrize(('normalize', 'biased'), [(False, True), (True, False)])
def test_the_router_takes_the_likeliest(normalize, biased):
  x = np.random.default_rng(0).normal(size=(3, 4, _D)).astype(jnp.bfloat16)
  router = np.random.default_rng(1).normal(size=(_D, _E)).astype(np.float32)
  route = jax.jit(experts.route, static_argnums=(2, 3))
  bias = np.linspace(-1, 1, _E, dtype=np.float32) if biased else None
  weight, expert = route(x, router, 2, normalize, None, bias)
  logits = np.asarray(x, np.float64) @ np.asarray(router, np.float64)
  logits += bias if biased else 0
  chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  likeliest = np.argsort(-chances)[..., :2]
  np.testing.assert_array_equal(expert, likeliest)
  want = np.take_along_axis(chances, likeliest, -1)
  want = want / want.sum(-1, keepdims=True) if normalize else want
  assert weight.dtype == jnp.float32
  np.testing.assert_allclose(weight, want, rtol=1e-5)


def test_loads_are_of_the_text_alone_and_balance_is_measured():
  """Rows and trees of the same texts: a token that texts share counts once in a tree."""
  config = tiny.config('qwen3_moe', 2)
  params = tiny.params(config)
  tokens = jnp.array([[5, 6, 7, 5, 6, 8, 0, 0]], jnp.int32)
  positions = jnp.array([[0, 1, 2, 0, 1, 2, 0, 0]], np.int32)
  ids = jnp.array([[1, 1, 1, 2, 2, 2, 0, 0]], np.int32)
  compute = jax.jit(decoder.hidden_and_loads, static_argnums=1)
  _, loads = compute(params, config, tiny.rows(tokens, positions, ids))
  assert loads.shape == (2, 8)
  np.testing.assert_array_equal(loads.sum(1), [6 * 2] * 2)
  tree = jnp.array([[5, 6, 7, 8, 0, 0, 0, 0]], np.int32)
  places = jnp.array([[0, 1, 2, 2, 0, 0, 0, 0]], np.int32)
  ends = jnp.array([[4, 4, 3, 4, 5, 6, 7, 8]], np.int32)
  rows = types.Rows(tree, places, types.Tree(places, ends))  # It reads no parents.
  _, of_tree = compute(params, config, rows)
  np.testing.assert_array_equal(of_tree.sum(1), [4 * 2] * 2)
  found = learner._measure_balance(jnp.asarray([[4.0, 0, 0, 0], [1.0, 1, 2, 0]]))
  assert found['expert_max_load'] == (4 + 2) / 2 and found['expert_idle'] == 4 / 8


def test_a_gradient_has_the_balance_of_its_micro_batch():
  config = tiny.config('qwen2_moe')
  segment = types.Segment(
    np.arange(1, 13, dtype=np.int32), np.arange(12) > 0, np.zeros(12, np.float32)
  )
  table = table_lib.from_segments([segment])
  columns = {'weights': table.action_mask / 11, 'old_logprobs': np.zeros(12, np.float32)}
  columns |= {'advantages': np.ones(12, np.float32)}
  table = dataclasses.replace(table, **columns)
  shape = packing.MicrobatchShape(1, 16, False)
  batches, _ = packing.pack_microbatches(table, shape)
  options = {'config': config, 'loss': learner.objective(algorithms.grpo())}
  found = learner.forward_backward(tiny.params(config), batches, **options)
  weight = found.sums['weight']
  busiest = found.sums['expert_max_load'] / weight
  # 12 tokens with two experts each: 3 of each expert's on average.
  assert 1 <= busiest <= 4 and busiest * 6 == pytest.approx(round(float(busiest) * 6))
  assert 0 <= found.sums['expert_idle'] / weight < 1
  # Of several micro-batches it is the mean by their weights.
  (batch,) = batches
  heavy = batch._replace(weights=batch.weights * 3)
  more = learner.forward_backward(tiny.params(config), [batch, heavy], **options)
  for name in ('expert_max_load', 'expert_idle'):
    np.testing.assert_allclose(more.sums[name], 4 * found.sums[name], rtol=1e-5)
