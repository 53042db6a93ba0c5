"""experiments/bench/routes.py and routing.py: experts of sampler and learner."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import script
import tiny

from agent_r1_jax.models import decoder
from experiments.bench import routes

_CONFIG = tiny.config('qwen3_moe')
_TOKENS = np.random.default_rng(0).integers(0, tiny.VOCAB, (4, 25)).astype(np.int32)


def test_float32_takes_the_same_experts():
  found = routes.measure(_CONFIG, tiny.params(_CONFIG), _TOKENS)
  assert (found['tokens'], found['pairs_differ'], found['tokens_differ']) == (96, 0, 0)
  assert found['weight_moved'] == 0 and 'other' not in found
  for name in ('all', 'same', 'replayed'):
    assert found[name]['max_difference'] < 1e-4


def test_log_probs_are_those_of_the_decoder():
  params = tiny.params(_CONFIG)
  logprobs, expert, weight = routes.learn(params, _TOKENS, config=_CONFIG)
  positions = jnp.tile(jnp.arange(25)[None], (4, 1))
  tokens = jnp.asarray(_TOKENS)
  x = decoder.hidden(params, _CONFIG, tokens, positions, jnp.ones_like(tokens))
  every = jax.nn.log_softmax(decoder.logits(params, _CONFIG, x))
  want = np.take_along_axis(np.asarray(every)[:, :-1], _TOKENS[:, 1:, None], 2)[..., 0]
  np.testing.assert_allclose(logprobs, want, rtol=0, atol=1e-5)
  assert expert.shape == weight.shape == (4, 24, 2, 2)
  np.testing.assert_allclose(weight.sum(-1), 1.0, rtol=1e-6)


def test_a_learner_that_replays_takes_the_given_experts_with_its_own_weights():
  params = tiny.params(_CONFIG)
  free = routes.learn(params, _TOKENS, config=_CONFIG)
  same = np.pad(free[1], ((0, 0), (0, 1), (0, 0), (0, 0)), mode='edge')
  again = routes.learn(params, _TOKENS, same, config=_CONFIG)
  for x, y in zip(free, again):
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)
  other = (same + 1) % _CONFIG.num_experts
  forced = routes.learn(params, _TOKENS, other, config=_CONFIG)
  np.testing.assert_array_equal(forced[1], other[:, :-1])
  assert np.abs(forced[0] - free[0]).max() > 0.01


def test_the_measures_of_two_routings():
  """Of three tokens, one layer, two experts each: the second takes another one."""
  at = lambda *rows: np.reshape(rows, (1, 3, 1, 2))
  weight = np.array([[0.75, 0.25]] * 3, np.float32).reshape(1, 3, 1, 2)
  logprobs = lambda *x: np.array([x], np.float32)
  sampled = routes.Computed(logprobs(-1, -2, -3), at([0, 1], [2, 3], [4, 5]), weight)
  learned = routes.Computed(logprobs(-1, -2.5, -3), at([1, 0], [2, 6], [4, 5]), weight)
  found = routes.compare(sampled, learned, sampled)
  assert found['pairs_differ'] == found['tokens_differ'] == pytest.approx(1 / 3)
  assert found['weight_moved'] == 0.25
  assert found['other']['mean_difference'] == 0.5
  assert found['same']['max_difference'] == found['replayed']['max_difference'] == 0


_ONE_LAYER = """
import dataclasses
from absl import app
from experiments.bench import routing
routing._RANDOM = dataclasses.replace(routing._RANDOM, num_layers=1)
app.run(routing.main)
"""


def test_its_command(tmp_path):
  sizes = ('--texts=2', '--length=9', '--dtypes=bfloat16')
  done = script.run('-c', _ONE_LAYER, *sizes)
  assert done.returncode == 0, done.stderr
  line, replay = map(json.loads, done.stdout.splitlines())
  assert line['tokens'] == 16 and line['experts'] == 32
  gaps = [replay[name]['mean_difference'] for name in ('routed_again', 'replayed')]
  assert replay['replayed']['tokens'] == 2 * 3 * 48 and gaps[0] > gaps[1]
  done = script.run(
    '-m', 'experiments.bench.routing', '--policy=experiments/miniwiki/model'
  )
  assert done.returncode and 'a llama has no experts' in done.stderr


def test_dtypes_change_what_is_measured():
  config = dataclasses.replace(_CONFIG, dtype='bfloat16')
  found = routes.measure(config, tiny.params(_CONFIG), _TOKENS)
  assert found['all']['mean_difference'] > 1e-4
