"""Signals, to real processes: each is answered at once, and ends the process in time.

The processes are watched.py and, for whole runs, this file (see `_train`). No test looks
at a clock: the grace is made short, and a limit only ends a hang.
"""

import os
import pathlib
import signal
import sys
import time

import jax
import pytest
import script
import tiny
import watched

from agent_r1_jax import report, train, types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.host import preemption
from agent_r1_jax.rl import algorithms, updates
from agent_r1_jax.train import metrics

_LIMIT = 300
_ANSWER = ': saving and ending.'
_NOT_SAVED = 'without a new checkpoint; the same command goes on from step'


class _Process:
  """A script's process; what it says is in a file."""

  def __init__(self, log, name, *arguments, grace=3, silence=0):
    here = pathlib.Path(__file__).parent
    seconds = {'AGENT_R1_GRACE_SECONDS': str(grace)}
    seconds |= {'AGENT_R1_SILENCE_SECONDS': str(silence)}
    self.log = log
    with log.open('w') as file:
      files = {'stdout': file, 'stderr': file}
      self.process = script.Process(here / name, *arguments, **files, **seconds)

  @property
  def said(self):
    return self.log.read_text()

  def send(self, number):
    self.process.send_signal(number)

  def until(self, text):
    deadline = time.monotonic() + _LIMIT
    while text not in self.said:
      assert self.process.poll() is None and time.monotonic() < deadline, self.said
      time.sleep(0.02)

  def end(self):
    """Its status, once neither it nor a child of it is there."""
    status = self.process.wait(_LIMIT)
    deadline = time.monotonic() + _LIMIT
    while left := _holders(self.log):
      assert time.monotonic() < deadline, left
      time.sleep(0.02)
    return status


def _holders(path):
  """Processes that have the file open, as all children of the script do."""
  found = []
  for fds in pathlib.Path('/proc').glob('[0-9]*/fd'):
    try:
      if any(os.path.samefile(fd, path) for fd in fds.iterdir() if fd.exists()):
        found.append((fds.parent / 'cmdline').read_text().replace('\0', ' '))
    except OSError:
      continue  # Another user's, or gone.
  return found


@pytest.fixture
def start(tmp_path):
  started = []

  def start(thing, *run, **seconds):
    log, name = tmp_path / f'{len(started)}.log', __file__ if run else 'watched.py'
    started.append(_Process(log, name, thing, *run, **seconds))
    return started[-1]

  yield start
  for one in started:
    one.process.kill()


pytestmark = pytest.mark.skipif(
  sys.platform != 'linux', reason='the watchdog is of Linux'
)


class TestWatch:
  """The watch around code that does one thing (see watched.py)."""

  @pytest.mark.parametrize('stopped', [False, True])
  def test_what_cannot_be_interrupted_ends_after_the_grace(self, start, stopped):
    """Its main thread is in a program of XLA; also where it was stopped meanwhile."""
    process = start('xla')
    process.until('up')
    if stopped:
      process.send(signal.SIGSTOP)
    process.send(signal.SIGTERM)
    if stopped:
      process.send(signal.SIGCONT)
    assert process.end() == preemption.EXIT_STATUS
    assert process.said.count(f'SIGTERM{_ANSWER}') == 1
    assert f'ended during a program {_NOT_SAVED} 7\n' in process.said

  def test_a_second_ctrl_c_ends_at_once(self, start):
    process = start('xla', grace=10 * _LIMIT)
    process.until('up')
    process.send(signal.SIGINT)
    process.until(f'Ctrl-C{_ANSWER}')
    while process.process.poll() is None and 'again' not in process.said:
      process.send(signal.SIGINT)  # One that comes too soon is the same.
      time.sleep(0.1)
    assert process.end() == 128 + signal.SIGINT
    assert 'Ctrl-C again: ended at once' in process.said

  @pytest.mark.parametrize('asked', [True, False])
  def test_code_that_holds_the_interpreter_is_named_and_killed(self, start, asked):
    """At a signal; and without one after a long silence."""
    process = start('regex', silence=0 if asked else 2)
    process.until('up')
    if asked:
      process.send(signal.SIGTERM)
    assert process.end() == -signal.SIGKILL
    reason = 'no answer to SIGTERM' if asked else 'no sign of life'
    assert reason in process.said and 'holds the interpreter' in process.said
    assert 'in hold_the_interpreter' in process.said  # where it is

  def test_a_stopped_process_is_not_silent(self, start):
    process = start('print', silence=5)
    process.until('up')
    process.send(signal.SIGSTOP)
    time.sleep(7)  # A program that minds would have been killed by now.
    process.send(signal.SIGCONT)
    process.until('still up')
    process.send(signal.SIGTERM)
    assert process.end() == preemption.EXIT_STATUS
    assert 'no sign of life' not in process.said

  @pytest.mark.parametrize(('moment', 'status'), [('exit', 0), ('kill', -9)])
  def test_an_end_without_a_word_gets_one(self, start, moment, status):
    process = start(moment)
    assert process.end() == status
    assert 'ended without a word' in process.said

  def test_a_forked_child_has_signals_of_its_own(self, start):
    """It dies of them, and its parent is not told to end by them."""
    process = start('fork')
    assert process.end() == 0
    assert f'child ended with {signal.SIGTERM:d}, given False' in process.said
    assert _ANSWER not in process.said and 'without a word' not in process.said

  def test_a_watch_inside_a_watch_is_that_watch(self):
    with preemption.watch() as outer, preemption.watch() as inner:
      assert inner is outer
    with preemption.watch() as another:
      assert another is not outer

  def test_after_a_watch_the_handlers_are_those_before_it(self):
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    with preemption.watch():
      assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  likely = {i: 2.5 for i in range(30, 34)} | {tiny.chat().stop_ids[0]: 2.7}
  return tiny.save(tmp_path_factory.mktemp('model') / 'tiny', likely)


class TestTraining:
  def test_sigterm_in_a_cold_compilation_waits_for_one_program_alone(
    self, start, model, tmp_path
  ):
    """It does not wait for all programs."""
    process = start('compilation', tmp_path / 'run', model, grace=_LIMIT)
    assert process.end() == preemption.EXIT_STATUS
    assert f'ended during compilation {_NOT_SAVED} 0\n' in process.said
    compiled = process.said.count('compiled a program')
    assert 1 <= compiled < 5, process.said

  def test_sigterm_in_an_endless_update_ends_unsaved_and_the_command_goes_on(
    self, start, model, tmp_path
  ):
    """And the same command goes on from the checkpoint before it."""
    process = start('update', tmp_path / 'run', model)
    process.until('in the update')
    while not (tmp_path / 'run/checkpoints/1').exists():  # It is written meanwhile.
      assert process.process.poll() is None, process.said
      time.sleep(0.02)
    process.send(signal.SIGTERM)
    assert process.end() == preemption.EXIT_STATUS
    assert f'ended during an update {_NOT_SAVED} 1\n' in process.said
    process = start('', tmp_path / 'run', model)
    assert process.end() == 0, process.said
    assert [line['step'] for line in metrics.read(tmp_path / 'run')] == [1, 2]


def _written(workdir):
  path = pathlib.Path(workdir) / 'metrics.jsonl'
  return path.exists() and len(path.read_text().splitlines())


def _train(moment, workdir, model):
  learn = updates.learn

  def learn_for_hours(*args, **kwargs):
    if _written(workdir):
      print('in the update', flush=True)
      watched.run_for_hours()
    return learn(*args, **kwargs)

  def on_compilation(event, duration_secs, **kwargs):
    if event == '/jax/core/compile/backend_compile_duration' and watching.phase == (
      'compilation'
    ):
      if not watching.is_requested():
        # In the midst of the warm-up, however fast the machine is.
        os.kill(os.getpid(), signal.SIGTERM)
      print('compiled a program', flush=True)

  if moment == 'update':
    updates.learn = learn_for_hours
  if moment == 'compilation':
    jax.config.update('jax_enable_compilation_cache', False)
    jax.monitoring.register_event_duration_secs_listener(on_compilation)
  compiles = moment == 'compilation'
  config = tiny.run_config(
    model=model,
    **{'steps': 2, 'tasks': 2, 'samples': 2, 'eval_every': 0, 'checkpoint_every': 1},
    **{'max_turns': 1, 'max_turn_tokens': 6, 'rows': 4, 'slots': 96, 'decode_steps': 4},
    **{'prefill_rows': 4, 'prefill_tokens': 32, 'microbatch': 2},
    # Many programs only where they are what takes long.
    bucket=48 if compiles else 96,
    narrow=compiles,
  )
  tasks = [
    types.Task(f't{i}', [{'role': 'user', 'content': f'{"x" * i} name'}])
    for i in range(3)
  ]
  reward = lambda task, messages: len(messages[-1]['content']) % 3 / 1.0
  make_env = lambda: env_lib.ToolEnv([], reward)
  with preemption.watch() as watching:
    train.run(
      config,
      workdir,
      tasks=tasks,
      make_env=make_env,
      algorithm=algorithms.grpo(),
      watcher=report.Watcher(),
    )


if __name__ == '__main__':
  _train(*sys.argv[1:])
