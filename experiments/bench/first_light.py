"""First light: ten minutes of measurements on an accelerator, the most valuable first.

  python -m experiments.bench.first_light --out=runs/light               # a GPU or a TPU
  python -m experiments.bench.first_light --out=runs/light --shape=tiny  # a rehearsal
  python -m experiments.bench.first_light --report=runs/light            # a table

Each part (experiments/bench/light) is a separate process with its own time limit, and
appends a line of JSON to OUT/lines.jsonl as soon as it has a number. A part that crashes
or hangs leaves one line that says so, and the next part runs. If one of our kernels fails
its check, later parts do without it. Programs are cached in OUT/cache; the output of a
part is in OUT/PART.log. docs/results/first_light.md says what to copy to a machine
without a network.
"""

from collections.abc import Mapping, Sequence
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import NamedTuple

from absl import app, flags

from experiments.bench.light import lines, report

_MINUTES = flags.DEFINE_float(
  'minutes', 9, 'What all parts together may take.', flag_values=lines.FLAGS
)
_PARTS = flags.DEFINE_list(
  'parts', [], 'The parts to run; all by default.', flag_values=lines.FLAGS
)
_REPORT = flags.DEFINE_string(
  'report', '', 'Print the table of a folder or a file.', lines.FLAGS
)
# Seconds between the end that a part is told and its kill.
_GRACE = 3.0


class Part(NamedTuple):
  """A part of first light.

  Attributes:
    name: Its name in the lines.
    seconds: Its time limit.
    least: It is left out if less time than this remains.
    module: The module to run; by default the one of its name in bench/light.
    flags: Additional flags of the module.
    environment: Additional environment variables.
    variable: The variable that disables the kernel which this part checks.
  """

  name: str
  seconds: float
  least: float
  module: str = ''
  flags: tuple[str, ...] = ()
  environment: Mapping[str, str] = {}
  variable: str = ''


_LIGHT = 'experiments.bench.light'
_ROWS, _SLOTS = 'AGENT_R1_ROW_ATTENTION', 'AGENT_R1_SLOT_ATTENTION'
_GROUPS = 'AGENT_R1_GROUP_PRODUCTS'
PARTS = (
  Part('card', 45, 10),
  Part('rows', 60, 12, f'{_LIGHT}.kernels', ('--what=rows',), variable=_ROWS),
  Part('slots', 45, 12, f'{_LIGHT}.kernels', ('--what=slots',), variable=_SLOTS),
  Part('policy', 50, 12),
  Part('update', 110, 40),
  # The first case again, with cuDNN's attention.
  Part('cudnn', 45, 30, f'{_LIGHT}.update', ('--cases=1',), {_ROWS: '0'}),
  Part('sampler', 120, 40),
  Part('attention', 30, 15, f'{_LIGHT}.kernels', ('--what=time',)),
  Part('peer', 90, 30),
  Part('experts', 40, 20, f'{_LIGHT}.kernels', ('--what=groups',), variable=_GROUPS),
  Part('quickstart', 80, 40),
  Part('agent', 90, 40),
  Part('profile', 60, 20),
)


def plan(parts: Sequence[Part], seconds: float) -> tuple[list[Part], list[Part]]:
  """Returns the parts that fit, and those left out unless others end early.

  A part fits if its least time remains after all earlier parts used their full limits.
  """
  fitting, left_out = [], []
  for part in parts:
    limit = choose_limit(part, seconds)
    (fitting if limit else left_out).append(part)
    seconds -= limit or 0
  return fitting, left_out


def choose_limit(part: Part, seconds: float) -> float | None:
  """Returns a part's time limit in seconds; None if too little time is left."""
  return min(part.seconds, seconds) if seconds >= part.least else None


def run(parts: Sequence[Part], seconds: float, out: pathlib.Path, shape: str) -> None:
  """Runs parts one after the other, for at most `seconds`."""
  end, environment = time.monotonic() + seconds, make_environment(out)
  for part in parts:
    left = end - time.monotonic()
    limit = choose_limit(part, left)
    if limit is None:
      text = f'left out: {left:.0f} s are left, and it needs {part.least:g}'
      lines.write(out, part.name, {'what': part.name, 'failed': text})
    else:
      earlier = len(lines.read(out))
      if failure := run_part(part, limit, out, shape, environment):
        lines.write(out, part.name, {'what': part.name, 'failed': failure})
      found = lines.read(out)[earlier:]
      if part.variable and any('failed' in line for line in found):
        environment[part.variable] = '0'
        text = f'{part.variable}=0: the later parts leave this kernel out'
        lines.write(out, part.name, {'what': part.variable, 'failed': text})
    # After each part, in case this process is killed.
    (out / 'report.md').write_text(report.write(lines.read(out)))


def run_part(
  part: Part,
  limit: float,
  out: pathlib.Path,
  shape: str,
  environment: Mapping[str, str],
) -> str:
  """Runs a part; returns one line about its failure, or an empty string."""
  module = part.module or f'{_LIGHT}.{part.name}'
  command = [sys.executable, '-m', module, f'--out={out}', f'--part={part.name}']
  end = time.time() + limit - _GRACE
  command += [f'--shape={shape}', f'--end={end:.1f}', *part.flags]
  log, begun = out / f'{part.name}.log', time.monotonic()
  with log.open('ab') as file:
    process = subprocess.Popen(
      command,
      stdin=subprocess.DEVNULL,
      stdout=file,
      stderr=subprocess.STDOUT,
      env={**environment, **part.environment},
      # So that processes which the part leaves running are killed with it.
      start_new_session=True,
    )
    try:
      status = process.wait(limit)
    except subprocess.TimeoutExpired:
      return f'ended after its {limit:.0f} s'
    finally:
      end_group(process)
  seconds = time.monotonic() - begun
  lines.write(
    out, part.name, {'what': f'{part.name}: seconds', 'took': round(seconds, 1)}
  )
  return f'exit status {status}: {read_last_line(log)}' if status else ''


def end_group(process: subprocess.Popen) -> None:
  """Kills a process and all that it started; does not wait for what cannot be killed."""
  try:
    os.killpg(process.pid, signal.SIGKILL)
  except ProcessLookupError:
    pass
  try:
    process.wait(_GRACE)
  except subprocess.TimeoutExpired:  # It hangs in the driver.
    pass


def read_last_line(log: pathlib.Path) -> str:
  """Returns the last line of a log, which usually names the error."""
  text = log.read_bytes()[-4000:].decode(errors='replace').strip()
  return text.splitlines()[-1][:300] if text else 'it printed nothing'


def make_environment(out: pathlib.Path) -> dict[str, str]:
  """Returns the parts' environment: a compilation cache, and most of the memory."""
  environment = dict(os.environ)
  # In a wheel, `experiments` is in agent_r1_jax/scripts, which is not on Python's path.
  paths = [str(pathlib.Path(__file__).parents[2]), environment.get('PYTHONPATH', '')]
  environment['PYTHONPATH'] = os.pathsep.join(filter(None, paths))
  environment['JAX_COMPILATION_CACHE_DIR'] = str(out / 'cache')
  environment['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
  environment.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '.92')
  return environment


def read_commit() -> str:
  """Returns the commit of this checkout, or an empty string without git."""
  command = ['git', 'rev-parse', '--short', 'HEAD']
  try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=5)
  except (OSError, subprocess.TimeoutExpired):
    return ''
  return done.stdout.strip()


def main(_):
  if _REPORT.value:
    print(report.write(lines.read(_REPORT.value)))
    return
  if not lines.has_out():
    raise app.UsageError('--out: name a folder for the lines, such as runs/light')
  names = [part.name for part in PARTS]
  if unknown := set(_PARTS.value) - set(names):
    raise app.UsageError(f'--parts: {sorted(unknown)}; there are {names}')
  out, seconds = lines.out().absolute(), 60 * _MINUTES.value
  out.mkdir(parents=True, exist_ok=True)
  # SIGTERM also ends the running part.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  parts = [p for p in PARTS if not _PARTS.value or p.name in _PARTS.value]
  _, left_out = plan(parts, seconds)
  about = {'what': 'begun', 'commit': read_commit(), 'minutes': _MINUTES.value}
  later = [part.name for part in left_out]
  lines.write(out, 'first light', about | {'left_out_unless_time_is_saved': later})
  run(parts, seconds, out, lines.get_shape())
  print(f'table: {out / "report.md"}')


if __name__ == '__main__':
  lines.run_app(main)
