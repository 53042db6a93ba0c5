"""Chooses sizes that are 0, and what is recomputed, by the device and the model.

`resolve` chooses them, estimates the memory of the run (memory.py) and raises if it does
not fit, before anything is loaded or compiled. A run that is resumed takes the sizes that
it began with from its config.json.
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
from agent_r1_jax.checks import memory
from agent_r1_jax.host import processes, runtime
from agent_r1_jax.models import hf_config, sharding
from agent_r1_jax.rl import algorithms

FIELDS, REMAT = config_lib.SIZES, 'model.remat'
# Names an environment variable: GB (10^9 bytes) of each accelerator, or of the process.
MEMORY_VARIABLE = 'AGENT_R1_MEMORY_GB'
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
# (share of the memory, fewest rows, fewest slots): the first round leaves a margin for
# the errors of the estimate; the second uses all memory before it shortens episodes.
_ROUNDS = ((0.85, 8, 2048), (1.0, 1, 1024))
# The assumed bytes of a device that does not report its memory.
_UNKNOWN = 16e9


def resolve(
  config: config_lib.Config,
  algorithm: algorithms.Algorithm | None = None,
  workdir: str | os.PathLike | None = None,
) -> config_lib.Config:
  """Returns the configuration with all sizes chosen, and prints them in one line.

  Args:
    config: The run's configuration; sizes of 0 are chosen.
    algorithm: The run's algorithm; None if the policy only plays.
    workdir: The run's directory; if the run is resumed, sizes that are 0 are those that
      it began with.

  Raises:
    ValueError: The run does not fit the memory; the message has the terms and the fields
      to change. Or its rows cannot be split over the mesh.
  """
  runtime.initialize()
  machine, models = find_machine(config.mesh), read_models(config.model, algorithm)
  unresolved = config
  if workdir is not None:
    config = load_recorded(config, workdir)
  reused = [
    name
    for name in (*FIELDS, REMAT)
    if fields.get(config, name) != fields.get(unresolved, name)
  ]
  config = choose(config, models, machine)
  _check_split(config, machine)
  check(config, models, machine, reused)
  if processes.is_first():
    print(describe(config, models, machine), file=sys.stderr)
  return config


def find_machine(config: config_lib.Mesh) -> memory.Machine:
  """Finds platform, memory and chips; memory is the least over all processes."""
  training, sampling = sharding.split_devices(config.samplers)
  local, platform = jax.local_devices(), jax.default_backend()
  gigabytes = os.environ.get(MEMORY_VARIABLE)
  if gigabytes is not None:
    available = _parse_memory(gigabytes)
  elif platform == 'cpu':
    available = float(runtime.available_memory())
  else:
    stats = [device.memory_stats() or {} for device in local]
    available = float(min(s.get('bytes_limit', _UNKNOWN) for s in stats))
  if platform == 'cpu':
    available /= len(local)  # Its devices share the machine's memory.
  engines = max(1, len(sampling or training) // config.tensor)
  if sampling:
    engines *= jax.process_count()
  cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else 1
  shares = processes.gather([available, max(1, cores // len(local))])
  available, cores = (min(share[i] for share in shares) for i in range(2))
  return memory.Machine(platform, available, len(training), engines, int(cores))


def load_recorded(
  config: config_lib.Config, workdir: str | os.PathLike
) -> config_lib.Config:
  """Returns `config` with sizes of 0 replaced by those of the run in this workdir."""
  path = pathlib.Path(workdir) / 'config.json'
  try:
    recorded = json.loads(path.read_text())
  except (OSError, ValueError, RecursionError):
    return config  # No run yet; or the journal will raise an error that names the file.
  if not isinstance(recorded, Mapping):
    return config
  names = (*FIELDS, REMAT)
  known = {n: _look_up(recorded, n) for n in names if not fields.get(config, n)}
  sound = lambda n, x: isinstance(x, str) if n == REMAT else type(x) is int and x > 0
  return fields.replace(config, {n: x for n, x in known.items() if sound(n, x)})


def _look_up(tree: Any, name: str) -> Any:
  """Returns the value of a dotted name in nested mappings, or None."""
  for part in name.split('.'):
    tree = tree.get(part) if isinstance(tree, Mapping) else None
  return tree


def choose(
  config: config_lib.Config, models: memory.Models, machine: memory.Machine
) -> config_lib.Config:
  """Returns `config` with a number for each size that is 0, and with a `model.remat`.

  Other sizes are not changed. Activations are recomputed, which costs a third of a
  gradient's time, only if rows or slots would have to be smaller without it, or if the
  run would not fit.
  """
  given = config.model.remat or ('none' if models.algorithm is None else '')
  none, full = (
    _choose_sizes(fields.replace(config, {REMAT: given or remat}), models, machine)
    for remat in ('none', 'full')
  )
  peak = lambda config: memory.estimate(config, models, machine).peak
  sizes = lambda config: (config.engine.rows, config.engine.slots)
  short = peak(none) > _ROUNDS[0][0] * machine.memory or sizes(none) != sizes(full)
  # With the layers unrolled, on a CPU, it would save nothing.
  saves = peak(fields.replace(none, {REMAT: 'full'})) < peak(none)
  return full if short and saves else none


def _choose_sizes(
  config: config_lib.Config, models: memory.Models, machine: memory.Machine
) -> config_lib.Config:
  """Returns `config` with a number for each size that is 0.

  Begins with the fastest sizes. While the estimate is above a share of the machine's
  memory they are halved, first the micro-batch, then rows, then slots; in the end rows
  and micro-batch are doubled again while they fit.
  """
  requested = {'microbatch': config.batch.microbatch}
  requested |= {'rows': config.engine.rows, 'slots': config.engine.slots}
  free = [name for name, value in requested.items() if not value]
  groups = memory.count_splits(config.mesh, machine.chips)[0]
  multiples = {'microbatch': 1, 'rows': 1, 'slots': _slot_multiple(config.mesh)}
  fastest = _choose_fastest(config, models, machine)
  sizes = dict(fastest)

  def peak(sizes: dict[str, int]) -> float:
    return memory.estimate(_fill(config, machine, **sizes), models, machine).peak

  for share, fewest_rows, fewest_slots in _ROUNDS:
    limit = share * machine.memory
    least = {'microbatch': groups, 'rows': fewest_rows, 'slots': fewest_slots}
    # In the order of `free`: halving the first ones costs the least speed.
    for name in free:
      while sizes[name] // 2 >= least[name] and peak(sizes) > limit:
        sizes[name] = _round_up(sizes[name] // 2, multiples[name])
    if peak(sizes) > limit:
      continue
    # Since slots were halved last, more rows or micro-batch rows may fit again.
    for name in ('rows', 'microbatch'):
      doubled = sizes | {name: 2 * sizes[name]}
      while sizes[name] < fastest[name] and peak(doubled) <= limit:
        sizes, doubled = doubled, doubled | {name: 2 * doubled[name]}
    break
  return _fill(config, machine, **sizes)


def check(
  config: config_lib.Config,
  models: memory.Models,
  machine: memory.Machine,
  reused: list[str] | None = None,
) -> None:
  """Checks that the run, with all sizes chosen, fits the memory.

  `reused` names the sizes that a resumed run took from its config.json.

  Raises:
    ValueError: It does not; the message has the terms in GB and the fields to change.
  """
  estimate = memory.estimate(config, models, machine)
  if estimate.peak <= machine.memory:
    return
  changes, enough = suggest_changes(config, models, machine)
  named = ', '.join(f'{name}={value}' for name, value in changes.items())
  remedy = f'Lower it with {named}'
  if not enough:
    remedy = 'No setting makes it fit: take a smaller model, or more chips (mesh.fsdp)'
  if machine.platform == 'gpu' and estimate.peak < 0.95 / 0.75 * machine.memory:
    # By default JAX allocates three quarters of a GPU's memory.
    remedy += ', or let JAX have more of the GPU (XLA_PYTHON_CLIENT_MEM_FRACTION=.95)'
  origin = ''
  if reused:
    origin = (
      f' {", ".join(reused)} are those that this run began with (config.json); give '
      'others in another workdir.'
    )
  where = 'this process' if machine.platform == 'cpu' else 'each chip'
  raise ValueError(
    f'memory: this run is estimated to take {estimate.peak / memory.GB:.1f} GB '
    f'({estimate.largest}), and {where} has {machine.memory / memory.GB:.1f} GB:\n'
    f'{estimate.table()}\n{remedy}.{origin} {MEMORY_VARIABLE} says that there is more or '
    'less.'
  )


def suggest_changes(
  config: config_lib.Config, models: memory.Models, machine: memory.Machine
) -> tuple[dict[str, object], bool]:
  """Finds changes of fields with which the run fits.

  Changes are tried one after the other; those that are not needed are left out.

  Returns:
    The new values by field, and whether the run then fits.
  """
  groups = memory.count_splits(config.mesh, machine.chips)[0]
  candidates: list[tuple[str, object]] = []
  if models.algorithm is not None:
    halves = [config.batch.microbatch >> i for i in range(1, 16)]
    candidates += [
      ('batch.microbatch', n) for n in halves if n >= groups and n % groups == 0
    ]
    candidates += [('model.remat', 'full'), ('optimizer.kind', 'adamw8')]
    candidates += [('optimizer.offload', True)] if machine.platform != 'cpu' else []
  rows = _halves('engine.rows', config.engine.rows, 1)
  candidates += [change for change in rows if change[1] % config.engine.replicas == 0]
  candidates += _halves('engine.slots', config.engine.slots, 256)
  if models.algorithm is not None:
    candidates += [('batch.microbatch', groups), ('model.lora_rank', 16)]

  def peak(changes: dict[str, object]) -> float:
    other = fields.replace(config, changes)
    if 'engine.slots' in changes:
      other.batch.row_tokens = other.engine.slots
    return memory.estimate(other, models, machine).peak

  changes: dict[str, object] = {}
  # One after the other, because a change may save less when others have been made.
  for name, value in candidates:
    if peak(changes) > machine.memory and peak(changes | {name: value}) < peak(changes):
      changes[name] = value
  enough = peak(changes) <= machine.memory
  # With a later change, an earlier one may not be needed.
  for name in list(changes):
    fewer = {key: value for key, value in changes.items() if key != name}
    if enough and peak(fewer) <= machine.memory:
      changes = fewer
  return changes, enough


def _halves(name: str, value: int, least: int) -> list[tuple[str, int]]:
  return [(name, n) for i in range(1, 16) if (n := value >> i) >= least]


def describe(
  config: config_lib.Config, models: memory.Models, machine: memory.Machine
) -> str:
  """Returns a line with the sizes and the estimated memory."""
  estimate = memory.estimate(config, models, machine)
  names = FIELDS if models.algorithm is None else (*FIELDS, REMAT)
  chosen = ' '.join(f'{name}={fields.get(config, name)}' for name in names)
  return (
    f'sizes: {chosen}; estimated peak {estimate.peak / memory.GB:.1f} GB '
    f'({estimate.largest}) of {machine.memory / memory.GB:.1f} GB'
  )


def _check_split(config: config_lib.Config, machine: memory.Machine) -> None:
  """Raises ValueError if training rows cannot be split over the mesh."""
  groups = memory.count_splits(config.mesh, machine.chips)[0]
  context = config.mesh.context
  if config.batch.microbatch % groups:
    raise ValueError(
      f'batch.microbatch is {config.batch.microbatch}, yet its rows lie on {groups} '
      'groups of chips (data x fsdp): make it a multiple of that.'
    )
  if config.batch.row_tokens % context:
    raise ValueError(
      f'a training row has {config.batch.row_tokens} tokens (batch.row_tokens, or '
      f'engine.slots), which mesh.context = {context} must divide.'
    )


def read_models(config: config_lib.Model, algorithm) -> memory.Models:
  """Reads the models' shapes from config.json; no weights are read."""
  if not config.path:
    raise ValueError(
      'model.path is empty; give the directory of a model in Hugging Face layout.'
    )
  policy = hf_config.read(config.path)
  policy = dataclasses.replace(policy, dtype=config.dtype)
  if algorithm is None:
    return memory.Models(policy)
  reference = hf_config.read(config.reference) if config.reference else None
  raw = hf_config.read_json(pathlib.Path(config.path) / 'config.json')
  return memory.Models(policy, algorithm, reference, bool(raw.get('value_head')))


def _choose_fastest(config, models, machine) -> dict[str, int]:
  """Returns the sizes that are chosen if they fit the memory."""
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
  """Returns `config` with these sizes, and with those that follow from them."""
  sizes = config.engine
  if not sizes.rows:
    rows = _round_up(rows, sizes.replicas or 1)
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
  step = _slot_multiple(config.mesh)
  turn = config.limits.max_turn_tokens + config.chat.max_tool_tokens
  episode = _round_up(_PROMPT + config.limits.max_turns * turn, step)
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


def _slot_multiple(mesh: config_lib.Mesh) -> int:
  """Returns the number that slots, and so the tokens of a row, are a multiple of."""
  return math.lcm(_TILE, mesh.context)


def _round_up(n: int, step: int) -> int:
  return -(-n // step) * step


def _power_of_two(n: int) -> int:
  """Returns the largest power of two that is at most n."""
  return 1 << (n.bit_length() - 1)


def _parse_memory(text: str) -> float:
  try:
    size = float(text) * memory.GB
  except ValueError:
    size = 0.0
  if not size > 0:
    raise ValueError(f'{MEMORY_VARIABLE} is {text!r}; give a number of GB above 0.')
  return size
