"""Checks a machine, a configuration and an environment before a run.

  findings = doctor.examine(config, workdir, algorithm, tasks=tasks, make_env=make_env)
  sys.exit(doctor.show(findings))

Nothing is trained, and no weights are read. Each check has a time-out.
"""

from collections.abc import Callable, Sequence
import contextlib
import fcntl
import importlib.metadata
import io
import os
import pathlib
import shutil
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
from packaging import requirements

from agent_r1_jax import config as config_lib
from agent_r1_jax import fields, types
from agent_r1_jax.checks import environment_check
from agent_r1_jax.host import terminal, thread_pool, workers
from agent_r1_jax.rl import algorithms
from agent_r1_jax.rollout import rollout
from agent_r1_jax.tools import sandbox
from agent_r1_jax.train import preflight
from agent_r1_jax.train.plan import footprint, sizes

_PACKAGE = 'agent_r1_jax'
PYTHONS = ('3.11', '3.12', '3.13')
_ROOT = pathlib.Path(__file__).parents[2]
_REQUIREMENTS = 'requirements.txt'
_SECONDS = 120.0
_PROBE_BYTES = 32 << 20
_SLOW_DISK = 50e6
# Linux's device files of accelerators, and the extra that lets JAX use them.
_ACCELERATORS = {'/dev/nvidia0': 'cuda', '/dev/accel0': 'tpu', '/dev/vfio/0': 'tpu'}
_STYLES = {'ok': 'green', 'warn': 'yellow', 'fail': 'bold red'}

# The checks of a run on hardware that this machine lacks.
_ELSEWHERE = ('versions', 'devices', 'configuration', 'memory')

Finding = environment_check.Finding


def examine(
  config: config_lib.Config,
  workdir: str | os.PathLike,
  algorithm: algorithms.Algorithm | None = None,
  *,
  tasks: Sequence[types.Task] = (),
  make_env: rollout.MakeEnv | None = None,
  solve: Callable[[types.Task], Sequence[str]] | None = None,
  seconds: float = 0.0,
  machine: footprint.Machine | None = None,
) -> list[Finding]:
  """Examines the machine, the configuration and the environment.

  Memory is estimated only if config.model.path is set; without an algorithm the policy
  only plays. The run's workdir is not created. For `solve` see
  environment_check.check_env, for `seconds` sizes.resolve. Pass `machine` if the run's
  chips are elsewhere; memory is then estimated for them.
  """
  folder = pathlib.Path(workdir).resolve()
  if algorithm is not None:
    algorithm = preflight.correct_rounding(config, algorithm)
  checks = {
    'versions': check_versions,
    'devices': lambda: check_devices(machine),
    'configuration': lambda: check_config(config, algorithm),
    'memory': lambda: check_memory(config, algorithm, folder, seconds, machine),
    'isolation': check_isolation,
    'disk': lambda: check_disk(folder, _needed_bytes(config, algorithm)),
  }
  if machine:  # The other checks would be of this machine.
    checks = {name: checks[name] for name in _ELSEWHERE}
  findings = [_run_check(*named, seconds) for named in checks.items()]
  if make_env is not None:
    findings += environment_check.check_env(
      tasks, make_env, solve=solve, limits=config.limits
    )
  return findings


def show(findings: Sequence[Finding]) -> int:
  """Prints the findings; returns the exit status: 1 if any finding is 'fail'."""
  from rich import console, table, text

  screen = console.Console()
  grid = table.Table.grid(padding=(0, 2, 0, 0))
  for finding in findings:
    style = _STYLES[finding.status]
    lines = text.Text(terminal.printable(finding.text))
    if finding.remedy:
      lines.append(terminal.printable(f'\n→ {finding.remedy}'), 'bold')
    grid.add_row(text.Text(finding.status, style), finding.name, lines)
  screen.print(grid)
  counts = {s: sum(f.status == s for f in findings) for s in _STYLES}
  print(', '.join(f'{n} {status}' for status, n in counts.items() if n))
  return int(counts['fail'] > 0)


def check_versions() -> Finding:
  """Compares Python and the installed packages with the tested versions."""
  here = '.'.join(map(str, sys.version_info[:2]))
  if here not in PYTHONS:
    remedy = f'Use one of Python {", ".join(PYTHONS)}.'
    return Finding('versions', 'fail', f'Python {here}', remedy)
  differing, bounds, wanted = [], [], _read_requirements()
  for package in wanted:
    try:
      version = importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:
      text, remedy = f'{package.name} is not installed', f"pip install '{package}'"
      return Finding('versions', 'fail', text, remedy)
    if version not in package.specifier:
      differing.append(f'{package.name} {version} (tested: {package.specifier})')
      bounds.append(f"'{package.name}{package.specifier}'")
  if differing:
    text = f'{len(differing)} packages differ: {", ".join(differing[:4])}'
    # An installed package has no requirements file.
    is_checkout = (_ROOT / _REQUIREMENTS).exists()
    what = f'-r {_REQUIREMENTS}' if is_checkout else ' '.join(bounds)
    return Finding('versions', 'warn', text, f'pip install {what}')
  versions = f'Python {here}, jax {jax.__version__}'
  return Finding('versions', 'ok', f'{versions}, and {len(wanted)} packages as tested')


def _read_requirements() -> list[requirements.Requirement]:
  """Returns the requirements for this Python: a checkout's versions, else the bounds."""
  path = _ROOT / _REQUIREMENTS
  if path.exists():
    lines = [line.split('#')[0] for line in path.read_text().splitlines()]
  else:
    lines = importlib.metadata.requires(_PACKAGE) or []
  found = [requirements.Requirement(line) for line in lines if line.strip()]
  return [x for x in found if not x.marker or x.marker.evaluate({'extra': ''})]


def check_devices(machine: footprint.Machine | None = None) -> Finding:
  """Finds JAX's devices and, if they are here, multiplies matrices on one."""
  if machine:
    text = f'{len(machine.absent)} x {machine.absent[0].device_kind}, not here'
    return Finding('devices', 'ok', f'{text}: programs are compiled, none is run')
  devices, platform = jax.devices(), jax.default_backend()
  text = f'{len(devices)} x {devices[0].device_kind} ({platform})'
  product = float(jnp.sum(jnp.ones((256, 256)) @ jnp.ones((256, 256))))
  if product != 256**3:
    return Finding(
      'devices', 'fail', f'{text}: a product of matrices is wrong', 'Change the device.'
    )
  unused = [extra for path, extra in _ACCELERATORS.items() if os.path.exists(path)]
  if platform == 'cpu' and unused:
    remedy = f"pip install '{_PACKAGE}[{unused[0]}]', and leave JAX_PLATFORMS unset."
    return Finding('devices', 'warn', f'{text}, and an accelerator is not used', remedy)
  return Finding('devices', 'ok', text)


def check_config(
  config: config_lib.Config, algorithm: algorithms.Algorithm | None
) -> Finding:
  """Checks the settings, as a run does before it loads anything."""
  try:
    if algorithm is None:
      config.check()
    else:
      preflight.check_config(config, algorithm)
  except ValueError as error:
    return Finding('configuration', 'fail', str(error))
  episodes = config.schedule.tasks * config.schedule.samples
  text = f'{config.schedule.steps} steps of {episodes} episodes'
  return Finding('configuration', 'ok', text)


def check_memory(
  config: config_lib.Config,
  algorithm: algorithms.Algorithm | None,
  workdir: pathlib.Path,
  seconds: float = 0.0,
  machine: footprint.Machine | None = None,
) -> Finding:
  """Chooses the run's sizes as the run does (docs/memory.md).

  Programs not compiled after `seconds` are not counted, and the finding is a warning.
  """
  if not config.model.path:
    remedy = 'Give --config.model.path.'
    return Finding('memory', 'warn', 'not estimated: there is no model', remedy)
  printed = io.StringIO()
  try:
    config.model.check()
    with contextlib.redirect_stderr(printed):
      sizes.resolve(config, algorithm, workdir, seconds, machine)
  except ValueError as error:
    lines = str(error).removeprefix('memory: ').splitlines()
    remedy = lines[-1] if len(lines) > 1 else ''
    return Finding('memory', 'fail', '\n'.join(lines[:4]), remedy)
  line = printed.getvalue().strip()
  if 'not compiled' in line:
    remedy = 'Ask the compiler (--compile), which takes up to minutes.'
    return Finding('memory', 'warn', line, remedy)
  return Finding('memory', 'ok', line)


def check_isolation() -> Finding:
  """Runs a line of Python in the sandbox for model-written code."""
  try:
    box = sandbox.Sandbox()
    try:
      output = box.run('print(6 * 7)')
    finally:
      box.close()
  except RuntimeError as error:
    remedy = 'Only a Python tool needs it; docs/tools.md says what it needs.'
    return Finding('isolation', 'warn', str(error), remedy)
  if output.text.strip() != '42':
    remedy = 'Give no agent a Python tool here.'
    return Finding('isolation', 'fail', f'the sandbox printed {output.text!r}', remedy)
  layers = ', '.join(sandbox.LAYERS)
  if not sandbox._isolate():
    remedy = (
      'Install bubblewrap, and allow user namespaces, for one more layer, which also '
      'hides the names and sizes of files.'
    )
    return Finding('isolation', 'warn', f'{layers}; no namespaces', remedy)
  return Finding('isolation', 'ok', f'{layers}, namespaces (bubblewrap)')


def check_disk(folder: pathlib.Path, needed: float) -> Finding:
  """Measures the disk of a workdir, and tries to lock a file on it.

  `needed` is the number of bytes that the run will write, as far as known.
  """
  while not folder.exists():
    folder = folder.parent
  try:
    speed, locks = _measure_disk(folder)
  except OSError as error:
    remedy = 'Give another --workdir, or make room.'
    return Finding('disk', 'fail', f'{folder}: {error.strerror}', remedy)
  free = shutil.disk_usage(folder).free
  text = f'{folder}: {free / 1e9:.1f} GB free, {speed / 1e6:.0f} MB/s'
  if needed:
    text += f'; checkpoints and model take {needed / 1e9:.2f} GB'
  if free < needed:
    remedy = 'Make room, lower --config.checkpoint.keep, or give another --workdir.'
    return Finding('disk', 'fail', text, remedy)
  if not locks:
    remedy = 'Nothing keeps two runs out of one workdir there: name each once.'
    return Finding('disk', 'warn', f'{text}; no locks', remedy)
  if free < 2 * needed or speed < _SLOW_DISK:
    remedy = 'Rollouts and trajectories need room, too; a slow disk delays checkpoints.'
    return Finding('disk', 'warn', text, remedy)
  return Finding('disk', 'ok', f'{text}; locks work')


def _measure_disk(folder: pathlib.Path) -> tuple[float, bool]:
  """Writes a file; returns bytes per second, and whether the file could be locked."""
  with tempfile.TemporaryFile(dir=folder) as file:
    data, begun = os.urandom(_PROBE_BYTES), time.perf_counter()
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
    seconds = time.perf_counter() - begun
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      return len(data) / seconds, False
  return len(data) / seconds, True


def _needed_bytes(
  config: config_lib.Config, algorithm: algorithms.Algorithm | None
) -> float:
  """Returns the bytes of all checkpoints and the model; 0 if the model is unknown."""
  try:
    models = sizes.read_models(config.model, algorithm)
    alone = fields.replace(config, {f'mesh.{axis}': 1 for axis in config.mesh.axes(1)})
    counted = footprint.Footprint(alone, models, footprint.Machine('cpu', 0.0)).parts
  except (OSError, ValueError):
    return 0.0  # Another check reports the error.
  # While a checkpoint is written, the one it will replace is still on disk.
  checkpoints = (config.checkpoint.keep + 1) * counted['checkpoint']
  return checkpoints + counted['parameters, float32']


def _run_check(name: str, check: Callable[[], Finding], more: float = 0.0) -> Finding:
  """Runs a check within _SECONDS + `more`; an error or time-out becomes a finding."""
  call = thread_pool.POOL.submit(check)
  try:
    return call.result(_SECONDS + more)
  except TimeoutError:
    text = f'gave no answer within {_SECONDS + more:g} seconds'
    remedy = 'Another process may hold the device or the disk.'
    return Finding(name, 'fail', text, remedy)
  except Exception as error:
    return Finding(name, 'fail', workers.describe_error(error))
