"""What named adapters cost a decode: none, and 0, 1 or 4 of four slots in use."""

import dataclasses
import time
from typing import Any

from absl import flags
import jax

from agent_r1_jax.models import families, lora

_SLOTS, _RANK = 4, 16


def adapters(bench) -> dict[str, Any]:
  """A batch of prompts as in `sampling`; rows use the adapters in turn.

  The kinds take turns too, because other work on the machine changes meanwhile.
  """
  adapter = lora.add(bench.params, _RANK, [*families.TARGETS], 16.0, jax.random.key(0))
  engines = {'without': bench.engine()}
  mixed = bench.engine(adapters=_SLOTS, adapter_rank=_RANK)
  for n in range(_SLOTS):
    mixed.set_adapter(str(n), lora.take(adapter))
  engines |= {f'{used}_used': mixed for used in (0, 1, _SLOTS)}
  seconds: dict[str, list[float]] = {kind: [] for kind in engines}
  for _ in range(1 + flags.FLAGS.repeats):
    for kind, engine in engines.items():
      used = int(kind[0]) if kind != 'without' else 0
      begun = time.process_time()
      engine.run([_ask(bench, engine, n, used) for n in range(flags.FLAGS.rows)])
      seconds[kind].append(time.process_time() - begun)
  # The first repetition warms up.
  best = {kind: min(times[1:]) for kind, times in seconds.items()}
  found = {f'{kind}/cpu_seconds': round(x, 3) for kind, x in best.items()}
  return found | {
    f'{kind}/ratio': round(x / best['without'], 3) for kind, x in best.items()
  }


async def _ask(bench, engine, number: int, used: int):
  tokens = bench.tokens(flags.FLAGS.prompt, 0, number)
  request = bench.request(number, tokens, flags.FLAGS.reply)
  name = str(number % used) if used else None
  return await engine.submit(dataclasses.replace(request, adapter=name))
