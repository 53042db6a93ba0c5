"""An initialisation that can copy: an induction circuit placed by hand.

A small decoder trained from scratch learns to copy late (after 3M tokens of miniwiki text
the induction heads had not formed). For policies that must copy names from passages after
minutes on a laptop, the circuit of Olsson et al. 2022 (arXiv 2209.11895) is written into
the first two layers; everything else is random, and everything is trained.

Letters as in decoder.py.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from agent_r1_jax import types
from agent_r1_jax.models import decoder, rope

FAMILIES = ('llama', 'qwen2_moe', 'qwen2_5_vl', 'gpt_oss')
# Standard deviation of embeddings; the residual's other parts have the same size.
_SCALE = 0.05
# Rotations per token: faster frequencies tell neighbours apart, and slower ones hardly
# turn over an entire context.
_FAST, _SLOW = 0.09, 2e-3
# Strengths: attention to the previous token, match of tokens, and copying.
_BEFORE, _MATCH, _COPY = 4.0, 2.5, 0.3


def init(config: decoder.DecoderConfig, seed: int) -> decoder.Params:
  """Makes random parameters whose layers 0 and 1 continue repeated text.

  Layer 0, head 0 attends to the previous token (fast RoPE frequencies on the embedding's
  constant dimension) and writes it into H reserved dimensions. In layer 1, the first head
  of each key-value group matches the current token with those dimensions of each position
  (slow frequencies) and copies that position's token.

  Args:
    config: A shape of one of FAMILIES (no q/k norms; biases begin as 0) with 2 layers or
      more.
    seed: The seed of all randomness.

  Raises:
    ValueError: The family or the number of layers does not fit.
  """
  if config.family not in FAMILIES or config.num_layers < 2:
    raise ValueError(
      f'family={config.family}, num_layers={config.num_layers}: the induction circuit '
      f'needs a family without q/k norms ({", ".join(FAMILIES)}) and 2 layers or more.'
    )
  D, H = config.embed_dim, config.head_dim
  rng = np.random.default_rng(seed)
  params = jax.tree.map(np.array, decoder.init(config, jax.random.key(seed)))
  # Dimension 0 is constant, the last H are reserved, the tokens are in between.
  tokens, before = slice(1, D - H), slice(D - H, D)
  embedding = rng.normal(0, _SCALE, (config.vocab_size, D))
  embedding[:, 0], embedding[:, before] = 4 * _SCALE, 0.0
  params['embed']['embedding'][:] = embedding
  attn = params['layers']['attn']
  # The output of the random parts must not drown the embeddings.
  attn['o']['kernel'] *= 0.02
  for name in {'mlp', 'moe', 'shared'} & params['layers'].keys():
    params['layers'][name]['down']['kernel'] *= 0.02
  if 'vision' in params:
    # A picture's features are as large as an embedding, outside the circuit's dimensions.
    out = params['vision']['merger']['out']
    out['kernel'] *= _SCALE
    out['kernel'][:, 0], out['kernel'][:, before] = 0.0, 0.0
    out['bias'][0] = 4 * _SCALE
  reader = _orthogonal(rng, D - H - 1)[:, :H]
  copier = _orthogonal(rng, D - H - 1)
  stretched = config.rope_theta, config.head_dim, config.rope_scaling
  frequencies = np.asarray(rope.frequencies(*stretched))
  _place_before(attn, reader, frequencies, tokens, before)
  _place_match(attn, reader, copier, frequencies, tokens, before, config)
  return jax.tree.map(jnp.asarray, params)


def _orthogonal(rng, n: int) -> np.ndarray:
  return np.linalg.qr(rng.normal(size=(n, n)))[0]


def _place_before(attn, reader, frequencies, tokens, before):
  """Layer 0, head 0: a key rotated by one step matches the next query best."""
  q, k, v, o = (attn[name]['kernel'][0] for name in 'qkvo')
  half = len(frequencies)
  q[:, 0], v[:, 0], o[0] = 0.0, 0.0, 0.0
  for i in np.flatnonzero(frequencies >= _FAST):
    k[:, 0, [i, i + half]] = 0.0
    q[0, 0, i] = _BEFORE
    k[0, 0, i] = _BEFORE * np.cos(frequencies[i])
    k[0, 0, i + half] = _BEFORE * np.sin(frequencies[i])
  v[tokens, 0] = reader
  o[0][:, before] = _SCALE * np.eye(reader.shape[1])


def _place_match(attn, reader, copier, frequencies, tokens, before, config):
  """Layer 1: query = this token, key = the previous token, value = the token there."""
  q, k, v, o = (attn[name]['kernel'][1] for name in 'qkvo')
  H, half = config.head_dim, len(frequencies)
  slow = np.flatnonzero(frequencies < _SLOW)
  dims = np.concatenate([slow, slow + half])
  for group in range(config.num_kv_heads):
    head = group * config.num_heads // config.num_kv_heads
    # Each group matches and copies in its own coordinates of the reader.
    chosen = np.roll(np.arange(H), group * H // 2)[: len(dims)]
    copied = copier[:, group * H : (group + 1) * H]
    q[:, head], k[:, group], v[:, group], o[head] = 0.0, 0.0, 0.0, 0.0
    for d, j in zip(dims, chosen, strict=True):
      q[tokens, head, d] = _MATCH * reader[:, j]
      k[before, group, d][j] = _MATCH
    v[tokens, group, : copied.shape[1]] = copied
    o[head][: copied.shape[1], tokens] = _COPY * copied.T


def repeats(seed: int, vocab_size: int, tokens: float) -> Iterator[types.Segment]:
  """Yields random strings repeated two to four times, about `tokens` tokens in total.

  Only copying predicts the repetitions, so the model learns induction heads early.
  """
  rng = np.random.default_rng(seed)
  while tokens > 0:
    string = rng.integers(0, vocab_size, rng.integers(4, 41))
    text = np.tile(string, rng.integers(2, 5)).astype(np.int32)
    repeated = np.arange(len(text)) > len(string)
    yield types.Segment(text, repeated, np.zeros(len(text), np.float32))
    tokens -= len(text)
