"""Shared by the benchmarks: shapes of policies, a batch, a GRPO update, a timer."""

from collections.abc import Callable, Sequence
import functools
import statistics
import time
from typing import Any

import jax
import numpy as np
import optax

from agent_r1_jax import types
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import algorithms, learner


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
  '1.7b': _shape(28, 2048, 16, 8, 128, 6144, 151_936, 'qwen3', **_BFLOAT16),
  '4b': _shape(36, 2560, 32, 8, 128, 9728, 151_936, 'qwen3', **_BFLOAT16),
  '3b': _shape(36, 2048, 16, 2, 128, 11_008, 151_936, **_BFLOAT16),
}


def make_batch(
  tokens: np.ndarray, action_mask: np.ndarray, advantages: np.ndarray, vocab_size: int
) -> types.Batch:
  """Makes a batch of rows with one segment each, all actions weighted equally.

  Args:
    tokens: Token ids, [B, T].
    action_mask: Which tokens are actions, [B, T].
    advantages: Advantages, [B, T] or [B, 1].
    vocab_size: The tokens over which the behaviour policy was uniform.
  """
  B, T = tokens.shape
  fields: dict[str, Any] = {
    'segment_ids': np.ones((B, T), np.int32),
    'action_mask': action_mask,
    'old_logprobs': np.full((B, T), -np.log(vocab_size), np.float32),
    'advantages': (advantages * action_mask).astype(np.float32),
    'weights': (action_mask / action_mask.sum()).astype(np.float32),
  }
  positions: Any = np.tile(np.arange(T, dtype=np.int32), (B, 1))
  text: Any = tokens.astype(np.int32)
  rows = types.Rows(text, positions, types.Segments(fields['segment_ids']))
  return types.Batch(rows, **fields)


def make_update(
  config: decoder.DecoderConfig,
  params: decoder.Params,
  batches: Sequence[types.Batch],
  optimizer: optax.GradientTransformation,
) -> Callable[[], None]:
  """Makes a function that takes one GRPO step on the batches and waits for it."""
  loss = _make_loss()
  state = learner.init(params, optimizer)

  def update():
    nonlocal state
    gradients = learner.forward_backward(state.params, batches, config=config, loss=loss)
    state, _ = learner.optim_step(state, gradients, optimizer=optimizer)
    jax.block_until_ready(state)

  return update


@functools.cache
def _make_loss() -> learner.Loss:
  """Makes GRPO's loss once, so that batches of one shape share one program."""
  return learner.objective(algorithms.grpo(kl_coef=0.0))


def timed(repeats: int, fn: Callable[[], Any]) -> dict[str, Any]:
  """Times the first call and the repetitions, in seconds of wall and CPU time."""
  start = time.perf_counter()
  fn()
  first, wall, cpu = time.perf_counter() - start, [], []
  for _ in range(repeats):
    begun = time.perf_counter(), time.process_time()
    fn()
    wall.append(time.perf_counter() - begun[0])
    cpu.append(time.process_time() - begun[1])
  return {
    'seconds': round(min(wall), 4),
    'median_seconds': round(statistics.median(wall), 4),
    'cpu_seconds': round(min(cpu), 4),
    'first_seconds': round(first, 3),
  }
