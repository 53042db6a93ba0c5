"""Measures the throughput of engine and learner; prints one JSON line per measurement.

  python -m experiments.bench                        # all of MEASUREMENTS, shape s5
  python -m experiments.bench --shape=s25 --what=sampling,update,group_step

With s5, all of them take a few minutes on 2 CPU cores. `seconds` and `cpu_seconds` are
the best repetition's, without compilation (`first_seconds`). docs/results has more.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import json
import os
import platform
from typing import Any

from absl import app, flags
import jax
import jax.numpy as jnp
import numpy as np
import optax

from agent_r1_jax import types
from agent_r1_jax.agent import automata
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.host import runtime
from agent_r1_jax.models import batch_invariant, decoder
from agent_r1_jax.rl import packing, table
from experiments.bench import common

_SHAPE = flags.DEFINE_enum('shape', 's5', [*common.SHAPES], 'The policy.')
_WHAT = flags.DEFINE_list('what', [], 'Names of MEASUREMENTS; all by default.')
_REPEATS = flags.DEFINE_integer('repeats', 3, 'Repetitions of each, without compilation.')
_ROWS = flags.DEFINE_integer('rows', 64, 'Texts that are decoded at a time.')
_REPLICAS = flags.DEFINE_integer('replicas', 1, 'Replicas that divide them; see Engine.')
_BATCH_INVARIANT = flags.DEFINE_bool(
  'batch_invariant', False, 'As model.batch_invariant.'
)
_PROMPT = flags.DEFINE_integer('prompt', 128, 'Tokens of a prompt.')
_REPLY = flags.DEFINE_integer('reply', 128, 'Tokens of a reply.')
_MICROBATCH = flags.DEFINE_integer('microbatch', 16, 'Rows of a gradient.')


@dataclasses.dataclass
class Bench:
  """A policy to measure."""

  config: decoder.DecoderConfig
  params: decoder.Params

  def engine(self) -> engine_lib.Engine:
    """Makes an engine for sequences of a prompt and a reply."""
    engine = engine_lib.Engine(
      self.config,
      self.params,
      rows=_ROWS.value,
      slots=_PROMPT.value + _REPLY.value,
      decode_steps=32,
      prefill_rows=32,
      prefill_tokens=64,
      bucket=128,
      replicas=_REPLICAS.value,
    )
    engine.warm_up()
    return engine

  @functools.cached_property
  def _stop(self) -> types.Automaton:
    """Costs as much as stop ids, but ends no reply before its budget."""
    return automata.stop([], self.config.vocab_size)

  def tokens(self, n: int, *seed: int) -> np.ndarray:
    """Returns n random tokens."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, self.config.vocab_size, n).astype(np.int32)

  async def reply(self, engine: engine_lib.Engine, number: int, group: int = 1) -> None:
    """Samples reply `number`; every `group` replies share a prompt."""
    prompt = self.tokens(_PROMPT.value, 0, number // group)
    key = request_lib.make_key('bench', number)
    asked = request_lib.Request(
      prompt, None, _REPLY.value, key=key, automata=(self._stop,)
    )
    async with engine.reserve(number // group) as replica:
      await (generation := replica.submit(asked))
      generation.sequence.close()


def sampling(bench: Bench) -> dict[str, Any]:
  """Measures sampling one reply for each of a batch of prompts, host time included."""
  engine = bench.engine()
  run = lambda: engine.run([bench.reply(engine, n) for n in range(_ROWS.value)])
  times = common.timed(_REPEATS.value, run)
  tokens = _ROWS.value * _REPLY.value
  return times | {'tokens_per_second': round(tokens / times['seconds'])}


def row_update(bench: Bench, wanted: str) -> Callable[[], None]:
  """Makes an update on rows of prompt and reply, with an observation in the reply."""
  prompt, reply, B = _PROMPT.value, _REPLY.value, _ROWS.value
  rng, T = np.random.default_rng(0), prompt + reply
  mask = np.ones((B, T), bool)
  mask[:, 0] = False
  if wanted == 'reply':
    mask[:, :prompt] = False
    mask[:, prompt + 40 : prompt + 72] = False
  tokens, advantages = bench.tokens(B * T, 2).reshape(B, T), rng.normal(size=(B, 1))
  batch = common.make_batch(tokens, mask, advantages, bench.config.vocab_size)
  cut = lambda i: jax.tree.map(lambda x: jnp.asarray(x[i : i + _MICROBATCH.value]), batch)
  return make_update(bench, [cut(i) for i in range(0, B, _MICROBATCH.value)])


def make_update(bench: Bench, batches: Sequence[types.Batch]) -> Callable[[], None]:
  """Makes an update on the batches, which changes a copy of the policy."""
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6))
  params = jax.tree.map(jnp.copy, bench.params)
  return common.make_update(bench.config, params, batches, optimizer)


def group_update(bench: Bench) -> Callable[[], None]:
  """Makes a GRPO update on prefix trees, each of a prompt and 8 replies.

  Tokens 40 to 72 of a reply are an observation.
  """
  prompt, reply, rows = _PROMPT.value, _REPLY.value, _ROWS.value
  at = np.arange(prompt + reply) - prompt
  mask = (at >= 0) & ((at < 40) | (at >= 72))
  segments = []
  for n in range(rows):
    text = np.append(bench.tokens(prompt, 0, n // 8), bench.tokens(reply, 1, n))
    segments.append(types.Segment(text, mask, mask * np.log(1 / bench.config.vocab_size)))
  tokens = table.from_segments(segments)
  advantages = np.random.default_rng(0).normal(size=rows)[tokens.trajectory]
  columns = {'advantages': advantages * tokens.action_mask}
  columns['weights'] = tokens.action_mask / tokens.action_mask.sum()
  shape = packing.MicrobatchShape(max(1, _MICROBATCH.value // 4), prompt + 8 * reply)
  batches, _ = packing.pack_microbatches(dataclasses.replace(tokens, **columns), shape)
  return make_update(bench, batches)


def update(bench: Bench) -> dict[str, Any]:
  """Measures a policy-gradient step: clipped loss, clipped gradient norm, AdamW."""
  found = {}
  for wanted in ('reply', 'all'):
    step = row_update(bench, wanted)
    times = common.timed(_REPEATS.value, step)
    tokens = _ROWS.value * (_PROMPT.value + _REPLY.value)
    times['tokens_per_second'] = round(tokens / times['seconds'])
    found |= {f'{wanted}/{name}': value for name, value in times.items()}
  return found


def group_step(bench: Bench) -> dict[str, Any]:
  """Measures a complete GRPO step: 8 samples per prompt, then the update on them."""
  engine, learn = bench.engine(), group_update(bench)

  def step():
    engine.run([bench.reply(engine, n, group=8) for n in range(_ROWS.value)])
    learn()

  return common.timed(_REPEATS.value, step)


MEASUREMENTS: Sequence[Callable[[Bench], dict[str, Any]]] = (sampling, update, group_step)


def main(_):
  runtime.quiet_logging()
  runtime.initialize()
  names = [measure.__name__ for measure in MEASUREMENTS]
  if unknown := set(_WHAT.value) - set(names):
    raise app.UsageError(f'--what: {sorted(unknown)}; there are {names}')
  config = common.SHAPES[_SHAPE.value]
  ops = batch_invariant.INVARIANT if _BATCH_INVARIANT.value else None
  config = dataclasses.replace(config, ops=ops)
  init = jax.jit(decoder.init, static_argnums=0)  # One program, not one per leaf.
  bench = Bench(config, init(config, jax.random.key(0)))
  about = {
    'shape': _SHAPE.value,
    'parameters': sum(x.size for x in jax.tree.leaves(bench.params)),
    'rows': _ROWS.value,
    'replicas': _REPLICAS.value,
    'device': f'{jax.devices()[0].device_kind}, {os.cpu_count()} cores',
    'jax': jax.__version__,
    'python': platform.python_version(),
  }
  for measure in MEASUREMENTS:
    if not _WHAT.value or measure.__name__ in _WHAT.value:
      line = {'measurement': measure.__name__} | about | measure(bench)
      print(json.dumps(line | {'load': round(os.getloadavg()[0], 2)}), flush=True)


if __name__ == '__main__':
  app.run(main)
