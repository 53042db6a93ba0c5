"""The operations that a model needs: published counts, and tokens counted one by one."""

import dataclasses

from flax import traverse_util
import jax
import numpy as np
import plain
import pytest
import tiny

from agent_r1_jax import types
from agent_r1_jax.models import costs, families, lora, quantization
from agent_r1_jax.report import meter
from agent_r1_jax.rl import packing
from agent_r1_jax.rl import table as table_lib
from experiments import published
from experiments.bench import chips


# The parameters of the checkpoints, less a table of embeddings that is only looked up.
@pytest.mark.parametrize(
  ('name', 'parameters'),
  [
    ('qwen2.5-0.5b', 494_032_768),
    ('qwen2.5-3b', 3_085_938_688),
    ('qwen2.5-7b', 7_615_616_512 - 152_064 * 3584),
  ],
)
def test_kernels_are_those_of_the_published_models(name, parameters):
  """Without norms and biases, by which no matrix is multiplied."""
  config = published.read_shape(name)
  biases = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
  others = config.num_layers * (2 * config.embed_dim + biases) + config.embed_dim
  assert (
    costs.count_parameters(tiny.init_shapes(config), config).taken == parameters - others
  )


@pytest.mark.parametrize('family', families.FAMILIES)
def test_only_products_count(family):
  """Neither norms and biases nor the scales of 8 bits and of adapters."""
  config = tiny.config(family, 2)
  params = {k: v for k, v in tiny.params(config).items() if k != 'vision'}
  size = costs.count_parameters(params, config)
  flat = traverse_util.flatten_dict(params)
  named = {path[-1] for path in flat}
  others = {'scale', 'bias', 'sinks', 'log'}
  assert named >= {'scale', 'kernel'} and named <= {'embedding', 'kernel', *others}
  few = {path: x for path, x in flat.items() if path[-1] not in others}
  kernels = sum(x.size for path, x in few.items() if path[-1] == 'kernel')
  assert kernels == size.layers + size.head + size.experts
  assert costs.count_parameters(traverse_util.unflatten_dict(few), config) == size
  adapted = lora.add(params, 2, ('q', 'o'), 1.0, jax.random.key(0))
  more = costs.count_parameters(adapted, config)
  assert more.layers > size.layers and more._replace(layers=size.layers) == size
  if not size.experts:
    rounded = quantization.freeze(adapted, config, 'int8')
    assert costs.count_parameters(rounded, config) == more


def test_of_experts_those_of_a_token_count():
  moe = {'num_experts': 8, 'experts_per_token': 2, 'expert_dim': 16}
  config = dataclasses.replace(plain.CONFIG, family='qwen3_moe', **moe)
  size = costs.count_parameters(tiny.init_shapes(config), config)
  an_expert = 3 * config.embed_dim * 16
  assert size.experts == config.num_layers * 8 * an_expert
  assert size.taken == size.layers + size.head + config.num_layers * 2 * an_expert


# A text of 1, 3 and 9 tokens; two of three layers slide.
def test_a_token_attends_to_the_text_before_it_or_its_window():
  config = dataclasses.replace(
    plain.CONFIG, num_layers=3, sliding=(True, False, True), window=4
  )
  size = costs.Parameters(0, 0, 0, 0.0)
  positions = np.concatenate([np.arange(n) for n in (1, 3, 9)])
  pairs = sum(
    t - s < config.window or not slides
    for n in (1, 3, 9)
    for t in range(n)
    for s in range(t + 1)
    for slides in config.sliding
  )
  found = costs.count_forward(size, config, positions, 0)
  assert found == 4 * config.num_heads * config.head_dim * pairs


def _texts() -> list[np.ndarray]:
  rng = np.random.default_rng(0)
  return [rng.integers(0, 2, n).astype(np.int32) for n in rng.integers(2, 12, 20)]


def _count(text, weights) -> tuple[int, int, int]:
  """Counts tokens, tokens that are seen, and tokens with a weight and one before them."""
  wanted = sum(bool(w) for w in weights[1:])
  return len(text), len(text) * (len(text) + 1) // 2, wanted


@pytest.mark.parametrize('trees', [False, True])
def test_a_gradient_counts_each_token_that_is_computed(trees):
  config, texts = plain.CONFIG, _texts()
  weights = [(np.arange(len(t)) % 3 > 0).astype(np.float32) for t in texts]
  segments = [types.Segment(t, t >= 0, np.zeros(len(t))) for t in texts]
  table = dataclasses.replace(
    table_lib.from_segments(segments), weights=np.concatenate(weights)
  )
  if trees:  # What texts begin with is computed once, and has one weight.
    prefixes = {tuple(t[: i + 1].tolist()) for t in texts for i in range(len(t))}
    tokens, seen = len(prefixes), sum(map(len, prefixes))
    wanted = sum(len(p) > 1 and (len(p) - 1) % 3 > 0 for p in prefixes)
  else:
    counts = [_count(*x) for x in zip(texts, weights, strict=True)]
    tokens, seen, wanted = (sum(x) for x in zip(*counts, strict=True))
  shape = packing.MicrobatchShape(rows=1, row_tokens=256, trees=trees)
  (batch,), _ = packing.pack_microbatches(table, shape)
  params = plain.policy()
  count = lambda params, **options: costs.count_gradient(params, config, batch, **options)

  head = config.vocab_size * config.embed_dim
  flat = traverse_util.flatten_dict(params['layers'])
  layers = sum(x.size for path, x in flat.items() if path[-1] == 'kernel')
  pairs = 4 * config.num_layers * config.num_heads * config.head_dim * seen
  assert count(params) == 6 * (layers * tokens + head * wanted) + 3 * pairs
  assert count(params, has_logits=False) == 6 * layers * tokens + 3 * pairs
  adapted = lora.add(params, 2, ('q',), 1.0, jax.random.key(0))
  learned = traverse_util.flatten_dict(lora.split(adapted)[0])
  more = sum(x.size for path, x in learned.items() if path[-1] != 'lora_scale')
  products = (layers + more) * tokens + head * wanted
  assert count(adapted) == 4 * products + 3 * pairs


def test_a_chip_is_known_by_how_its_name_begins():
  peaks = {
    'NVIDIA H100 80GB HBM3': 989e12,
    'NVIDIA H100 PCIe': 756e12,
    'TPU v5 lite': 197e12,
    'TPU v5e': 197e12,
    'TPU v5': 459e12,
    'TPU v5p': 459e12,
    'cpu': None,
  }
  assert {kind: meter.find_peak(kind) for kind in peaks} == peaks


@pytest.mark.parametrize(
  ('name', 'kind'),
  [
    ('v5e', 'TPU v5 lite'),
    ('v5p', 'TPU v5'),
    ('v6e', 'TPU v6 lite'),
    ('a100', 'NVIDIA A100'),
    ('h100', 'NVIDIA H100'),
    ('h200', 'NVIDIA H200'),
    ('b200', 'NVIDIA B200'),
  ],
)
def test_the_figures_of_chips_that_are_not_here_are_the_same(name, kind):
  assert chips.CHIPS[name].operations == meter.PEAKS[kind]
