"""The worst day: a training run while everything goes wrong that can.

Three runs of bad_day.py: one undisturbed; one with faults that the policy does not see,
which is also killed and stopped for a while, and whose disk fills and is freed; and one
with faults that the policy sees, which is told to end.

The disk is a small file system in memory, mounted on the second run's workdir; where
mounting is not allowed, its disk is not filled. AGENT_R1_BAD_DAY=4 makes a day of 32
steps with 4 of each disturbance to both (docs/results/reliability.md);
AGENT_R1_BAD_DAY_SEED chooses their order and times.
"""

import contextlib
import errno
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import time

import bad_day
import pytest
import script

from agent_r1_jax import config as config_lib
from agent_r1_jax.host import preemption
from agent_r1_jax.train import curriculum, metrics
from experiments.miniwiki import tasks as miniwiki

TIMES = int(os.environ.get('AGENT_R1_BAD_DAY', '0'))
SEED = os.environ.get('AGENT_R1_BAD_DAY_SEED', '0')
# What is done to a run, how often, and within how many seconds of its start. On a short
# day each is done to one of the two runs.
ALL = ['kill', 'terminate', 'interrupt', 'stop'] * TIMES
HIDDEN, VISIBLE = ALL or ['kill', 'stop'], ALL or ['terminate']
FILLS, REACH = TIMES or 1, 8.0 if TIMES else 4.0
# A signal is answered within so many seconds, also on a machine that does other work.
ANSWER = 10.0 if TIMES else 120.0
LIMIT = 1800.0
PYTHONPATH = f'{script.ROOT}:{script.ROOT / "tests"}'
SIGNALS = {
  'kill': signal.SIGKILL,
  'terminate': signal.SIGTERM,
  'interrupt': signal.SIGINT,
}
SMALL = script.QUICKSTART | {
  'engine.slots': 256,
  'engine.bucket': 256,
  'batch.row_tokens': 256,
  'limits.max_turns': 2,
  'schedule.steps': 3,
  'schedule.eval_every': 3,
  'schedule.tasks': 4,
  'schedule.samples': 2,
  'limits.reset_seconds': 5.0,
}


class Run:
  """One process of bad_day.py, in a session of its own, whose imports are done."""

  def __init__(self, workdir: pathlib.Path, faults: str):
    self.log = workdir.with_suffix('.log')
    self._begin = self.log.stat().st_size if self.log.exists() else 0
    flags = [] if TIMES else script.config_flags(SMALL)
    command = ['-c', 'import bad_day; bad_day.start()', f'--workdir={workdir}']
    command += [f'--faults={faults}', *flags]
    with self.log.open('ab') as file:
      self.process = script.Process(
        *command, stdout=file, stderr=file, PYTHONPATH=PYTHONPATH
      )
    self.wait_for(lambda: 'begin\n' in self.read() or self.ended, 'its first line')
    assert not self.ended, self.read()[-2000:]

  @property
  def ended(self) -> bool:
    return self.process.poll() is not None

  def read(self) -> str:
    """What this process has printed."""
    with self.log.open('rb') as file:
      file.seek(self._begin)
      return file.read().decode(errors='replace')

  def last_line(self) -> str:
    """The last line that it printed; a progress bar's line ends with a return."""
    lines = self.read().replace('\r', '\n').split('\n')
    return next((line.strip() for line in reversed(lines) if line.strip()), '')

  def wait(self, seconds: float) -> bool:
    """Waits for the end, at most so long; whether it has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
      self.process.wait(seconds)
    return self.ended

  def wait_for(self, condition, what: str):
    end = time.monotonic() + LIMIT
    while not condition():
      if time.monotonic() > end:
        self.process.kill()
        pytest.fail(f'{what} did not come in {LIMIT:g} s; see {self.log}')
      time.sleep(0.05)

  def left_behind(self) -> list[str]:
    """The commands of its session's processes that still run."""
    found = []
    for path in pathlib.Path('/proc').glob('[0-9]*'):
      with contextlib.suppress(OSError):
        # After the name, which is in parentheses: state, parent, group, session.
        state, _, _, session = (path / 'stat').read_text().rpartition(')')[2].split()[:4]
        if int(session) == self.process.pid and state != 'Z':
          found.append((path / 'cmdline').read_text(errors='replace'))
    return found


def disturb(run: Run, kind: str, workdir: pathlib.Path) -> list[str]:
  """Does one thing to a run that goes on; returns what does not hold then."""
  start = time.monotonic()
  if kind == 'fill':
    fill(run, workdir)
  elif kind == 'stop':
    run.process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    run.process.send_signal(signal.SIGCONT)
  else:
    run.process.send_signal(SIGNALS[kind])
    run.wait_for(lambda: run.ended, f'the end after {kind}')
  seconds, status, said = time.monotonic() - start, run.process.poll(), run.last_line()
  print(f'{workdir.name}: {kind}: {status}, {seconds:.1f} s: {said}')
  # Once it has said its last word, nothing is left to be saved.
  finished = said.startswith('end, with')
  found = []
  if kind in ('terminate', 'interrupt'):
    if status not in (0, preemption.EXIT_STATUS) and not finished:
      found.append(f'{kind} ended with {status}: {said}')
    if seconds > ANSWER:
      found.append(f'{kind} was answered after {seconds:.1f} s')
  # A run that had written all of it before the disk was full ends as ever.
  if kind == 'fill' and status is not None and not (status == 0 and finished):
    if status == 0 or 'disk is full' not in said:
      found.append(f'a full disk ended it with {status}: {said}')
  return found


def fill(run: Run, workdir: pathlib.Path):
  """Fills the disk until the run ends or has gone on for two steps; then frees it."""

  def count_steps() -> int:
    with contextlib.suppress(FileNotFoundError):
      return len(metrics.read(workdir))
    return 0

  steps, filler = count_steps(), workdir / 'filler'
  # Without a buffer, whose rest would be written once more, and fail, as the file closes.
  with filler.open('wb', buffering=0) as file, pytest.raises(OSError) as error:
    while True:
      file.write(bytes(1 << 16))
  assert error.value.errno == errno.ENOSPC
  run.wait_for(lambda: run.ended or count_steps() > steps + 2, 'a word on the disk')
  filler.unlink()


def endure(workdir: pathlib.Path, faults: str, kinds: list[str]) -> list[str]:
  """Starts a run again and again, doing things to it, until it finishes.

  Returns:
    What did not hold.
  """
  rng, found, kinds = random.Random(f'{SEED} {faults}'), [], [*kinds]
  ended_by_us = True
  while ended_by_us:
    run, ended_by_us = Run(workdir, faults), False
    with run.process:
      while kinds and not ended_by_us and not run.wait(rng.uniform(0.5, REACH)):
        found += disturb(run, kinds.pop(0), workdir)
        ended_by_us = run.ended
      run.wait_for(lambda run=run: run.ended, f'the end of {workdir}')
      # What the process started may end a moment after it.
      until = time.monotonic() + 10
      while (remaining := run.left_behind()) and time.monotonic() < until:
        time.sleep(0.1)
      found += [f'left behind: {command}' for command in remaining]
      assert ended_by_us or run.process.returncode == 0, run.read()[-3000:]
  return found


@contextlib.contextmanager
def mount_small_disk(path: pathlib.Path):
  """Mounts a file system of 128 MB on `path`; gives whether that is allowed here."""
  command = ['mount', '-t', 'tmpfs', '-o', 'size=128m', 'tmpfs', path]
  path.mkdir()
  mounted = subprocess.run(command, capture_output=True).returncode == 0
  try:
    yield mounted
  finally:
    if mounted:
      copy = path.with_name('copy')
      shutil.copytree(path, copy)
      subprocess.run(['umount', '--lazy', path], check=True)


def read_numbers(workdir: pathlib.Path) -> list[dict[str, str]]:
  """The metrics but a clock's; as text, in which NaN is NaN and every bit counts."""
  return [
    {k: repr(v) for k, v in line.items() if not k.startswith(('time/', 'machine/'))}
    for line in metrics.read(workdir)
  ]


@pytest.fixture(scope='module')
def calm(tmp_path_factory) -> pathlib.Path:
  """The workdir of the run without faults."""
  workdir = tmp_path_factory.mktemp('day') / 'calm'
  assert endure(workdir, 'none', []) == []
  return workdir


def test_a_run_with_hidden_faults_has_the_bits_of_a_calm_one(calm, tmp_path):
  workdir, rng = tmp_path / 'hidden', random.Random(SEED)
  with mount_small_disk(workdir) as mounted:
    kinds = HIDDEN + ['fill'] * FILLS * mounted
    rng.shuffle(kinds)
    assert endure(workdir, 'hidden', kinds) == []
    assert read_numbers(workdir) == read_numbers(calm)
    models = [p / 'model' / 'model.safetensors' for p in (workdir, calm)]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_a_run_with_visible_faults_counts_every_one(calm, tmp_path):
  workdir = tmp_path / 'visible'
  kinds = random.Random(SEED).sample(VISIBLE, len(VISIBLE))
  assert endure(workdir, 'visible', kinds) == []
  found = _count(workdir)
  errors = {name: n for name, n in found.items() if name.startswith('error/')}
  injected = {name: n for name, n in found.items() if name.startswith('injected/')}
  harmless = ('injected/tool/flood', 'injected/tool/lie')
  expected = _expected_errors(workdir)
  assert found['status/error'] == sum(errors.values()) == expected > 0, errors
  assert found['tool_timeouts'] == sum(n for k, n in injected.items() if '/hang' in k)
  # The policy makes mistakes of its own.
  assert found['tool_errors'] >= sum(n for k, n in injected.items() if k not in harmless)
  assert found['tool_errors'] > 0
  said = workdir.with_suffix('.log').read_text(errors='replace')
  names = [*errors, *(name for name in found if name.startswith('abandoned/'))]
  assert [name for name in names if f'{name}: ' not in said] == []


def _expected_errors(workdir: pathlib.Path) -> int:
  """Episodes of a visible run whose reset or reward has a fault."""
  config = json.loads((workdir / 'config.json').read_text())
  tasks = curriculum.TaskStream(
    config_lib.Curriculum(), miniwiki.train_tasks(0, 512), seed=config['seed']
  ).start_rollout(config['schedule']['steps'] * config['schedule']['tasks'])
  places = [bad_day.fault_of(task)[0] for task in tasks]
  return config['schedule']['samples'] * sum(p in ('reset', 'reward') for p in places)


def _count(workdir: pathlib.Path) -> dict[str, float]:
  """Episodes and calls that the run's metrics count, over all steps."""
  schedule = json.loads((workdir / 'config.json').read_text())['schedule']
  total: dict[str, float] = {}
  for line in metrics.read(workdir):
    for name, value in line.items():
      if name.startswith('rollout/'):
        name = name.removeprefix('rollout/')
        total[name] = total.get(name, 0.0) + value
  episodes = schedule['tasks'] * schedule['samples']
  return {name: round(value * episodes, 3) for name, value in total.items()}
