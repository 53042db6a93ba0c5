"""First light, part 2: checks a tiny policy against results from a CPU.

  python -c 'from experiments.bench.light import policy; policy.write_golden()'

writes golden.npz, on a CPU. Parameters and tokens are NumPy's random numbers, equal on
every machine. The file has, in float32: log-probs of packed rows, the same after one
update, and an engine's samples with their log-probs. The device is compared in float32
with exact products, where only the order of sums differs, and in bfloat16, where its
kernels compute attention.
"""

import asyncio
from collections.abc import Iterator
import contextlib
import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
import optax

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import algorithms, learner
from experiments.bench import common
from experiments.bench.light import lines

_FILE = pathlib.Path(__file__).parent / 'golden.npz'
# Heads of 64, and rows in multiples of 128 tokens, as our kernels need.
_CONFIG = decoder.DecoderConfig(
  'qwen3', 512, 128, 2, 4, 2, 64, 256, tie_embeddings=True, rope_theta=1e6
)
_ROWS, _T, _TEXTS = 2, 256, 8
# Nats: float32 allows for the order of sums, bfloat16 for its 8 bits over two layers.
_LARGEST = {'float32': 2e-3, 'bfloat16': 0.1}
_RATE = 0.05


def _make_params() -> decoder.Params:
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(lambda: decoder.init(_CONFIG, jax.random.key(0)))

  def draw(path: Any, x: jax.ShapeDtypeStruct) -> np.ndarray:
    numbers = rng.standard_normal(x.shape, np.float32)
    norm = 'scale' in jax.tree_util.keystr(path[-1:])
    return 1 + 0.1 * numbers if norm else numbers * max(x.shape[-2:]) ** -0.5

  return jax.tree_util.tree_map_with_path(draw, shapes)


def _make_batch() -> types.Batch:
  """Makes rows of three sequences and padding; half of the tokens are actions."""
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, _CONFIG.vocab_size, (_ROWS, _T))
  actions = rng.random((_ROWS, _T)) < 0.5
  lengths = np.asarray([100, 64, 70])
  ids = np.repeat([1, 2, 3, 0], [*lengths, _T - lengths.sum()])
  starts = np.repeat([*np.cumsum([0, *lengths])], [*lengths, _T - lengths.sum()])
  positions = np.arange(_T) - starts
  actions &= (ids > 0) & (positions > 0)
  advantages = rng.standard_normal((_ROWS, _T))
  batch = common.make_batch(tokens, actions, advantages, _CONFIG.vocab_size)
  tile: Any = lambda x: np.tile(x.astype(np.int32), (_ROWS, 1))
  segment_ids, places = tile(ids), tile(positions)
  rows = types.Rows(batch.rows.tokens, places, types.Segments(segment_ids))
  return batch._replace(rows=rows, segment_ids=segment_ids)


def _compute(dtype: str) -> dict[str, np.ndarray]:
  """Computes the arrays of golden.npz in this dtype."""
  config = dataclasses.replace(_CONFIG, dtype=dtype)
  params, batch = jax.device_put(_make_params()), _make_batch()
  found = {'logprobs': learner.logprobs(params, batch, config=config)}
  engine = _make_engine(config, params)
  segments = engine.run([_play(engine, n) for n in range(_TEXTS)])
  found['sampled'] = np.stack([s.tokens for s in segments])
  found['sampled_logprobs'] = np.stack([s.behaviour_logprobs for s in segments])
  found['actions'] = np.stack([s.action_mask for s in segments])
  # Not Adam: its first step divides each gradient by its own size, which amplifies noise.
  optimizer = optax.sgd(_RATE)
  state = learner.init(params, optimizer)
  loss = learner.objective(algorithms.grpo(kl_coef=0.0))
  gradients = learner.forward_backward(state.params, [batch], config=config, loss=loss)
  state, metrics = learner.optim_step(state, gradients, optimizer=optimizer)
  found['grad_norm'] = np.asarray(metrics['grad_norm'])
  found['updated_logprobs'] = learner.logprobs(state.params, batch, config=config)
  return found


async def _play(engine: engine_lib.Engine, number: int) -> types.Segment:
  """Plays three turns with random answers; every two sequences share a prompt."""
  draw = lambda n, *seed: (
    np.random.default_rng(seed).integers(0, _CONFIG.vocab_size, n).astype(np.int32)
  )
  pieces, new = [], draw(32, number // 2)
  sequence: request_lib.Sequence | None = None
  key = request_lib.make_key('bench', number)
  async with engine.reserve(number // 2) as replica:
    for turn in range(3):
      request = request_lib.Request(new, sequence, max_tokens=16, key=key)
      said, sequence = await (generation := replica.submit(request)), generation.sequence
      pieces += [(new, np.zeros(len(new), np.float32), False)]
      pieces += [(said.tokens, said.logprobs, True)]
      new = draw(16, 1, number, turn)
      await asyncio.sleep(0)
    if sequence:
      sequence.close()
  return types.Segment(
    np.concatenate([tokens for tokens, _, _ in pieces]),
    np.concatenate([np.full(len(tokens), own) for tokens, _, own in pieces]),
    np.concatenate([logprobs for _, logprobs, _ in pieces]),
  )


def _make_engine(
  config: decoder.DecoderConfig, params: decoder.Params, drafts: int = 0
) -> engine_lib.Engine:
  return engine_lib.Engine(
    config,
    params,
    rows=_TEXTS,
    slots=256,
    decode_steps=8,
    prefill_tokens=32,
    bucket=256,
    narrow=False,
    drafts=drafts,
  )


def compare() -> Iterator[lines.Line]:
  """Compares log-probs, one update, and sampled tokens, in both precisions."""
  golden = dict(np.load(_FILE))
  for dtype, largest in _LARGEST.items():
    with _set_precision(dtype):
      found = _compute(dtype)
    for name in ('logprobs', 'updated_logprobs'):
      gap = float(np.abs(found[name] - golden[name]).max())
      yield _judge(f'{name}, {dtype}', gap, largest)
    norms = float(found['grad_norm']), float(golden['grad_norm'])
    yield _judge(f'gradient norm, {dtype}', abs(norms[0] / norms[1] - 1), largest)
    # After the first token that differs, the sequences are not comparable.
    same = found['sampled'] == golden['sampled']
    before = np.cumprod(same, axis=1).astype(bool) & golden['actions']
    gap = np.abs(found['sampled_logprobs'] - golden['sampled_logprobs'])[before].max()
    yield _judge(f'sampled log-probs, {dtype}', float(gap), largest)
    share = float(before.sum() / golden['actions'].sum())
    yield lines.make(f'sampled tokens as on a CPU, {dtype}', share, 'of all')


def draft() -> Iterator[lines.Line]:
  """Checks that greedy and sampled replies are the same with drafts and without."""
  params = jax.device_put(_make_params())
  for dtype in _LARGEST:
    config = dataclasses.replace(_CONFIG, dtype=dtype)
    with _set_precision(dtype):
      replies = {k: _reply(_make_engine(config, params, k)) for k in (0, 3)}
    (plain, _), (drafted, per_call) = replies[0], replies[3]
    share = float(np.cumprod(plain == drafted, axis=1).mean())
    line = lines.make(
      f'the same tokens from drafts, {dtype}', share, 'of all', tokens_per_call=per_call
    )
    exact = dtype == 'bfloat16' or share == 1
    yield line if exact else line | {'failed': f'{share:.1%} of the tokens are the same'}


def _reply(engine: engine_lib.Engine) -> tuple[np.ndarray, float]:
  """Samples replies to repetitive prompts, half of them greedily."""
  rng = np.random.default_rng(2)
  pieces = rng.integers(0, _CONFIG.vocab_size, (_TEXTS, 16)).astype(np.int32)

  async def ask(n: int) -> np.ndarray:
    key, temperature = request_lib.make_key('light', n), float(n % 2)
    request = request_lib.Request(
      np.tile(pieces[n], 3),
      max_tokens=64,
      key=key,
      sampling=config_lib.Sampling(temperature=temperature),
    )
    return (await engine.submit(request)).tokens

  replies = np.stack(engine.run([ask(n) for n in range(_TEXTS)]))
  return replies, engine.stats.sampled / max(engine.stats.calls, 1)


@contextlib.contextmanager
def _set_precision(dtype: str) -> Iterator[None]:
  """Makes float32 products exact in all threads, because the engine has its own."""
  name = 'jax_default_matmul_precision'
  before = getattr(jax.config, name)
  jax.config.update(name, 'highest' if dtype == 'float32' else None)
  try:
    yield
  finally:
    jax.config.update(name, before)


def _judge(what: str, gap: float, largest: float) -> lines.Line:
  line = lines.make(what, gap, 'nats' if 'norm' not in what else 'of the norm')
  return line if gap < largest else line | {'failed': f'{gap:.3g} is above {largest:g}'}


def write_golden() -> None:
  """Writes golden.npz."""
  with _set_precision('float32'):
    np.savez_compressed(_FILE, **_compute('float32'))  # pyright: ignore


MEASUREMENTS = (compare, draft)

if __name__ == '__main__':
  lines.run(MEASUREMENTS)
