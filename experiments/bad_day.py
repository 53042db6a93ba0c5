"""The worst day: a training run while everything goes wrong that can.

  python -m experiments.bad_day --workdir=runs/bad_day

Three runs of `bad_day_run` on miniwiki: one undisturbed; one with faults that the policy
does not see, which is also killed, told to end, interrupted, stopped for a while, and
whose disk fills and is freed; and one with faults that the policy sees, killed and told
to end as well. Checked: the second run has the parameters and the numbers of the first,
to the last bit; the third counts every fault that it was given; a signal is answered in
time; no process is left behind. Prints a table and writes report.json; the status is 1
if something does not hold.

The disk is a small file system in memory, mounted on the second run's workdir; where
mounting is not allowed, its disk is not filled and the report says so.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

from absl import app, flags

from agent_r1_jax import config as config_lib
from agent_r1_jax.host import preemption
from agent_r1_jax.train import curriculum, metrics
from experiments import bad_day_faults
from experiments.miniwiki import tasks as miniwiki

SIGNALS = {
  'kill': signal.SIGKILL,
  'terminate': signal.SIGTERM,
  'interrupt': signal.SIGINT,
}

_WORKDIR = flags.DEFINE_string('workdir', 'runs/bad_day', 'Directory of the runs.')
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of the order and times of what is done.')
_KILLS = flags.DEFINE_integer('kills', 4, 'SIGKILLs of the second and third run each.')
_TERMINATIONS = flags.DEFINE_integer('terminations', 4, 'SIGTERMs, likewise.')
_INTERRUPTS = flags.DEFINE_integer('interrupts', 1, 'SIGINTs (Ctrl-C), likewise.')
_STOPS = flags.DEFINE_integer('stops', 2, 'SIGSTOPs of 3 seconds, likewise.')
_FILLS = flags.DEFINE_integer('fills', 2, "Times that the second run's disk fills.")
_REACH = flags.DEFINE_float('reach', 8.0, 'Seconds of a start in which it is done.')
_ANSWER = flags.DEFINE_float('answer', 10.0, 'Seconds in which a signal is answered.')
_LIMIT = flags.DEFINE_float('limit', 1800.0, 'Seconds after which a run hangs.')
_DISK = flags.DEFINE_integer('disk', 128, "Megabytes of the second run's disk.")
_RUN_FLAGS = flags.DEFINE_multi_string('run', [], 'Flag of bad_day_run, without --.')


@dataclasses.dataclass
class Outcome:
  """What came of one thing that was done to a run.

  Attributes:
    kind: What was done.
    after: Seconds from the run's first line to it.
    status: The run's exit status; None if it went on.
    seconds: Seconds from it to the end of the process; None if it went on.
    said: The last line that the run printed.
  """

  kind: str
  after: float
  status: int | None
  seconds: float | None
  said: str


class Run:
  """One process of bad_day_run, in a session of its own."""

  def __init__(self, workdir: pathlib.Path, faults: str):
    """Starts it and waits until its imports are done.

    Raises:
      RuntimeError: It ended before, or does not come so far.
    """
    command = [sys.executable, '-m', 'experiments.bad_day_run']
    command += [f'--workdir={workdir}', f'--faults={faults}']
    command += [f'--{flag}' for flag in _RUN_FLAGS.value]
    self.log = workdir.with_suffix('.log')
    self._begin = self.log.stat().st_size if self.log.exists() else 0
    with self.log.open('ab') as file:
      self.process = subprocess.Popen(
        command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
      )
    wait_for(lambda: 'begin\n' in self.said() or self.ended, 'its first line', self)
    if self.ended:
      raise RuntimeError(f'The run ended at its start: {self.said()[-2000:]}')

  @property
  def ended(self) -> bool:
    """Whether the process has ended."""
    return self.process.poll() is not None

  def said(self) -> str:
    """What this process has printed."""
    with self.log.open('rb') as file:
      file.seek(self._begin)
      return file.read().decode(errors='replace')

  def last_line(self) -> str:
    """The last line that it printed; a progress bar's line ends with a return."""
    lines = self.said().replace('\r', '\n').split('\n')
    return next((line.strip() for line in reversed(lines) if line.strip()), '')

  def wait(self, seconds: float) -> bool:
    """Waits for the end, at most so long; whether it has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
      self.process.wait(seconds)
    return self.ended

  def left_behind(self) -> list[str]:
    """The commands of its session's processes that still run."""
    found = []
    for path in pathlib.Path('/proc').glob('[0-9]*'):
      with contextlib.suppress(OSError):
        # After the name, which is in parentheses: state, parent, group, session.
        state, _, _, session = (path / 'stat').read_text().rpartition(')')[2].split()[:4]
        if int(session) == self.process.pid and state != 'Z':
          command = (path / 'cmdline').read_bytes().replace(b'\0', b' ')
          found.append(command.decode(errors='replace'))
    return found


def wait_for(condition, what: str, run: Run):
  """Waits until a condition holds.

  Raises:
    RuntimeError: It does not within --limit seconds; the process is killed.
  """
  end = time.monotonic() + _LIMIT.value
  while not condition():
    if time.monotonic() > end:
      run.process.kill()
      raise RuntimeError(f'{what} did not come in {_LIMIT.value:g} s; see {run.log}')
    time.sleep(0.05)


def disturb(run: Run, kind: str, after: float, disk: pathlib.Path) -> Outcome | None:
  """Does one thing to a run `after` seconds; None if the run had ended before."""
  if run.wait(after):
    return None
  if kind == 'fill':
    return fill(run, after, disk)
  start = time.monotonic()
  if kind == 'stop':
    os.kill(run.process.pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(run.process.pid, signal.SIGCONT)
    return Outcome(kind, after, None, None, run.last_line())
  os.kill(run.process.pid, SIGNALS[kind])
  wait_for(lambda: run.ended, f'the end after {kind}', run)
  seconds = time.monotonic() - start
  return Outcome(kind, after, run.process.returncode, seconds, run.last_line())


def fill(run: Run, after: float, disk: pathlib.Path) -> Outcome:
  """Fills the disk, until the run ends or has gone on for two steps; then frees it."""
  start, steps = time.monotonic(), len(metrics_of(disk))
  filler = disk / 'filler'
  # Without a buffer, whose rest would be written once more, and fail, as the file closes.
  with filler.open('wb', buffering=0) as file:
    try:
      while True:
        file.write(bytes(1 << 16))
    except OSError as error:
      if error.errno != errno.ENOSPC:
        raise
  wait_for(
    lambda: run.ended or len(metrics_of(disk)) > steps + 2, 'a word on the disk', run
  )
  seconds = time.monotonic() - start
  filler.unlink()
  if not run.ended:
    return Outcome('fill', after, None, None, run.last_line())
  return Outcome('fill', after, run.process.returncode, seconds, run.last_line())


def metrics_of(workdir: pathlib.Path) -> list[dict[str, float]]:
  """The lines of metrics so far; none before there is a file."""
  with contextlib.suppress(FileNotFoundError):
    return metrics.read(workdir)
  return []


def endure(
  workdir: pathlib.Path, faults: str, kinds: Sequence[str]
) -> tuple[list[Outcome], list[str]]:
  """Starts a run again and again, doing one thing to it each time, until it finishes.

  Args:
    workdir: The run's directory.
    faults: The flag of bad_day_run.
    kinds: What is done, in this order: half a second to --reach seconds after a start, or
      after what was done before.

  Returns:
    What came of it, and the commands of processes that were left behind.
  """
  rng = random.Random(f'{_SEED.value} {faults}')
  outcomes, left, kinds = [], [], list(kinds)
  while True:
    run, ended_by_us = Run(workdir, faults), False
    while kinds and not ended_by_us:
      outcome = disturb(run, kinds[0], rng.uniform(0.5, _REACH.value), workdir)
      if outcome is None:
        break
      outcomes.append(outcome)
      print(json.dumps(dataclasses.asdict(outcome)), flush=True)
      kinds.pop(0)
      ended_by_us = run.ended
    wait_for(lambda run=run: run.ended, f'the end of {workdir}', run)
    # What the process started may end a moment after it.
    until = time.monotonic() + 10
    while (remaining := run.left_behind()) and time.monotonic() < until:
      time.sleep(0.1)
    left += remaining
    if ended_by_us:
      continue
    if run.process.returncode:
      raise RuntimeError(
        f'{workdir} failed undisturbed ({run.process.returncode}): {run.last_line()}'
      )
    if kinds:
      print(f'{workdir} finished before it met {kinds}', flush=True)
    return outcomes, left


@contextlib.contextmanager
def small_disk(path: pathlib.Path) -> Iterator[bool]:
  """Mounts a small file system on `path`; gives whether that is allowed here."""
  options = ['-t', 'tmpfs', '-o', f'size={_DISK.value}m', 'tmpfs']
  path.mkdir(parents=True)
  mounted = subprocess.run(['mount', *options, path], capture_output=True).returncode == 0
  try:
    yield mounted
  finally:
    if mounted:
      kept = path.with_name(f'{path.name}.kept')
      with contextlib.suppress(shutil.Error):
        shutil.copytree(path, kept, dirs_exist_ok=True)
      subprocess.run(['umount', '--lazy', path], check=True)


def numbers(workdir: pathlib.Path) -> list[dict[str, float]]:
  """The metrics without what a clock measured."""
  lines = metrics.read(workdir)
  return [
    {k: v for k, v in x.items() if not k.startswith(('time/', 'machine/'))} for x in lines
  ]


def differences(workdir: pathlib.Path, expected: pathlib.Path) -> list[str]:
  """What two finished runs differ in: their metrics, and the bytes of their models."""
  found = []
  for mine, theirs in zip(numbers(workdir), numbers(expected), strict=True):
    names = sorted(mine.keys() | theirs.keys())
    found += [
      f'step {mine["step"]}: {name} is {mine.get(name)}, not {theirs.get(name)}'
      for name in names
      # As text: NaN is NaN, and every bit of a float is in it.
      if repr(mine.get(name)) != repr(theirs.get(name))
    ]
  models = [(p / 'model' / 'model.safetensors').read_bytes() for p in (workdir, expected)]
  return found + ['the parameters differ'] * (models[0] != models[1])


def expected_errors(workdir: pathlib.Path) -> int:
  """Episodes of a visible run whose reset or reward has a fault."""
  config = json.loads((workdir / 'config.json').read_text())
  sampler = curriculum.TaskStream(
    config_lib.Curriculum(), miniwiki.train_tasks(0, 512), seed=config['seed']
  )
  tasks = sampler.start_rollout(config['schedule']['steps'] * config['schedule']['tasks'])
  places = [bad_day_faults.fault_of(task)[0] for task in tasks]
  return config['schedule']['samples'] * sum(
    place in ('reset', 'reward') for place in places
  )


def counted(workdir: pathlib.Path) -> dict[str, float]:
  """Episodes and calls that the run's metrics count, over all steps."""
  config = json.loads((workdir / 'config.json').read_text())
  episodes = config['schedule']['tasks'] * config['schedule']['samples']
  total: dict[str, float] = {}
  for line in metrics.read(workdir):
    for name, value in line.items():
      if name.startswith('rollout/'):
        name = name.removeprefix('rollout/')
        total[name] = total.get(name, 0.0) + value * episodes
  return {name: round(value, 3) for name, value in total.items()}


def uncounted(workdir: pathlib.Path, found: dict[str, float]) -> list[str]:
  """Which faults of a visible run its metrics do not count, or its lines do not say."""
  errors = {name: n for name, n in found.items() if name.startswith('error/')}
  injected = {name: n for name, n in found.items() if name.startswith('injected/')}
  harmless = ('injected/tool/flood', 'injected/tool/lie')
  hangs = sum(n for name, n in injected.items() if '/hang' in name)
  failed = sum(n for name, n in injected.items() if name not in harmless)
  expected = expected_errors(workdir)
  problems = []
  if not found['status/error'] == sum(errors.values()) == expected:
    problems.append(f'{expected} resets and rewards had faults, counted are {errors}')
  if found['tool_timeouts'] != hangs:
    problems.append(f'{hangs} calls hung, counted are {found["tool_timeouts"]}')
  # The policy makes mistakes of its own.
  if found['tool_errors'] < failed:
    problems.append(f'{failed} calls failed, counted are {found["tool_errors"]}')
  said = workdir.with_suffix('.log').read_text(errors='replace')
  names = [*errors, *(name for name in found if name.startswith('abandoned/'))]
  return problems + [f'{name} is not said' for name in names if f'{name}: ' not in said]


def problems_of(outcomes: Sequence[Outcome], left: Sequence[str]) -> list[str]:
  """What does not hold of a run that was disturbed."""
  found = [f'left behind: {command}' for command in left]
  for outcome in outcomes:
    # Once it has said its last word, nothing is left to be saved.
    finished = outcome.said.startswith('end, with')
    if outcome.kind in ('terminate', 'interrupt'):
      if outcome.status not in (0, preemption.EXIT_STATUS) and not finished:
        found.append(f'{outcome.kind} ended with {outcome.status}: {outcome.said}')
      if outcome.seconds is not None and outcome.seconds > _ANSWER.value:
        found.append(f'{outcome.kind} was answered after {outcome.seconds:.1f} s')
    if outcome.kind == 'fill' and outcome.status is not None:
      # A run that had written all of it before the disk was full ends as ever.
      done = outcome.status == 0 and finished
      if not done and (outcome.status == 0 or 'disk is full' not in outcome.said):
        found.append(f'a full disk ended it with {outcome.status}: {outcome.said}')
  return found


def table(outcomes: dict[str, list[Outcome]]) -> str:
  """How often each thing was done to each run, and what came of it."""
  rows = []
  for name, of_run in outcomes.items():
    for kind in dict.fromkeys(outcome.kind for outcome in of_run):
      those = [outcome for outcome in of_run if outcome.kind == kind]
      ends = sorted(str(outcome.status or 'went on') for outcome in those)
      seconds = [o.seconds for o in those if o.seconds is not None]
      slowest = f'{max(seconds):.1f}' if seconds else '-'
      rows.append((name, kind, str(len(those)), ', '.join(ends), slowest))
  head = ('run', 'what', 'times', 'exit status', 'slowest end, s')
  lines = [head, ('---',) * len(head), *rows]
  return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def main(_):
  workdir = pathlib.Path(_WORKDIR.value).absolute()
  if workdir.exists():
    sys.exit(f'--workdir={workdir} exists; give another, for this day begins anew.')
  workdir.mkdir(parents=True)
  started = time.monotonic()
  calm = workdir / 'calm'
  run = Run(calm, 'none')
  wait_for(lambda: run.ended, 'the end of the undisturbed run', run)
  if run.process.returncode:
    sys.exit(f'The undisturbed run failed: {run.said()[-3000:]}')
  signals = ['kill'] * _KILLS.value + ['terminate'] * _TERMINATIONS.value
  signals += ['interrupt'] * _INTERRUPTS.value + ['stop'] * _STOPS.value
  rng = random.Random(_SEED.value)
  outcomes, problems = {}, []
  for faults in ('hidden', 'visible'):
    with small_disk(workdir / faults) if faults == 'hidden' else nothing() as mounted:
      if faults == 'hidden' and not mounted:
        print('No file system can be mounted here: the disk is not filled.', flush=True)
      kinds = signals + ['fill'] * (_FILLS.value if mounted else 0)
      rng.shuffle(kinds)
      outcomes[faults], left = endure(workdir / faults, faults, kinds)
      problems += [f'{faults}: {x}' for x in problems_of(outcomes[faults], left)]
      if faults == 'hidden':
        problems += [f'hidden: {x}' for x in differences(workdir / faults, calm)]
  found = counted(workdir / 'visible')
  problems += [f'visible: {x}' for x in uncounted(workdir / 'visible', found)]
  print(f'\n{table(outcomes)}\n')
  print(json.dumps(found, indent=2))
  report = {
    'minutes': (time.monotonic() - started) / 60,
    'outcomes': {k: [dataclasses.asdict(o) for o in v] for k, v in outcomes.items()},
    'counted': found,
    'problems': problems,
  }
  (workdir / 'report.json').write_text(json.dumps(report, indent=2) + '\n')
  print('\n'.join(problems) or 'Everything holds.')
  sys.exit(bool(problems))


@contextlib.contextmanager
def nothing() -> Iterator[bool]:
  """In place of a small disk."""
  yield False


if __name__ == '__main__':
  app.run(main)
