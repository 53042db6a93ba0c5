"""experiments/bench.py runs, and what it counts holds."""

import json
import subprocess
import sys

import pytest


def run(*args):
  command = [sys.executable, '-m', 'experiments.bench', '--shape=tiny', *args]
  sizes = ['--rows=16', '--prompt=24', '--reply=8', '--microbatch=4', '--repeats=1']
  return subprocess.run([*command, *sizes], capture_output=True, text=True, timeout=900)


@pytest.fixture(scope='module')
def lines():
  done = run('--what=no_work_twice,programs')
  assert done.returncode == 0, done.stderr
  found = map(json.loads, done.stdout.splitlines())
  return {line['measurement']: line for line in found}


def test_nothing_is_computed_twice(lines):
  found = lines['no_work_twice']
  assert found['prefilled'] + found['sampled'] == found['distinct']
  assert found['forked'] == 24 * (16 - 16 // 8)
  assert found['ratio'] == 1.0


def test_ragged_episodes_compile_nothing(lines):
  found = lines['programs']
  assert found['compiled_by_warm_up'] == found['programs'] > 0
  assert found['compiled_by_ragged_episodes'] == 0


@pytest.mark.parametrize('flag', ['--shape=none', '--what=none'])
def test_unknown_names_are_refused(flag):
  done = run(flag)
  assert done.returncode == 1
  assert 'there are' in done.stdout + done.stderr
