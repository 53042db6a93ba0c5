"""launch/run.sh with real processes: what it restarts, and the signals it passes on."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest
from test_launch import LAUNCH, launch

TOY = """
import pathlib, signal, sys, time
log, status = pathlib.Path(sys.argv[1]), sys.argv[2]
log.open('a').write('x')

def saved(*_):
  time.sleep(0.3)
  sys.exit(75)

signal.signal(signal.SIGTERM, saved)
print('up', flush=True)
if status == 'killed':
  signal.raise_signal(signal.SIGKILL)
if status == 'waits':
  # In pieces: a signal just before a sleep begins is handled only when it ends.
  for _ in range(12000):
    time.sleep(0.1)
sys.exit(int(status))
"""


@pytest.fixture
def heard():
  """A shell's background job, as this suite may be, ignores Ctrl-C; bash keeps that."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


@pytest.fixture
def start(tmp_path, heard):
  """Starts the toy, an experiment or a script; its `log` has one letter a start."""
  for folder, file in (('experiments', 'toy.py'), ('my project', 'mine.py')):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / file).write_text(TOY)
  shutil.copytree(LAUNCH, tmp_path / 'launch')

  def start(status, *wrapper, name='toy', **variables):
    environment = os.environ | {'PYTHON': sys.executable, 'PAUSE': '0.1'} | variables
    environment.pop('PYTHONPATH', None)  # The experiments there are others.
    return subprocess.Popen(
      [*wrapper, tmp_path / 'launch/run.sh', name, tmp_path / 'log', status],
      cwd=tmp_path / 'my project',
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      start_new_session=True,
    )

  return start


def count_starts(tmp_path):
  return len((tmp_path / 'log').read_text())


@pytest.mark.parametrize(
  ('name', 'status', 'restarts', 'ended', 'times'),
  [
    ('toy', '0', '3', 0, 1),
    ('toy', '75', '2', 75, 3),
    ('toy', 'killed', '1', 128 + signal.SIGKILL, 2),
    ('mine.py', '3', '0', 3, 1),
  ],
)
def test_status_and_restarts(start, tmp_path, name, status, restarts, ended, times):
  with start(status, name=name, RESTARTS=restarts) as process:
    _, said = process.communicate(timeout=600)
  assert (process.returncode, count_starts(tmp_path)) == (ended, times)
  assert said.count(f'{name} ended with {ended}') == times - 1


@pytest.mark.parametrize(
  ('name', 'sent', 'times', 'send'),
  [
    ('toy', signal.SIGTERM, 1, os.kill),
    ('toy', signal.SIGINT, 3, os.kill),
    ('mine.py', signal.SIGTERM, 3, os.kill),
    # As Slurm and a terminal's Ctrl-C do it.
    ('toy', signal.SIGTERM, 1, os.killpg),
  ],
)
def test_a_signal_is_passed_on_and_nothing_restarted(
  start, tmp_path, name, sent, times, send
):
  with start('waits', name=name, RESTARTS='3') as process:
    assert process.stdout.readline() == 'up\n'
    for _ in range(times):
      send(process.pid, sent)
      time.sleep(0.05)
    assert process.wait(timeout=600) == 75
  assert count_starts(tmp_path) == 1


def test_a_signal_in_the_pause_before_a_restart_ends_it(start, tmp_path):
  with start('75', RESTARTS='3', PAUSE='1200') as process:
    assert 'ended with 75' in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=600) == 75
  assert count_starts(tmp_path) == 1


def test_process_1_of_a_container_passes_signals_on(start, tmp_path):
  """As in a container, where a signal without a handler would be lost."""
  namespace = ('unshare', '--user', '--map-root-user', '--pid', '--fork')
  if not shutil.which('unshare') or subprocess.run([*namespace, 'true']).returncode:
    pytest.skip('this machine gives no process namespaces')
  with start('waits', *namespace, RESTARTS='3') as process:
    assert process.stdout.readline() == 'up\n'
    children = pathlib.Path(f'/proc/{process.pid}/task/{process.pid}/children')
    (first,) = children.read_text().split()  # process 1 of its namespace
    os.kill(int(first), signal.SIGTERM)
    assert process.wait(timeout=600) == 75
  assert count_starts(tmp_path) == 1


@pytest.mark.parametrize('launcher', ['run.sh', 'local.sh'])
def test_a_script_runs_where_its_user_is_and_imports_this_checkout(tmp_path, launcher):
  """local.sh makes no environment: the checkout is a copy whose .venv is there."""
  checkout, folder = tmp_path / 'checkout', tmp_path / 'mine'
  shutil.copytree(LAUNCH, checkout / 'launch')
  (checkout / 'agent_r1_jax').mkdir()
  (checkout / 'agent_r1_jax' / '__init__.py').write_text('HERE = "the copy"')
  (checkout / 'Makefile').write_text('.venv/installed:\n\ttouch made\n')
  (checkout / '.venv' / 'bin').mkdir(parents=True)
  python = checkout / '.venv' / 'bin' / 'python'
  python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
  python.chmod(0o755)
  (folder / 'in').mkdir(parents=True)
  (folder / 'in' / 'mine.py').write_text(
    'import os, sys, agent_r1_jax\n'
    'print(os.getcwd(), agent_r1_jax.HERE, sys.argv[1:], sep="|")'
  )
  launchers = checkout / 'launch'
  words = ('in/mine.py', '--workdir=runs/a b')
  done = launch(launcher, *words, cwd=folder, launchers=launchers)
  assert done.returncode == 0, done.stderr
  said = done.stdout.splitlines()[-1]
  assert said == f"{folder}|the copy|['--workdir=runs/a b']"
  assert (checkout / 'made').exists() == (launcher == 'local.sh')
  done = launch(launcher, 'none.py', cwd=folder, launchers=launchers)
  assert done.returncode == 2 and f'no file {folder}/none.py' in done.stderr


def test_without_an_experiment_it_lists_them():
  done = launch('run.sh')
  assert done.returncode == 2 and 'miniwiki.search' in done.stderr
  done = launch('run.sh', 'bench', DRY_RUN='1')
  assert '-m experiments.bench' in done.stdout
  done = launch('run.sh', 'miniwiki.serch', RESTARTS='3', PAUSE='0')
  assert done.returncode == 2 and 'no experiment is called miniwiki.serch' in done.stderr
  assert 'miniwiki.search' in done.stderr and 'restarts left' not in done.stderr
