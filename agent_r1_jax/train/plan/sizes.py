"""Chooses sizes that are 0, and rematerialisation, so that a run fits the memory.

`resolve` runs before anything is loaded: it starts from the fastest sizes, and halves
them until the footprint (footprint.py) fits. A run resumed on the same devices keeps the
sizes in its config.json if they fit. On other devices sizes are chosen again, except
engine.slots, which limits the length of an episode.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import datetime
import json
import math
import os
import pathlib
import sys

import jax

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields
from agent_r1_jax.host import memory as memory_lib
from agent_r1_jax.host import processes, runtime
from agent_r1_jax.host import workdir as workdir_lib
from agent_r1_jax.models import batch_invariant, sharding
from agent_r1_jax.models.files import hf_config
from agent_r1_jax.models.layers import UNROLLED_LAYERS
from agent_r1_jax.rl import algorithms
from agent_r1_jax.train.plan import footprint as footprint_lib
from agent_r1_jax.train.plan import setup
from agent_r1_jax.train.plan.footprint import Machine, ModelShapes, RunSizes

REMAT = 'model.remat'
_NAMES = (*config_lib.SIZES, REMAT)
GB = 1e9
# The seconds after which no more programs are compiled to choose sizes.
SECONDS = 120.0
# Names an environment variable: GB (10^9 bytes) of each accelerator, or of the process.
MEMORY_VARIABLE = 'AGENT_R1_MEMORY_GB'
# The share of the memory to fill; the rest is for what is not counted.
_SHARE = 0.85
# The assumed bytes of a device that does not report its memory.
_UNKNOWN = 16e9
# The assumed tokens of a prompt; the most and the fewest slots to choose; slots are a
# multiple of 128, the tile of accelerators' kernels.
_PROMPT, _MOST_SLOTS, _FEWEST_SLOTS, _TILE = 1024, 8192, 1024, 128
# The fewest rows; below that, slots are halved instead.
_FEWEST_ROWS = 8
# The most rows of an engine, and tokens of a micro-batch on one chip: more are not
# faster, and on a CPU their activations would not fit its caches.
_MOST_ROWS = {'cpu': 128, 'gpu': 256, 'tpu': 256}
_MOST_TOKENS = {'cpu': 2048, 'gpu': 16_384, 'tpu': 16_384}
# Rows and tokens of one prefill. Tools' answers are short: on a CPU the padding of longer
# chunks costs time, on an accelerator reading the weights takes longer anyway.
_PREFILL_SHAPES = {'cpu': (32, 32), 'gpu': (16, 128), 'tpu': (16, 128)}
# The fewest slots of a cache read; smaller reads mean more programs to compile.
_LEAST_BUCKET = {'cpu': 128, 'gpu': 256, 'tpu': 256}
# The fields that shrink a part, by words in its name; the first match counts.
_REMEDIES = {
  'cache': 'fewer engine.rows or engine.slots, engine.cache=int8',
  'temporaries of sampling': 'fewer engine.rows',
  'temporaries of the gradient': "a smaller batch.microbatch, model.remat='full'",
  'state of adamw8': 'on an accelerator optimizer.offload=True',
  'state of adamw': 'optimizer.kind=adamw8, or on an accelerator optimizer.offload=True',
  'state of muon': 'optimizer.kind=adamw8, or on an accelerator optimizer.offload=True',
  'gradient': 'model.lora_rank=16',
  'checkpoint': 'model.lora_rank=16',
}


def resolve(
  config: config_lib.Config,
  algorithm: algorithms.Algorithm | None = None,
  workdir: str | os.PathLike | None = None,
  seconds: float = SECONDS,
  machine: Machine | None = None,
) -> config_lib.Config:
  """Returns the configuration with all sizes and the date chosen, and prints a line.

  Args:
    config: The run's configuration; sizes of 0 are chosen.
    algorithm: The run's algorithm; None if the policy only plays.
    workdir: The run's directory; a resumed run may keep its sizes.
    seconds: How long to compile programs to choose sizes; a compilation that has started
      is finished. Later programs are scaled from compiled ones, or if there are none,
      left out; the line names them.
    machine: The chips of the run, which may be absent; by default this process's chips.

  Raises:
    ValueError: The run does not fit the memory (the message has the parts and the fields
      to change), or its rows cannot be split over the mesh.
  """
  runtime.initialize()
  machine = machine or find_machine(config.mesh)
  models = read_models(config.model, algorithm)
  # Raises if the mesh does not fit the chips.
  setup.split_chips(config.mesh, machine.absent)
  footprint = footprint_lib.Footprint(config, models, machine, seconds)
  today, *_ = processes.gather(str(datetime.date.today()))
  candidates = [config] if workdir is None else load_recorded(config, workdir)
  for given in candidates:
    reused = [n for n in _NAMES if fields.get(config, n) != fields.get(given, n)]
    try:
      chosen = choose(given, footprint)
      _check_split(chosen, machine)
      line = check(chosen, footprint, reused)
      break
    except ValueError:
      if given is candidates[-1]:
        raise
  chosen = fields.replace(chosen, {'chat.date': chosen.chat.date or today})
  if processes.is_first():
    print(line, file=sys.stderr)
  return chosen


def find_machine(config: config_lib.Mesh) -> Machine:
  """Finds platform, memory and chips; memory is the minimum over all processes."""
  training, sampling = sharding.split_devices(config.samplers)
  local, platform = jax.local_devices(), jax.default_backend()
  available = read_memory()
  if available is None and platform == 'cpu':
    available = float(memory_lib.available_memory())
  elif available is None:
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
) -> list[config_lib.Config]:
  """Returns copies of `config` with missing sizes and date from the workdir's run.

  The first has all its sizes, if the run began on devices like these. The last has only
  engine.slots, which bounds episodes, and the date: the other sizes only affect speed.
  """
  recorded = {}
  with contextlib.suppress(OSError, ValueError, RecursionError):
    # Without the file there is no run yet; run_files reports a damaged file.
    text = pathlib.Path(workdir, 'config.json').read_text()
    recorded = workdir_lib.flatten_fields(json.loads(text))
  sound = lambda x: isinstance(x, str) or (type(x) is int and x > 0)
  missing = [n for n in (*_NAMES, 'chat.date') if not fields.get(config, n)]
  known = {name: recorded[name] for name in missing if sound(recorded.get(name))}
  devices = runtime.describe_devices()
  same = recorded.get('devices', devices) == devices
  # Other processes may see another file than the first.
  known, same = processes.gather([known, same])[0]
  least = {n: x for n, x in known.items() if n in ('engine.slots', 'chat.date')}
  return [fields.replace(config, kept) for kept in ([known] if same else []) + [least]]


def choose(
  config: config_lib.Config, footprint: footprint_lib.Footprint
) -> config_lib.Config:
  """Returns `config` with all sizes that are 0, and `model.remat`, chosen.

  Other sizes do not change. Uses the first of `_candidates` that fits, or the last.
  """
  candidate, memory = config, _SHARE * footprint.machine.memory
  for candidate in _candidates(config, footprint.models, footprint.machine):
    if footprint.measure(RunSizes.of(candidate), memory).bytes <= memory:
      break
  return candidate


def _candidates(
  config: config_lib.Config, models: ModelShapes, machine: Machine
) -> Iterator[config_lib.Config]:
  """Yields configurations with all sizes, the fastest first.

  The next candidates halve the micro-batch; then recompute activations, which costs a
  third of a gradient's time, with each micro-batch; then repeat this with half of the
  rows, and so on; then with half of the slots. Sizes that the user set do not change.
  """
  engine, batch = config.engine, config.batch
  groups = config.mesh.count_groups(machine.chips)
  remats = [config.model.remat or 'none']
  # On a CPU, with unrolled layers, recomputation would save nothing.
  unrolled = machine.platform == 'cpu' and models.policy.num_layers <= UNROLLED_LAYERS
  if models.algorithm and not config.model.remat and not unrolled:
    remats.append('full')
  longest = engine.slots or _choose_slots(config, models)
  tokens = (batch.row_tokens or longest) / config.mesh.context
  each = _power_of_two(max(1, int(_MOST_TOKENS[machine.platform] / tokens)))
  most = batch.microbatch or groups * each
  episodes = -(-config.schedule.tasks * config.schedule.samples // machine.engines)
  most_rows = min(_MOST_ROWS[machine.platform], 1 << (episodes - 1).bit_length())
  for slots in _halves(longest, engine.slots or _FEWEST_SLOTS):
    if slots < longest:
      slots = _round_up(slots, _slot_multiple(config.mesh))
    fewest = _FEWEST_ROWS if slots > _FEWEST_SLOTS and not engine.slots else 1
    for rows in _halves(engine.rows or most_rows, engine.rows or fewest):
      filled = _fill(config, machine, slots, rows)
      for remat in remats:
        for microbatch in _halves(most, batch.microbatch or groups):
          chosen = {'batch.microbatch': microbatch, REMAT: remat}
          if machine.platform == 'cpu' and not (batch.row_tokens or batch.microbatch):
            # Attention reads only visible keys, so one long row costs no more than short
            # ones, cuts fewer trees and has less padding.
            row_tokens = filled.batch.row_tokens * (microbatch // groups)
            chosen |= {'batch.microbatch': groups, 'batch.row_tokens': row_tokens}
          yield fields.replace(filled, chosen)


def _halves(size: int, least: int) -> list[int]:
  """Returns size, size / 2, size / 4, ... down to `least`, and `size` in any case."""
  return [size, *(n for i in range(1, 32) if (n := size >> i) >= least)]


def _fill(
  config: config_lib.Config, machine: Machine, slots: int, rows: int
) -> config_lib.Config:
  """Returns `config` with these sizes, and the sizes that follow from them."""
  sizes = config.engine
  if not sizes.rows:
    rows = _round_up(rows, sizes.replicas or 1)
  prefill_rows, prefill_tokens = _PREFILL_SHAPES[machine.platform]
  bucket = max(_LEAST_BUCKET[machine.platform], _power_of_two(max(1, slots // 8)))
  replicas = 1
  # One replica per CPU core, if each gets 8 rows; otherwise one per chip.
  if machine.platform == 'cpu' and config.mesh.tensor == 1:
    width = min(sizes.width or rows, rows)
    counts = range(min(machine.cores, rows // 8), 1, -1)
    replicas = next((n for n in counts if rows % n == 0 and width % n == 0), 1)
  engine = dataclasses.replace(
    sizes,
    slots=slots,
    rows=rows,
    prefill_rows=sizes.prefill_rows or min(prefill_rows, rows),
    prefill_tokens=sizes.prefill_tokens or prefill_tokens,
    bucket=sizes.bucket or min(slots, bucket),
    replicas=sizes.replicas or replicas,
  )
  row_tokens = config.batch.row_tokens or _round_up(slots, config.mesh.context)
  batch = dataclasses.replace(config.batch, row_tokens=row_tokens)
  return dataclasses.replace(config, engine=engine, batch=batch)


def _choose_slots(config: config_lib.Config, models: ModelShapes) -> int:
  """Returns the slots that the longest episode needs, up to _MOST_SLOTS."""
  step = _slot_multiple(config.mesh)
  turn = config.limits.max_turn_tokens + config.chat.max_tool_tokens
  episode = _round_up(_PROMPT + config.limits.max_turns * turn, step)
  most = min(_MOST_SLOTS, models.policy.max_positions, config.batch.row_tokens or episode)
  return min(episode, max(1, most // step) * step, most)


def _slot_multiple(mesh: config_lib.Mesh) -> int:
  """Returns the number that divides slots, and so the tokens of a row."""
  return math.lcm(_TILE, mesh.context)


def _round_up(n: int, step: int) -> int:
  """Returns the smallest multiple of `step` that is at least n."""
  return -(-n // step) * step


def _power_of_two(n: int) -> int:
  """Returns the largest power of two that is at most n."""
  return 1 << (n.bit_length() - 1)


def check(
  config: config_lib.Config,
  footprint: footprint_lib.Footprint,
  reused: Sequence[str] = (),
) -> str:
  """Returns a line with the sizes and the memory that they need.

  `reused` names the sizes that a resumed run took from its config.json.

  Raises:
    ValueError: The run does not fit; the message has the parts in GB and the fields to
      change.
  """
  memory = footprint.machine.memory
  peak = footprint.measure(RunSizes.of(config), memory)
  if peak.bytes > memory:
    raise ValueError(_describe_refusal(peak, footprint.machine, reused))
  names = _NAMES if footprint.models.algorithm else config_lib.SIZES
  chosen = ' '.join(f'{name}={fields.get(config, name)}' for name in names)
  taken = f'{"below " if peak.is_bound else ""}{peak.bytes / GB:.1f} GB ({peak.phase})'
  line = f'sizes: {chosen}; estimated peak {taken} of {memory / GB:.1f} GB'
  if footprint.missing:
    line += f'; not compiled for lack of time: {", ".join(sorted(footprint.missing))}'
  return line


def _describe_refusal(
  peak: footprint_lib.Peak, machine: Machine, reused: Sequence[str]
) -> str:
  """Describes the parts of a run that does not fit, and the fields that shrink them."""
  where = 'this process' if machine.platform == 'cpu' else 'each chip'
  # The TPU compiler does not say how much a failed program needs.
  taken = f'{peak.bytes / GB:.1f} GB' if math.isfinite(peak.bytes) else 'more'
  lines = [
    f'memory: this run is estimated to take {taken} ({peak.phase}), and {where} has '
    f'{machine.memory / GB:.1f} GB:'
  ]
  for name, size in sorted(peak.parts.items(), key=lambda part: -part[1]):
    remedy = next((f': {x}' for words, x in _REMEDIES.items() if words in name), '')
    if size >= 5e6:
      lines.append(f'  {size / GB:8.2f} GB  {name}{remedy}')
  remedy = (
    'Change what stands beside a part, or take a smaller model, or more chips (mesh.fsdp)'
  )
  if machine.platform == 'gpu' and peak.bytes < 0.95 / 0.75 * machine.memory:
    # By default JAX allocates three quarters of a GPU's memory.
    remedy += ', or let JAX have more of the GPU (XLA_PYTHON_CLIENT_MEM_FRACTION=.95)'
  if reused:
    remedy += (
      f'. {", ".join(reused)} are those that this run began with (config.json); give '
      'others in another workdir'
    )
  lines.append(f'{remedy}. {MEMORY_VARIABLE} says that there is more or less.')
  return '\n'.join(lines)


def _check_split(config: config_lib.Config, machine: Machine) -> None:
  """Raises ValueError if training rows cannot be split over the mesh."""
  groups, context = config.mesh.count_groups(machine.chips), config.mesh.context
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


def read_models(config: config_lib.Model, algorithm) -> ModelShapes:
  """Reads the models' shapes from config.json, without their weights."""
  if not config.path:
    raise ValueError(
      'model.path is empty; give the directory of a model in Hugging Face layout.'
    )
  policy = hf_config.read(config.path, config.formats)
  ops = batch_invariant.INVARIANT if config.batch_invariant else None
  policy = dataclasses.replace(policy, dtype=config.dtype, ops=ops)
  if algorithm is None:
    return ModelShapes(policy)
  reference = config.reference and hf_config.read(config.reference, config.formats)
  raw = hf_config.read_raw(config.path, config.formats)[1]
  return ModelShapes(policy, algorithm, reference or None, bool(raw.get('value_head')))


def read_memory() -> float | None:
  """Returns the memory per chip, or of this process, from MEMORY_VARIABLE, in bytes.

  None if the variable is not set.

  Raises:
    ValueError: The variable is not a number above 0.
  """
  text = os.environ.get(MEMORY_VARIABLE)
  if text is None:
    return None
  try:
    size = float(text) * GB
  except ValueError:
    size = 0.0
  if not size > 0:
    raise ValueError(f'{MEMORY_VARIABLE} is {text!r}; give a number of GB above 0.')
  return size
