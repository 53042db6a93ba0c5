"""What engine and learner do in a second: one JSON line for each measurement.

  python -m experiments.bench                        # all of MEASUREMENTS, shape s5
  python -m experiments.bench --shape=s25 --what=sampling,update,group_step

On 2 CPU cores all of it takes 12 minutes with s5. Compile time is apart; seconds are the
best and the median repetition's, cpu_seconds the least. docs/results has more.
"""

import asyncio
from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
import json
import os
import platform
import statistics
import time
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
_SEGMENTS = flags.DEFINE_integer('segments', 24, 'Segments of a speed of tools.')
_LATENCIES = flags.DEFINE_list('latencies', ['0.2', '1', '5'], 'Seconds of tools.')


_FOUR_TURNS: dict[str, Any] = {'group': 8, 'turns': 4, 'reply': 32, 'answer': 64}


@dataclasses.dataclass
class Bench:
  """A policy of one shape."""

  config: decoder.DecoderConfig
  params: decoder.Params

  def engine(self, *, warm: bool = True, **kwargs) -> engine_lib.Engine:
    """Makes an engine that holds some texts of a prompt and a reply."""
    sizes: dict[str, Any] = {
      'rows': _ROWS.value,
      'slots': _PROMPT.value + _REPLY.value,
      'decode_steps': 32,
      'prefill_rows': 32,
      'prefill_tokens': 64,
      'bucket': 128,
      'replicas': _REPLICAS.value,
    }
    engine = engine_lib.Engine(self.config, self.params, **sizes | kwargs)
    if warm:
      engine.warm_up()
    return engine

  @functools.cached_property
  def _stop(self) -> types.Automaton:
    """Costs what stop ids cost, and ends no reply: they end at their budget."""
    return automata.stop([], self.config.vocab_size)

  def request(self, number: int, tokens, most: int, parent=None, *guides):
    """Asks for `most` tokens after these; the number says which randomness."""
    key, guides = request_lib.make_key('bench', number), (self._stop, *guides)
    return request_lib.Request(tokens, parent, most, key=key, automata=guides)

  def tokens(self, n: int, *seed: int) -> np.ndarray:
    """n random tokens."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, self.config.vocab_size, n).astype(np.int32)


async def talk(
  bench: Bench,
  engine: engine_lib.Engine,
  number: int,
  *,
  group: int = 1,
  turns: int = 1,
  reply: int | None = None,
  answer: int = 32,
  latency: Callable[[int, int], float] | None = None,
  step: asyncio.Barrier | None = None,
  again: bool = False,
) -> int:
  """Plays one episode, and returns how many tokens are its own.

  Args:
    bench: Gives the prompts and the answers.
    engine: Samples the replies.
    number: The episode's number; `group` of them share a prompt.
    group: Episodes of one prompt.
    turns: Replies.
    reply: Tokens of a reply.
    answer: Tokens of a tool's answer.
    latency: The tool's latency in seconds, by episode and turn; the last reply calls
      none.
    step: Where all wait for all after each turn.
    again: Whether each turn prefills the whole history, as the peers do. Its first token
      is another one each time: the engine would find what it holds of it.
  """
  reply = reply or _REPLY.value
  text = bench.tokens(_PROMPT.value, 0, number // group)
  held: request_lib.Text | None = None
  async with engine.reserve(number // group) as replica:
    new = text
    for turn in range(turns):
      asked = bench.request(number, text if again else new, reply, held)
      said = await (generation := replica.submit(asked))
      if latency and turn < turns - 1:
        await asyncio.sleep(latency(number, turn))
      if step:
        await step.wait()
      new = bench.tokens(answer, 1, number, turn)
      if again:
        generation.text.close()
        text = np.concatenate([text, said.tokens, new])
        text[0] = (number * turns + turn) % bench.config.vocab_size
      else:
        held = generation.text
    if held:
      held.close()
  return turns * reply + (turns - 1) * answer


def sampling(bench: Bench) -> dict[str, Any]:
  """A batch of prompts, each with a prompt of its own; host time included."""
  engine = bench.engine()
  run = lambda: engine.run([talk(bench, engine, n) for n in range(_ROWS.value)])
  times = common.timed(_REPEATS.value, run)
  tokens = _ROWS.value * _REPLY.value
  return times | {'tokens_per_second': round(tokens / times['seconds'])}


def row_update(bench: Bench, wanted: str) -> Callable[[], None]:
  """Makes the step on rows of prompt and reply, with an observation in the reply."""
  prompt, reply, B = _PROMPT.value, _REPLY.value, _ROWS.value
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
    common.split_batch(batch, _MICROBATCH.value),
    optimizer,
  )


def group_update(bench: Bench, trees: bool) -> tuple[Callable[[], None], int]:
  """Makes a GRPO update on groups of 8 replies to a prompt; returns its tokens too.

  Tokens 40 to 72 of a reply are an observation. Rows hold one text, or a group's tree.
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
  shape = packing.MicrobatchShape(_MICROBATCH.value, prompt + reply, trees=False)
  if trees:
    shape = packing.MicrobatchShape(max(1, shape.rows // 4), prompt + 8 * reply)
  batches, layout = packing.pack_microbatches(
    dataclasses.replace(tokens, **columns), shape
  )
  params = jax.tree.map(jnp.copy, bench.params)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6))
  update = common.make_update(bench.config, params, batches, optimizer)
  return update, layout.computed


def update(bench: Bench) -> dict[str, Any]:
  """A policy-gradient step: clipped loss, gradient norm clipped, AdamW."""
  found = {}
  for wanted in ('reply', 'all'):
    step = row_update(bench, wanted)
    times = common.timed(_REPEATS.value, step)
    tokens = _ROWS.value * (_PROMPT.value + _REPLY.value)
    times['tokens_per_second'] = round(tokens / times['seconds'])
    found |= {f'{wanted}/{name}': value for name, value in times.items()}
  return found


def trees(bench: Bench) -> dict[str, Any]:
  """The update on groups of 8 replies to a prompt that each reads, or that all share."""
  found: dict[str, Any] = {}
  for name in ('whole', 'trees'):
    update, tokens = group_update(bench, name == 'trees')
    times = common.timed(_REPEATS.value, update) | {'tokens': tokens}
    found |= {f'{name}/{key}': value for key, value in times.items()}
  for key in ('tokens', 'cpu_seconds'):
    found[f'ratio/{key}'] = round(found[f'trees/{key}'] / found[f'whole/{key}'], 3)
  return found


def group_step(bench: Bench) -> dict[str, Any]:
  """A whole GRPO step: 8 samples of each prompt, then the update on them."""
  engine, (learn, _) = bench.engine(), group_update(bench, trees=True)

  def step():
    engine.run([talk(bench, engine, n, group=8) for n in range(_ROWS.value)])
    learn()

  return common.timed(_REPEATS.value, step)


def multi_turn(bench: Bench) -> dict[str, Any]:
  """4 turns of 8 samples a task; and the same engine if it prefills every turn anew."""
  found = {}
  learn = row_update(bench, 'reply')
  slots = _PROMPT.value + 4 * 32 + 3 * 64
  for name, again in (('kept', False), ('prefilled', True)):
    engine = bench.engine(slots=slots)

    def step(engine=engine, again=again):
      ask = lambda n: talk(bench, engine, n, again=again, **_FOUR_TURNS)
      engine.run([ask(n) for n in range(_ROWS.value)])

    times = common.timed(_REPEATS.value, step)
    found |= {f'{name}/{key}': value for key, value in times.items()}
  found['ratio'] = round(found['kept/seconds'] / found['prefilled/seconds'], 3)
  found['update_seconds'] = common.timed(_REPEATS.value, learn)['seconds']
  return found


def no_work_twice(bench: Bench) -> dict[str, Any]:
  """Tokens computed by prefills and decodes over the distinct ones of the episodes."""
  engine = bench.engine(slots=_PROMPT.value + 4 * 32 + 3 * 64, rows=_ROWS.value // 2)
  own = engine.run([talk(bench, engine, n, **_FOUR_TURNS) for n in range(_ROWS.value)])
  distinct = sum(own) + _ROWS.value // 8 * _PROMPT.value
  stats = engine.stats
  return {
    'prefilled': stats.prefilled,
    'sampled': stats.sampled,
    'shared': stats.shared,
    'distinct': distinct,
    'ratio': round((stats.prefilled + stats.sampled) / distinct, 4),
  }


def tools(bench: Bench) -> dict[str, Any]:
  """Tokens a second with slow tools over those with fast ones; lock-step beside it.

  Twice as many episodes and rows as are decoded at a time, whose latencies are
  exponential. Another begins where one ends, so that they stay as many; the first have 1
  to 4 turns, so that long and short texts are mixed as they are in the midst of a run. Of
  all segments the first third is not counted.
  """
  rows, turns, reply, steps = 2 * _ROWS.value, 4, 64, 32
  slots = _PROMPT.value + turns * reply + turns * 32
  engine = bench.engine(rows=rows, width=_ROWS.value, slots=slots, decode_steps=steps)
  last = _SEGMENTS.value * _ROWS.value * steps
  first = last // 3

  async def play(latency: float, lock_step: bool) -> float:
    draw = lambda *of: latency * np.random.default_rng(of).exponential()
    step = asyncio.Barrier(rows) if lock_step else None
    numbers, begun = itertools.count(), engine.stats.sampled
    options = {'reply': reply, 'step': step, 'latency': draw}

    async def episodes(first_turns: int):
      await talk(bench, engine, next(numbers), turns=first_turns, **options)
      while True:
        await talk(bench, engine, next(numbers), turns=turns, **options)

    async def passed(tokens: int) -> tuple[int, float]:
      while (sampled := engine.stats.sampled - begun) < tokens:
        await asyncio.sleep(0.002)
      return sampled, time.perf_counter()

    async with asyncio.TaskGroup() as group:
      players = [group.create_task(episodes(1 + n % turns)) for n in range(rows)]
      (before, start), (after, end) = await passed(first), await passed(last)
      for player in players:
        player.cancel()
    return (after - before) / (end - start)

  def speed(latency: float, lock_step: bool = False) -> float:
    return engine.run([play(latency, lock_step)])[0]

  latencies = list(map(float, _LATENCIES.value))
  # Other work on the machine may change during the minutes that this takes.
  fast = [speed(0) for _ in range(_REPEATS.value)]
  ours = [speed(latency) for latency in latencies]
  fast += [speed(0) for _ in range(_REPEATS.value)]
  lock_step = [speed(latency, True) for latency in (0.0, *latencies)]
  mean = statistics.mean(fast)
  found: dict[str, Any] = {'tokens_per_second': [round(x, 1) for x in fast]}
  cells = zip([0.0, *latencies], [mean, *ours], lock_step, strict=True)
  for latency, *speeds in cells:
    for name, x in zip(('', '/lock_step'), speeds, strict=True):
      found[f'{latency:g}s{name}'] = round(x / mean, 3)
  return found


def programs(bench: Bench) -> dict[str, Any]:
  """Compilations of the warm-up, and of ragged episodes after it."""
  compiled: list[float] = []

  def on_duration(event: str, duration: float, **_: Any):
    if event == '/jax/core/compile/backend_compile_duration':
      compiled.append(duration)

  listener: Any = on_duration
  jax.monitoring.register_event_duration_secs_listener(listener)
  slots = _PROMPT.value + 8 * 60
  engine = bench.engine(slots=slots, prefill_tokens=63, warm=False)
  compiled.clear()
  start = time.perf_counter()
  engine.warm_up()
  found: dict[str, Any] = {
    'programs': engine.sizes.programs,
    'compiled_by_warm_up': len(compiled),
  }
  found['warm_up_seconds'] = round(time.perf_counter() - start, 2)
  compiled.clear()
  lengths = np.random.default_rng(0).integers(1, 60, size=(3 * _ROWS.value, 2))
  engine.run(
    [
      talk(bench, engine, n, turns=4, reply=int(a), answer=int(b))
      for n, (a, b) in enumerate(lengths)
    ]
  )
  return found | {'compiled_by_ragged_episodes': len(compiled)}


MEASUREMENTS: Sequence[Callable[[Bench], dict[str, Any]]] = (
  sampling,
  update,
  trees,
  group_step,
  multi_turn,
  no_work_twice,
  tools,
  programs,
)


def main(_):
  runtime.quiet_logging()
  runtime.initialize()
  names = [measure.__name__ for measure in MEASUREMENTS]
  if unknown := set(_WHAT.value) - set(names):
    raise app.UsageError(f'--what: {sorted(unknown)}; there are {names}')
  config = common.SHAPES[_SHAPE.value]
  ops = batch_invariant.INVARIANT if _BATCH_INVARIANT.value else None
  config = dataclasses.replace(config, ops=ops)
  bench = Bench(config, decoder.init(config, jax.random.key(0)))
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
