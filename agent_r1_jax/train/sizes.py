"""Chooses sizes that are 0, and what is recomputed, so that a run fits the memory.

`resolve` does so before anything is loaded: it counts what the run holds and asks the
compiler for the rest (footprint.py), from the fastest sizes on until some fit. A run that
is resumed takes the sizes that it began with from its config.json.
"""

from collections.abc import Iterator, Mapping, Sequence
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
from agent_r1_jax.host import processes, runtime
from agent_r1_jax.models import hf_config, sharding
from agent_r1_jax.models.decoder import UNROLLED_LAYERS
from agent_r1_jax.rl import algorithms
from agent_r1_jax.train import fastest as fastest_lib
from agent_r1_jax.train import footprint as footprint_lib
from agent_r1_jax.train.footprint import Machine, Models

FIELDS, REMAT = config_lib.SIZES, 'model.remat'
GB = 1e9
# The seconds after which no program is compiled any more to choose sizes.
SECONDS = 120.0
# Names an environment variable: GB (10^9 bytes) of each accelerator, or of the process.
MEMORY_VARIABLE = 'AGENT_R1_MEMORY_GB'
# (share of the memory, fewest rows, fewest slots): the first round leaves a margin for
# what nobody counts; the second uses all memory before it shortens episodes.
_ROUNDS = ((0.85, 8, 2048), (1.0, 1, 1024))
# If a run takes less than this share of the memory with the bounds of its temporaries,
# the compiler is not asked.
_OBVIOUS = 0.5
# The assumed bytes of a device that does not report its memory.
_UNKNOWN = 16e9
# The fields with which a part takes less, by words in its name; None stands for less than
# the present value.
_REMEDIES = {
  'cache': {'engine.rows': None, 'engine.slots': None},
  'temporaries of sampling': {'engine.rows': None},
  'temporaries of the gradient': {'batch.microbatch': None, REMAT: 'full'},
  'state of adamw': {'optimizer.kind': 'adamw8', 'optimizer.offload': True},
  'gradient': {'model.lora_rank': 16},
  'checkpoint': {'model.lora_rank': 16},
}


def resolve(
  config: config_lib.Config,
  algorithm: algorithms.Algorithm | None = None,
  workdir: str | os.PathLike | None = None,
  seconds: float = SECONDS,
) -> config_lib.Config:
  """Returns the configuration with all sizes chosen, and prints them in one line.

  Args:
    config: The run's configuration; sizes of 0 are chosen.
    algorithm: The run's algorithm; None if the policy only plays.
    workdir: The run's directory; if the run is resumed, sizes that are 0 are those that
      it began with.
    seconds: How long programs are compiled to choose sizes; a compilation that has begun
      is finished. What is asked for later is scaled from what was compiled, or if nothing
      was, left out; the line names it.

  Raises:
    ValueError: The run does not fit the memory; the message has the parts and the fields
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
  footprint_lib.make_mesh(config.mesh)  # Raises where the chips make no such mesh.
  footprint = footprint_lib.Footprint(config, models, machine, seconds)
  config = choose(config, footprint)
  _check_split(config, machine)
  check(config, footprint, reused)
  if processes.is_first():
    print(describe(config, footprint), file=sys.stderr)
  return config


def find_machine(config: config_lib.Mesh) -> Machine:
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
  return Machine(platform, available, len(training), engines, int(cores))


def load_recorded(
  config: config_lib.Config, workdir: str | os.PathLike
) -> config_lib.Config:
  """Returns `config` with sizes of 0 replaced by those of the run in this workdir."""
  path = pathlib.Path(workdir) / 'config.json'
  try:
    recorded = json.loads(path.read_text())
  except (OSError, ValueError, RecursionError):
    return config  # No run yet; or run_files will raise an error that names the file.
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
  config: config_lib.Config, footprint: footprint_lib.Footprint
) -> config_lib.Config:
  """Returns `config` with a number for each size that is 0, and with a `model.remat`.

  Other sizes are not changed. The first of `_candidates` that fits is taken, or the last.
  """
  candidate = config
  for share, candidate in _candidates(config, footprint.models, footprint.machine):
    if _fits(candidate, footprint, share):
      break
  return candidate


def _candidates(
  config: config_lib.Config, models: Models, machine: Machine
) -> Iterator[tuple[float, config_lib.Config]]:
  """Yields shares of the memory, and sizes that may take so much, the best ones first.

  The first are the fastest. For the next ones the micro-batch is halved; then activations
  are recomputed, which costs a third of a gradient's time, with each micro-batch; then
  the same with half of the rows, and so on; then with half of the slots.
  """
  fastest = fastest_lib.choose(config, models, machine)
  groups = config.mesh.count_groups(machine.chips)
  remats = [config.model.remat or 'none']
  # With the layers unrolled, on a CPU, it would save nothing.
  unrolled = machine.platform == 'cpu' and models.policy.num_layers <= UNROLLED_LAYERS
  if models.algorithm and not config.model.remat and not unrolled:
    remats.append('full')
  most_slots = fastest['slots']
  # Those that are given stay.
  halve = lambda given, size, least: _halves(size, size if given else least)
  for share, fewest_rows, fewest_slots in _ROUNDS:
    for slots in halve(config.engine.slots, fastest['slots'], fewest_slots):
      if slots < most_slots:
        slots = fastest_lib.round_up(slots, fastest_lib.slot_multiple(config.mesh))
      for rows in halve(config.engine.rows, fastest['rows'], fewest_rows):
        for remat in remats:
          for size in halve(config.batch.microbatch, fastest['microbatch'], groups):
            sizes = {'slots': slots, 'rows': rows, 'microbatch': size}
            filled = fastest_lib.fill(config, machine, **sizes)
            yield share, fields.replace(filled, {REMAT: remat})
    fastest['slots'] = slots  # The next round goes on from here.


def _halves(size: int, least: int) -> list[int]:
  """Returns size, size / 2, size / 4, ... down to `least`, and `size` in any case."""
  return [size, *(n for i in range(1, 32) if (n := size >> i) >= least)]


def _fits(
  config: config_lib.Config, footprint: footprint_lib.Footprint, share: float
) -> bool:
  """Whether a run of these sizes takes at most this share of the memory.

  The compiler is asked only if the bounds do not say that it fits, and what is known does
  not say that it does not.
  """
  memory = footprint.machine.memory
  if _is_obvious(config, footprint):
    return True
  return all(
    sum(parts.values()) <= share * memory
    for ask in (footprint.least, footprint.compile)
    for _, parts in footprint.phases(config, ask)
  )


def _is_obvious(config: config_lib.Config, footprint: footprint_lib.Footprint) -> bool:
  """Whether a run of these sizes fits, whatever the compiler does."""
  most = footprint.largest(config, footprint.bound)[0]
  return most <= _OBVIOUS * footprint.machine.memory


def check(
  config: config_lib.Config,
  footprint: footprint_lib.Footprint,
  reused: Sequence[str] = (),
) -> None:
  """Checks that the run, with all sizes chosen, fits the memory.

  `reused` names the sizes that a resumed run took from its config.json.

  Raises:
    ValueError: It does not; the message has the parts in GB and the fields to change.
  """
  if _fits(config, footprint, 1.0):
    return
  machine = footprint.machine
  peak, phase, parts = footprint.largest(config, footprint.least)
  largest = sorted(parts.items(), key=lambda part: -part[1])
  table = '\n'.join(f'  {n / GB:8.2f} GB  {name}' for name, n in largest if n >= 5e6)
  finite = sum(n for _, n in largest if math.isfinite(n))
  remedy = _find_remedy(
    config, footprint, [name for name, n in largest if n > finite / 20]
  )
  if machine.platform == 'gpu' and peak < 0.95 / 0.75 * machine.memory:
    # By default JAX allocates three quarters of a GPU's memory.
    remedy += ', or let JAX have more of the GPU (XLA_PYTHON_CLIENT_MEM_FRACTION=.95)'
  if reused:
    remedy += (
      f'. {", ".join(reused)} are those that this run began with (config.json); give '
      'others in another workdir'
    )
  where = 'this process' if machine.platform == 'cpu' else 'each chip'
  taken = f'{peak / GB:.1f} GB' if math.isfinite(peak) else 'more than is compiled'
  raise ValueError(
    f'memory: this run is estimated to take {taken} ({phase}), and {where} '
    f'has {machine.memory / GB:.1f} GB:\n{table}\n{remedy}. {MEMORY_VARIABLE} says that '
    'there is more or less.'
  )


def _find_remedy(config, footprint: footprint_lib.Footprint, parts: list[str]) -> str:
  """Names the fields with which these parts take less; those of the first part first."""
  models, machine = footprint.models, footprint.machine
  changes = {
    field: value
    for part in parts
    for words, remedy in _REMEDIES.items()
    for field, value in remedy.items()
    if words in part and fields.get(config, field) not in (value, 1)
  }
  if machine.platform == 'cpu':  # The host's memory is the device's.
    changes.pop('optimizer.offload', None)
  least = {'engine.rows': 1, 'engine.slots': 1}
  if models.algorithm:
    least |= {'model.lora_rank': config.model.lora_rank or 16}
  smallest = fields.replace(config, least)
  counted = footprint_lib.Footprint(smallest, models, machine, seconds=0.0)
  if not changes or counted.largest(smallest, counted.least)[0] > machine.memory:
    return 'No setting makes it fit: take a smaller model, or more chips (mesh.fsdp)'
  return 'Lower it with ' + ' or '.join(
    f'{name}={fields.get(config, name) // 2 if value is None else value}'
    for name, value in changes.items()
  )


def describe(config: config_lib.Config, footprint: footprint_lib.Footprint) -> str:
  """Returns a line with the sizes and the estimated memory."""
  names = FIELDS if footprint.models.algorithm is None else (*FIELDS, REMAT)
  chosen = ' '.join(f'{name}={fields.get(config, name)}' for name in names)
  below, ask = '', footprint.compile
  if _is_obvious(config, footprint):
    below, ask = 'below ', footprint.bound
  peak, phase, _ = footprint.largest(config, ask)
  memory = footprint.machine.memory
  line = f'{peak / GB:.1f} GB ({phase}) of {memory / GB:.1f} GB'
  if footprint.missing:
    line += f'; not compiled for lack of time: {", ".join(sorted(footprint.missing))}'
  return f'sizes: {chosen}; estimated peak {below}{line}'


def _check_split(config: config_lib.Config, machine: Machine) -> None:
  """Raises ValueError if training rows cannot be split over the mesh."""
  groups = config.mesh.count_groups(machine.chips)
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


def read_models(config: config_lib.Model, algorithm) -> Models:
  """Reads the models' shapes from config.json; no weights are read."""
  if not config.path:
    raise ValueError(
      'model.path is empty; give the directory of a model in Hugging Face layout.'
    )
  policy = hf_config.read(config.path)
  policy = dataclasses.replace(policy, dtype=config.dtype)
  if algorithm is None:
    return Models(policy)
  reference = hf_config.read(config.reference) if config.reference else None
  raw = hf_config.read_json(pathlib.Path(config.path) / 'config.json')
  return Models(policy, algorithm, reference, bool(raw.get('value_head')))


def _parse_memory(text: str) -> float:
  try:
    size = float(text) * GB
  except ValueError:
    size = 0.0
  if not size > 0:
    raise ValueError(f'{MEMORY_VARIABLE} is {text!r}; give a number of GB above 0.')
  return size
