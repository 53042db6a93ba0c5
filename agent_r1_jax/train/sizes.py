"""Sizes that follow from the device and the model, where a configuration leaves them 0.

`resolve` is what `train` calls: it chooses them, estimates the memory of the run
(memory.py) and refuses what does not fit, before anything is loaded or compiled. A run
that goes on has the sizes that it began with: config.json holds them.
"""

from collections.abc import Mapping
import dataclasses
import json
import math
import os
import pathlib
import sys
from typing import Any

import jax

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields
from agent_r1_jax.host import processes, runtime, sharding
from agent_r1_jax.models import hf_config
from agent_r1_jax.rl import algorithms
from agent_r1_jax.train import memory

FIELDS = config_lib.SIZES
# GB (10^9 bytes) that each accelerator has, or this process on a CPU, in place of what
# is found.
MEMORY_VARIABLE = 'AGENT_R1_MEMORY_GB'
# Tokens that are taken for a prompt, and the most slots that are chosen for a row.
_PROMPT, _MOST_SLOTS = 1024, 8192
# Slots come in multiples of this: the kernels of accelerators want whole tiles.
_TILE = 128
# Most rows of a chip, and most tokens of a micro-batch on one: more bring no speed.
_MOST_ROWS = {'cpu': 128, 'gpu': 256, 'tpu': 256}
_MOST_TOKENS = {'cpu': 8192, 'gpu': 16_384, 'tpu': 16_384}
# The share of memory that is used, with the fewest rows and slots that are chosen for it:
# some room for what the estimate does not know, and none before episodes get too short.
_ROUNDS = ((0.85, 8, 2048), (1.0, 1, 1024))
# Where a device does not say what it has.
_UNKNOWN = 16e9


def resolve(
  config: config_lib.Config,
  algorithm: algorithms.Algorithm | None = None,
  workdir: str | os.PathLike | None = None,
) -> config_lib.Config:
  """The configuration with all sizes, which fit the memory that there is.

  Says in one line on the terminal what they are and what memory is expected.

  Args:
    config: Of the run; a size of 0 is chosen.
    algorithm: None: the policy only plays.
    workdir: Of a run that may go on: sizes that are 0 are those that it began with.

  Raises:
    ValueError: It does not fit; lists the terms and which fields to change.
  """
  runtime.initialize()
  machine, models = find_machine(config.mesh), _read_models(config.model, algorithm)
  given = config
  if workdir is not None:
    config = load_recorded(config, workdir)
  reused = [
    name for name in FIELDS if fields.get(config, name) != fields.get(given, name)
  ]
  config = choose(config, models, machine)
  check(config, models, machine, reused)
  if processes.is_first():
    print(describe(config, models, machine), file=sys.stderr)
  return config


def find_machine(config: config_lib.Mesh) -> memory.Machine:
  """Where this process runs; with several processes, what the least of them has."""
  training, sampling = sharding.split_devices(config.samplers)
  local, platform = jax.local_devices(), jax.default_backend()
  given = os.environ.get(MEMORY_VARIABLE)
  if given is not None:
    found = _parse_memory(given)
  elif platform == 'cpu':
    found = float(runtime.available_memory())
  else:
    stats = [device.memory_stats() or {} for device in local]
    found = float(min(s.get('bytes_limit', _UNKNOWN) for s in stats))
  if platform == 'cpu':
    found /= len(local)  # Its devices share the machine's memory.
  engines = max(1, len(sampling or training) // config.tensor)
  if sampling:
    engines *= jax.process_count()
  cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else 1
  shares = processes.gather([found, max(1, cores // len(local))])
  found, cores = (min(share[i] for share in shares) for i in range(2))
  return memory.Machine(platform, found, len(training), engines, int(cores))


def load_recorded(
  config: config_lib.Config, workdir: str | os.PathLike
) -> config_lib.Config:
  """`config` with the sizes of the run in this workdir where it leaves them 0.

  Raises:
    ValueError: The run is of a version whose fields had other names.
  """
  path = pathlib.Path(workdir) / 'config.json'
  try:
    found = json.loads(path.read_text())
  except (OSError, ValueError, RecursionError):
    return config  # No run yet; or the journal will say what is wrong with the file.
  if not isinstance(found, Mapping):
    return config
  config_lib.refuse_old_file(found, path)
  known = {name: _look_up(found, name) for name in FIELDS if not fields.get(config, name)}
  return fields.replace(
    config, {name: n for name, n in known.items() if type(n) is int and n > 0}
  )


def _look_up(tree: Any, name: str) -> Any:
  """The value of a dotted name in nested mappings, or None."""
  for part in name.split('.'):
    tree = tree.get(part) if isinstance(tree, Mapping) else None
  return tree


def choose(
  config: config_lib.Config, models: memory.Models, machine: memory.Machine
) -> config_lib.Config:
  """`config` with a number for each size that is 0; what is given stays as it is.

  Sizes begin with what is fast. While the estimate is above a share of the machine's
  memory they are halved, first the micro-batch, then rows, then slots; in the end those
  are doubled again of which it was not the fault. Nothing but the arguments counts.
  """
  given = {'microbatch': config.batch.microbatch}
  given |= {'rows': config.engine.rows, 'slots': config.engine.slots}
  free = [name for name, value in given.items() if not value]
  groups = memory.count_splits(config.mesh, machine.chips)[0]
  most = _begin(config, models, machine)
  now = most
  for share, few_rows, few_slots in _ROUNDS:
    least = {'microbatch': groups, 'rows': few_rows, 'slots': few_slots}

    def fits(sizes: dict[str, int], limit: float = share * machine.memory) -> bool:
      filled = _fill(config, machine, **sizes)
      return memory.estimate(filled, models, machine).peak <= limit

    for name in free:
      while now[name] // 2 >= least[name] and not fits(now):
        half = now[name] // 2
        now = now | {
          name: _round_up(half, _step(config.mesh)) if name == 'slots' else half
        }
    if fits(now):
      for name in ('rows', 'microbatch'):
        while now[name] < most[name] and fits(now | {name: 2 * now[name]}):
          now = now | {name: 2 * now[name]}
      break
  return _fill(config, machine, **now)


def check(
  config: config_lib.Config,
  models: memory.Models,
  machine: memory.Machine,
  reused: list[str] | None = None,
) -> None:
  """Refuses what does not fit.

  Args:
    config: With all sizes chosen.
    models: What is loaded.
    machine: Where.
    reused: Sizes that are those of the run that goes on.

  Raises:
    ValueError: With the terms in GB and the fields to change.
  """
  found = memory.estimate(config, models, machine)
  if found.peak <= machine.memory:
    return
  changes, enough = memory.suggest_changes(config, models, machine)
  named = ', '.join(f'{name}={value}' for name, value in changes.items())
  mend = f'Lower it with {named}'
  if not enough:
    mend = 'No setting makes it fit: take a smaller model, or more chips (mesh.fsdp)'
  if machine.platform == 'gpu' and found.peak < 0.95 / 0.75 * machine.memory:
    # JAX takes three quarters of a GPU if it is not told otherwise.
    mend += ', or let JAX have more of the GPU (XLA_PYTHON_CLIENT_MEM_FRACTION=.95)'
  whence = ''
  if reused:
    whence = (
      f' {", ".join(reused)} are those that this run began with (config.json); give '
      'others in another workdir.'
    )
  where = 'this process' if machine.platform == 'cpu' else 'each chip'
  raise ValueError(
    f'memory: this run is estimated to take {found.peak / memory.GB:.1f} GB '
    f'({found.largest}), and {where} has {machine.memory / memory.GB:.1f} GB:\n'
    f'{found.table()}\n{mend}.{whence} {MEMORY_VARIABLE} says that there is more or '
    'less.'
  )


def describe(
  config: config_lib.Config, models: memory.Models, machine: memory.Machine
) -> str:
  """One line: the sizes, and the memory that is expected."""
  found = memory.estimate(config, models, machine)
  chosen = ' '.join(f'{name}={fields.get(config, name)}' for name in FIELDS)
  return (
    f'sizes: {chosen}; estimated peak {found.peak / memory.GB:.1f} GB ({found.largest}) '
    f'of {machine.memory / memory.GB:.1f} GB'
  )


def _read_models(config: config_lib.Model, algorithm) -> memory.Models:
  """Shapes from the directories' config.json; no weights are read."""
  if not config.path:
    raise ValueError(
      'model.path is empty; give the directory of a model in Hugging Face layout.'
    )
  looks = {'dtype': config.dtype, 'remat': config.remat}
  policy = dataclasses.replace(hf_config.read(config.path), **looks)
  if algorithm is None:
    return memory.Models(policy)
  reference = hf_config.read(config.reference) if config.reference else None
  raw = hf_config.read_json(pathlib.Path(config.path) / 'config.json')
  shared = bool(raw.get('value_head'))
  return memory.Models(policy, algorithm, reference, shared)


def _begin(config, models, machine) -> dict[str, int]:
  """The sizes that are chosen where memory is no matter."""
  groups = memory.count_splits(config.mesh, machine.chips)[0]
  slots = config.engine.slots or _choose_slots(config, models)
  tokens = (config.batch.row_tokens or slots) / config.mesh.context
  each = _power_of_two(max(1, int(_MOST_TOKENS[machine.platform] / tokens)))
  return {
    'slots': slots,
    'rows': config.engine.rows or _choose_rows(config, machine),
    'microbatch': config.batch.microbatch or groups * each,
  }


def _fill(config, machine, *, slots: int, rows: int, microbatch: int):
  """`config` with these sizes, and with those that follow from them."""
  given = config.engine
  if not given.rows:
    rows = _round_up(rows, given.replicas or 1)
  engine = dataclasses.replace(
    given,
    slots=slots,
    rows=rows,
    feed_rows=given.feed_rows or min(16, rows),
    feed_tokens=given.feed_tokens or 128,
    bucket=given.bucket or min(slots, max(256, _power_of_two(max(1, slots // 8)))),
    replicas=given.replicas or _choose_replicas(config, rows, machine),
  )
  batch = config_lib.Batch(config.batch.row_tokens or slots, microbatch)
  return dataclasses.replace(config, engine=engine, batch=batch)


def _choose_slots(config, models) -> int:
  """What the longest episode takes, if that is not too much."""
  step = _step(config.mesh)
  turn = config.limits.max_turn_tokens + config.chat.max_tool_tokens
  episode = _round_up(_PROMPT + config.limits.max_turns * turn, step)
  most = min(_MOST_SLOTS, models.policy.max_positions, config.batch.row_tokens or episode)
  return min(episode, max(1, most // step) * step, most)


def _choose_rows(config, machine) -> int:
  """As many as there are episodes for each engine."""
  episodes = -(-config.schedule.tasks * config.schedule.samples // machine.engines)
  most = _MOST_ROWS[machine.platform]
  return min(most, 1 << (episodes - 1).bit_length())


def _choose_replicas(config, rows, machine) -> int:
  """One a core of a CPU, if each has a few rows; elsewhere one a chip."""
  if machine.platform != 'cpu' or config.mesh.tensor > 1:
    return 1
  width = min(config.engine.width or rows, rows)
  most = min(machine.cores, rows // 8)
  return next((n for n in range(most, 1, -1) if rows % n == 0 and width % n == 0), 1)


def _step(mesh: config_lib.Mesh) -> int:
  """What slots, and so the tokens of a training row, are multiples of."""
  return math.lcm(_TILE, mesh.context)


def _round_up(n: int, step: int) -> int:
  return -(-n // step) * step


def _power_of_two(n: int) -> int:
  """The largest that is at most n."""
  return 1 << (n.bit_length() - 1)


def _parse_memory(text: str) -> float:
  try:
    found = float(text) * memory.GB
  except ValueError:
    found = 0.0
  if not found > 0:
    raise ValueError(f'{MEMORY_VARIABLE} is {text!r}; give a number of GB above 0.')
  return found
