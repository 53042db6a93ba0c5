"""What one accelerator does of what it could: a JSON line for each measurement.

  python -m experiments.bench.accelerator                   # one GPU of 80 GB
  python -m experiments.bench.accelerator --shape=tiny --rows=4 --used=64 --context=256

- decode: a step of `rows` texts with `used` tokens each, beside its floor: the bytes of
  the weights and of the used cache over the bandwidth that a copy reaches.
- context: an RL update (log-probs, PPO clip, AdamW, recomputed activations) on one text
  of `context` tokens, of which half are actions: tokens a second, and MFU, by the
  operations of agent_r1_jax/models/costs.py. Then the same for the paper's 3B on one card
  (docs/memory.md): a row of 4,096 tokens, adamw8. With AGENT_R1_ROW_ATTENTION=0 in the
  environment rows attend by cuDNN.
- sync: what the engine's copy of new parameters takes, beside its bytes.
- agreement: the sampler's log-probs and the learner's, of the same tokens; and how far
  our kernels of attention are from XLA's, where they are used. The gap by cause, on a
  CPU: precision.py.

bfloat16 with float32 master weights. Compile time is apart; seconds are the least of the
repetitions. Not run on an accelerator yet; expected: docs/performance.md.
"""

from collections.abc import Callable
import dataclasses
import json
import platform
import time
from typing import Any

from absl import app, flags
import jax
import jax.numpy as jnp
import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.engine import active_request, automaton_guide
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import guide as guide_lib
from agent_r1_jax.engine import programs as programs_lib
from agent_r1_jax.host import runtime
from agent_r1_jax.models import (
  attention_kernels,
  costs,
  decoder,
  kv_cache,
  row_attention,
  sampling_params,
  slot_attention,
)
from agent_r1_jax.rl import learner, optimizers
from experiments.bench import common, gaps

_WHAT = flags.DEFINE_list('what', [], 'Names of MEASUREMENTS; all by default.')
_SHAPE = flags.DEFINE_string(
  'shape', '', 'A key of common.SHAPES; by default what each is meant for.'
)
_ROWS = flags.DEFINE_list('rows', ['64', '256'], 'Texts that are decoded at a time.')
_USED = flags.DEFINE_list('used', ['512', '1024', '2048', '4096'], 'Tokens of a text.')
_CONTEXT = flags.DEFINE_list('context', ['16384', '65536'], 'Tokens of a training row.')
_OPTIMIZER = flags.DEFINE_string('optimizer', 'adamw', 'A key of optimizers.KINDS.')
_REMAT = flags.DEFINE_string('remat', 'full', 'Activations recomputed.')
_REPEATS = flags.DEFINE_integer('repeats', 3, 'Repetitions, without compilation.')
_PEAK = flags.DEFINE_float(
  'peak', None, 'Operations a second of the chip, if costs.PEAKS does not know it.'
)
_COPY = flags.DEFINE_integer('copy', 1 << 30, 'Numbers of the copy, of 2 bytes.')


def _policy(default: str) -> tuple[decoder.DecoderConfig, decoder.Params]:
  config = common.SHAPES[_SHAPE.value or default]
  config = dataclasses.replace(config, dtype='bfloat16', remat=_REMAT.value)
  return config, jax.jit(decoder.init, static_argnums=0)(config, jax.random.key(0))


def _seconds(fn: Callable[[], Any]) -> tuple[float, float]:
  """Returns the seconds of the first call, and the least of the others."""
  times = []
  for _ in range(1 + _REPEATS.value):
    start = time.perf_counter()
    jax.block_until_ready(fn())
    times.append(time.perf_counter() - start)
  return times[0], min(times[1:])


def _peak_bytes() -> int | None:
  """Most memory in use so far, where the device counts it."""
  stats = jax.devices()[0].memory_stats() or {}
  return stats.get('peak_bytes_in_use')


def bandwidth() -> float:
  """Bytes a second that a copy reads and writes."""
  x = jnp.zeros(_COPY.value, jnp.bfloat16)
  copy = jax.jit(lambda x: x + 1)
  return 2 * x.nbytes / _seconds(lambda: copy(x))[1]


def decode():
  """A line for each number of rows and of used tokens."""
  config, params = _policy('3b')
  params = sampling_params.unstack(params, config)
  speed, steps = bandwidth(), 32
  weights = sum(x.nbytes for x in jax.tree.leaves(params))
  guides = (automaton_guide.AUTOMATA, guide_lib.TRUNCATION)
  tables = jax.device_put(
    automaton_guide.make_tables(automaton_guide.AutomatonPool(config.vocab_size).entries)
  )
  for rows in map(int, _ROWS.value):
    # Whole tiles, so that a kernel that reads used slots takes them.
    slots = -(-(max(map(int, _USED.value)) + steps) // 128) * 128
    in_place = attention_kernels.reads_used_slots(
      (rows, config.num_kv_heads, slots, config.head_dim), config.dtype
    )
    cache = kv_cache.empty(config, rows, slots)
    a_token = sum(x.nbytes for x in jax.tree.leaves(cache)) / rows / slots
    empty = active_request.make_decode_batch({}, rows, guides, unused_row=rows)
    for used in map(int, _USED.value):
      batch = empty._replace(
        rows=np.arange(rows, dtype=np.int32),
        length=np.full(rows, used, np.int32),
        ends=np.full_like(empty.ends, used % config.vocab_size),
        budget=np.full(rows, steps, np.int32),
      )

      def segment(batch=batch, bucket=used + steps, slots=slots, in_place=in_place):
        nonlocal cache
        cache, _, out = programs_lib.decode(
          params,
          cache,
          batch,
          (tables, None),
          config=config,
          guides=guides,
          steps=steps,
          bucket=slots if in_place else bucket,
          in_place=in_place,
        )
        return out

      first, seconds = _seconds(segment)
      floor = (weights + rows * (used + steps / 2) * a_token) / speed
      yield {
        'rows': rows,
        'used': used,
        'reads_used_slots': in_place,
        'step_milliseconds': round(1e3 * seconds / steps, 3),
        'floor_milliseconds': round(1e3 * floor, 3),
        'of_floor': round(floor / (seconds / steps), 3),
        'bandwidth': round(speed),
        'first_seconds': round(first, 1),
      }


def context():
  """A line for each length of Qwen3-0.6B, and one for the paper's 3B."""
  for T in map(int, _CONTEXT.value):
    yield _update('0.6b', T, _OPTIMIZER.value)
  yield _update('3b', min(4096, *map(int, _CONTEXT.value)), 'adamw8')


def _update(shape: str, T: int, kind: str) -> dict[str, Any]:
  config, params = _policy(shape)
  parameters = sum(x.size for x in jax.tree.leaves(params))
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, config.vocab_size, (1, T))
  actions = np.arange(T)[None] >= T // 2
  advantages = rng.normal(size=(1, T))
  batch = common.make_batch(tokens, actions, advantages, config.vocab_size)
  operations = costs.count_gradient(params, config, batch)
  optimizer = optimizers.make(config_lib.Optimizer(kind=kind), 1e-6)
  update = common.make_update(config, params, [batch], optimizer)
  del params  # The update has them, and gives them away.
  first, seconds = _seconds(update)
  peak = _PEAK.value or costs.find_peak(jax.devices()[0].device_kind)
  return {
    'tokens': T,
    'parameters': parameters,
    'optimizer': kind,
    'seconds': round(seconds, 3),
    'tokens_per_second': round(T / seconds),
    'operations': operations,
    'mfu': peak and round(operations / seconds / peak, 4),
    'peak_bytes': _peak_bytes(),
    'first_seconds': round(first, 1),
  }


def sync():
  """One line: the engine's copy of the learner's parameters."""
  config, params = _policy('3b')
  copy = lambda: sampling_params.unstack(params, config)
  first, seconds = _seconds(copy)
  moved = sum(x.nbytes for tree in (params, copy()) for x in jax.tree.leaves(tree))
  yield {
    'bytes': moved,
    'seconds': round(seconds, 4),
    'floor_seconds': round(moved / bandwidth(), 4),
    'first_seconds': round(first, 1),
  }


def _engine(config, params) -> engine_lib.Engine:
  engine = engine_lib.Engine(
    config,
    params,
    rows=max(map(int, _ROWS.value)),
    slots=1024,
    prefill_tokens=128,
    bucket=1024,
    narrow=False,
  )
  engine.warm_up()
  return engine


def agreement():
  """One line: how far the sampler's log-probs and the learner's are apart."""
  config, params = _policy('3b')
  engine = _engine(config, params)
  played = engine.run([gaps.play(engine, config.vocab_size, n) for n in range(64)])
  differences = []
  for segment, _ in played:
    T = len(segment.tokens)
    arrays: Any = (
      segment.tokens[None],
      np.arange(T, dtype=np.int32)[None],
      np.ones((1, T), np.int32),
      segment.action_mask[None],
      segment.behaviour_logprobs[None],
      np.zeros((1, T), np.float32),
      np.zeros((1, T), np.float32),
    )
    batch = types.Batch(*arrays)
    learned = learner.logprobs(params, batch, config=config)[0]
    mask = segment.action_mask
    differences.append((learned - segment.behaviour_logprobs)[mask].astype(np.float64))
  hopper = jax.default_backend() == 'gpu' and attention_kernels.is_hopper()
  hopper &= slot_attention.supports((1, 1, 1024, config.head_dim), config.dtype)
  yield gaps.describe(np.concatenate(differences)) | {
    f'{kernel.__name__.rpartition(".")[2]}_gap': (
      kernel.measure_gap(config.head_dim) if hopper else None
    )
    for kernel in (slot_attention, row_attention)
  }


MEASUREMENTS = (decode, context, sync, agreement)


def main(_):
  runtime.quiet_logging()
  runtime.initialize()
  names = [measure.__name__ for measure in MEASUREMENTS]
  if unknown := set(_WHAT.value) - set(names):
    raise app.UsageError(f'--what: {sorted(unknown)}; there are {names}')
  about = {
    'device': jax.devices()[0].device_kind,
    'jax': jax.__version__,
    'python': platform.python_version(),
    'remat': _REMAT.value,
    'optimizer': _OPTIMIZER.value,
  }
  for measure in MEASUREMENTS:
    if _WHAT.value and measure.__name__ not in _WHAT.value:
      continue
    for line in measure():
      print(json.dumps({'measurement': measure.__name__} | about | line), flush=True)


if __name__ == '__main__':
  app.run(main)
