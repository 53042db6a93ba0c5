"""Measurements of a part each; see __main__.py."""

import asyncio
from collections.abc import Callable
import dataclasses
import statistics
import time
from typing import Any

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
import optax

from agent_r1_jax import types
from agent_r1_jax.agent import automata
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.models import decoder
from agent_r1_jax.rl import packing, table
from agent_r1_jax.tools import python, sandbox
from experiments.bench import common


def row_update(bench, wanted: str) -> Callable[[], None]:
  """Makes the step on rows of prompt and reply, with an observation in the reply."""
  prompt, reply, B = (getattr(flags.FLAGS, x) for x in ('prompt', 'reply', 'rows'))
  rng, T = np.random.default_rng(0), prompt + reply
  mask = np.ones((B, T), bool)
  mask[:, 0] = False
  if wanted == 'reply':
    mask[:, :prompt] = False
    mask[:, prompt + 40 : prompt + 72] = False
  tokens, advantages = bench.tokens(B * T, 2).reshape(B, T), rng.normal(size=(B, 1))
  batch = common.make_batch(tokens, mask, advantages, bench.config.vocab_size)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6))
  return common.make_update(
    bench.config,
    jax.tree.map(jnp.copy, bench.params),
    common.split_batch(batch, flags.FLAGS.microbatch),
    optimizer,
  )


def group_update(bench, trees: bool) -> tuple[Callable[[], None], int]:
  """Makes a GRPO update on groups of 8 replies to a prompt; returns its tokens too.

  Tokens 40 to 72 of a reply are an observation. Rows hold one text, or a group's tree.
  """
  prompt, reply, rows = (getattr(flags.FLAGS, x) for x in ('prompt', 'reply', 'rows'))
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
  shape = packing.MicrobatchShape(flags.FLAGS.microbatch, prompt + reply, trees=False)
  if trees:
    shape = packing.MicrobatchShape(max(1, shape.rows // 4), prompt + 8 * reply)
  batches, layout = packing.pack_microbatches(
    dataclasses.replace(tokens, **columns), shape
  )
  params = jax.tree.map(jnp.copy, bench.params)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6))
  update = common.make_update(bench.config, params, batches, optimizer)
  return update, layout.computed


def trees(bench) -> dict[str, Any]:
  """The update on groups of 8 replies to a prompt that each reads, or that all share."""
  found: dict[str, Any] = {}
  for name in ('whole', 'trees'):
    update, tokens = group_update(bench, name == 'trees')
    times = common.timed(flags.FLAGS.repeats, update) | {'tokens': tokens}
    found |= {f'{name}/{key}': value for key, value in times.items()}
  for key in ('tokens', 'cpu_seconds'):
    found[f'ratio/{key}'] = round(found[f'trees/{key}'] / found[f'whole/{key}'], 3)
  return found


def grammar(bench) -> dict[str, Any]:
  """Decoding inside a tool call held to its schema over the same without, V = 151,936."""

  def search(query: str, count: int = 5) -> str:
    """Searches.

    Args:
      query: What for.
      count: How many.
    """
    return f'{count} passages of {query}'  # never called: only its schema counts

  V, steps, rows = 151_936, 16, flags.FLAGS.rows
  rng = np.random.default_rng(0)
  words = (bytes(rng.integers(97, 123, n).tolist()) for n in rng.integers(2, 9, V - 256))
  token_bytes = [*(bytes([i]) for i in range(256)), *words]
  start = time.perf_counter()
  schemas = [tool_lib.tool(search).schema]
  calls = automata.tool_calls(schemas, token_bytes, V, required=True)
  found: dict[str, Any] = {'build_seconds': round(time.perf_counter() - start, 2)}
  found['bytes'] = calls.classes.nbytes + calls.table.nbytes
  config = dataclasses.replace(bench.config, vocab_size=V)
  params = decoder.init(config, jax.random.key(0))
  wide = dataclasses.replace(bench, config=config, params=params)
  engine = wide.engine(warm=False, slots=128, decode_steps=steps, narrow=False)
  engine.warm_up(automata=[calls])

  async def reply(n: int, held: bool):
    # A prompt of one token has nothing to prefill.
    prompt, guides = np.array([n], np.int32), [calls] if held else []
    await engine.submit(wide.request(n, prompt, steps, None, *guides))

  seconds: dict[bool, list[float]] = {False: [], True: []}
  for _ in range(2 + 2 * flags.FLAGS.repeats):
    for held in seconds:
      before = engine.stats.decode_seconds
      engine.run([reply(n, held) for n in range(rows)])
      seconds[held].append((engine.stats.decode_seconds - before) / steps)
  # The first of each warms up.
  free, held = (min(seconds[held][1:]) for held in (False, True))
  pairs = [b / a for a, b in zip(seconds[False][1:], seconds[True][1:], strict=True)]
  found['step_milliseconds'] = round(1e3 * free, 2)
  found['step_milliseconds/held'] = round(1e3 * held, 2)
  return found | {'ratio': round(statistics.median(pairs), 4)}


def python_calls(_) -> dict[str, Any]:
  """Calls of the Python tool: the median alone, and how many in a second from four."""
  tool = python.python_tool(sandbox.Sandbox())

  async def ask(n: int) -> list[float]:
    results = [await tool_lib.call(tool, {'code': 'print(6 * 7)'}) for _ in range(n)]
    return [result.seconds for result in results if result.text == '42\n']

  async def ask_side_by_side() -> float:
    start = time.perf_counter()
    answered = await asyncio.gather(*(ask(100) for _ in range(4)))
    return sum(map(len, answered)) / (time.perf_counter() - start)

  asyncio.run(ask(20))  # The first call takes longer.
  alone = statistics.median(asyncio.run(ask(200)))
  rates = [asyncio.run(ask_side_by_side()) for _ in range(flags.FLAGS.repeats)]
  return {'milliseconds': round(1e3 * alone, 2), 'calls_per_second': round(max(rates), 1)}
