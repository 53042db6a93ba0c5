"""The fastest sizes, whatever the memory; sizes.py halves them until they fit."""

import dataclasses
import math

from agent_r1_jax import config as config_lib
from agent_r1_jax.train import footprint as footprint_lib

# The assumed tokens of a prompt, and the most slots that are chosen.
_PROMPT, _MOST_SLOTS = 1024, 8192
# Slots come in multiples of this: the kernels of accelerators read tiles of this many.
_TILE = 128
# The most rows of an engine, and tokens of a micro-batch on one chip: more are no faster,
# and on a CPU their activations no longer fit its caches.
_MOST_ROWS = {'cpu': 128, 'gpu': 256, 'tpu': 256}
_MOST_TOKENS = {'cpu': 2048, 'gpu': 16_384, 'tpu': 16_384}
# Rows and tokens of one prefill. The answer of a tool is short: on a CPU the padding of a
# longer chunk costs time, on an accelerator reading the weights takes longer anyway.
_PREFILL_SHAPES = {'cpu': (32, 32), 'gpu': (16, 128), 'tpu': (16, 128)}
# The least slots that a cache read covers; smaller reads are more programs to compile.
_LEAST_BUCKET = {'cpu': 128, 'gpu': 256, 'tpu': 256}


def choose(
  config: config_lib.Config, models: footprint_lib.Models, machine: footprint_lib.Machine
) -> dict[str, int]:
  """Returns the sizes that are chosen if they fit the memory."""
  groups = config.mesh.count_groups(machine.chips)
  slots = config.engine.slots or _choose_slots(config, models)
  tokens = (config.batch.row_tokens or slots) / config.mesh.context
  each = _power_of_two(max(1, int(_MOST_TOKENS[machine.platform] / tokens)))
  return {
    'slots': slots,
    'rows': config.engine.rows or _choose_rows(config, machine),
    'microbatch': config.batch.microbatch or groups * each,
  }


def fill(
  config: config_lib.Config,
  machine: footprint_lib.Machine,
  *,
  slots: int,
  rows: int,
  microbatch: int,
) -> config_lib.Config:
  """Returns `config` with these sizes, and with those that follow from them."""
  sizes = config.engine
  if not sizes.rows:
    rows = round_up(rows, sizes.replicas or 1)
  prefill_rows, prefill_tokens = _PREFILL_SHAPES[machine.platform]
  bucket = max(_LEAST_BUCKET[machine.platform], _power_of_two(max(1, slots // 8)))
  engine = dataclasses.replace(
    sizes,
    slots=slots,
    rows=rows,
    prefill_rows=sizes.prefill_rows or min(prefill_rows, rows),
    prefill_tokens=sizes.prefill_tokens or prefill_tokens,
    bucket=sizes.bucket or min(slots, bucket),
    replicas=sizes.replicas or _choose_replicas(config, rows, machine),
  )
  batch = config_lib.Batch(config.batch.row_tokens or slots, microbatch)
  return dataclasses.replace(config, engine=engine, batch=batch)


def _choose_slots(config, models) -> int:
  """Returns the slots that the longest episode needs, up to _MOST_SLOTS."""
  step = slot_multiple(config.mesh)
  turn = config.limits.max_turn_tokens + config.chat.max_tool_tokens
  episode = round_up(_PROMPT + config.limits.max_turns * turn, step)
  most = min(_MOST_SLOTS, models.policy.max_positions, config.batch.row_tokens or episode)
  return min(episode, max(1, most // step) * step, most)


def _choose_rows(config, machine) -> int:
  """Returns a row for each of an engine's episodes of a rollout, up to _MOST_ROWS."""
  episodes = -(-config.schedule.tasks * config.schedule.samples // machine.engines)
  most = _MOST_ROWS[machine.platform]
  return min(most, 1 << (episodes - 1).bit_length())


def _choose_replicas(config, rows, machine) -> int:
  """Returns one replica per core of a CPU, if each gets 8 rows; else one per chip."""
  if machine.platform != 'cpu' or config.mesh.tensor > 1:
    return 1
  width = min(config.engine.width or rows, rows)
  most = min(machine.cores, rows // 8)
  return next((n for n in range(most, 1, -1) if rows % n == 0 and width % n == 0), 1)


def slot_multiple(mesh: config_lib.Mesh) -> int:
  """Returns the number that slots, and so the tokens of a row, are a multiple of."""
  return math.lcm(_TILE, mesh.context)


def round_up(n: int, step: int) -> int:
  """Returns the smallest multiple of `step` that is at least n."""
  return -(-n // step) * step


def _power_of_two(n: int) -> int:
  """Returns the largest power of two that is at most n."""
  return 1 << (n.bit_length() - 1)
