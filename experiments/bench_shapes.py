"""The shapes of the policies that experiments/bench.py measures, by name."""

from typing import Any

from agent_r1_jax.models import decoder


def _shape(layers, embed, heads, kv_heads, head, mlp, vocab, family='qwen2', **kwargs):
  return decoder.DecoderConfig(
    family, vocab, embed, layers, heads, kv_heads, head, mlp, rope_theta=1e6, **kwargs
  )


_BFLOAT16: dict[str, Any] = {'dtype': 'bfloat16', 'remat': 'full', 'tie_embeddings': True}
SHAPES = {
  'tiny': _shape(2, 64, 4, 2, 16, 128, 256, 'llama'),
  's5': _shape(4, 256, 8, 2, 32, 704, 4096),
  's25': _shape(8, 512, 8, 2, 64, 1408, 4096),
  '0.6b': _shape(28, 1024, 16, 8, 128, 3072, 151_936, 'qwen3', **_BFLOAT16),
  '3b': _shape(36, 2048, 16, 2, 128, 11_008, 151_936, **_BFLOAT16),
}
