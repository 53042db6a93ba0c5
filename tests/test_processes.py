"""Several processes train as one: on one machine, connected as hosts are.

Run as a script, it is one of them (see `main`).
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import socket
import sys
import time

import numpy as np
import pytest
import script
import tiny

from agent_r1_jax import report, train, types
from agent_r1_jax.host import preemption, processes
from agent_r1_jax.models.files import weights
from agent_r1_jax.report import episodes, plots
from agent_r1_jax.rl import algorithms, losses
from agent_r1_jax.train import metrics

_HEARTBEAT = 10
pytestmark = pytest.mark.usefixtures('no_curves')


def _config(model, **kwargs):
  small = {
    'steps': 3,
    'tasks': 2,  # of which one of three processes gets none
    'samples': 4,
    'max_turns': 2,
    'max_turn_tokens': 6,
    'learning_rate': 3e-3,
    'rows': 4,
    'slots': 96,
    'decode_steps': 6,
    'prefill_rows': 4,
    'prefill_tokens': 32,
    'bucket': 96,
    'narrow': False,
    'microbatch': 6,
    'checkpoint_every': 1,
    'eval_every': 2,
  }
  return tiny.run_config(model=str(model), **small | kwargs)


def _run(count, workdir, model, *arguments, chips=1):
  """Runs processes, of so many devices each; returns their statuses and stderr."""
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  environment = {
    'JAX_NUM_CPU_DEVICES': str(chips),
    'AGENT_R1_HEARTBEAT_SECONDS': str(_HEARTBEAT),
  }
  if 'stuck' in arguments:
    environment['AGENT_R1_GRACE_SECONDS'] = '1'
  if count > 1:
    environment['JAX_COORDINATOR_ADDRESS'] = f'127.0.0.1:{port}'
    environment['JAX_NUM_PROCESSES'] = str(count)
  files, started = [], []
  with contextlib.ExitStack() as stack:
    for number in range(count):
      if count > 1:
        environment['JAX_PROCESS_ID'] = str(number)
      files.append([pathlib.Path(f'{workdir}.{number}.{x}') for x in ('out', 'log')])
      out, log = (stack.enter_context(file.open('w')) for file in files[-1])
      command = [__file__, workdir, model, *arguments]
      process = script.Process(*command, stdout=out, stderr=log, **environment)
      started.append(stack.enter_context(process))
    ended = [process.wait(1200) for process in started]
  return [(status, log.read_text()) for status, (_, log) in zip(ended, files)]


def _numbers(workdir):
  lines = metrics.read(workdir)
  return [
    {k: v for k, v in x.items() if not k.startswith(('time/', 'machine/'))} for x in lines
  ]


def _logged_messages(workdir):
  """The conversations of the logged episodes, by log and episode."""
  return {
    (log.name, number): [message['content'] for message in episode['messages']]
    for log in sorted((workdir / 'trajectories').glob('*.jsonl'))
    for number, episode in enumerate(episodes.read(log))
  }


def _assert_same(workdir, other):
  mine, others = _numbers(workdir), _numbers(other)
  assert [line.keys() for line in mine] == [line.keys() for line in others]
  for a, b in zip(mine, others, strict=True):
    np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=2e-4, atol=2e-6)
  trees = [weights.load(path / 'model')[1] for path in (workdir, other)]
  leaves = zip(*(tiny.jax.tree.leaves(tree) for tree in trees), strict=True)
  for a, b in leaves:
    # Adam's first steps are the gradient's sign, and noise where that is nearly 0.
    np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  likely = {i: 2.5 for i in range(30, 34)} | {tiny.chat().stop_ids[0]: 2.7}
  return tiny.save(tmp_path_factory.mktemp('model') / 'tiny', likely)


@pytest.fixture(scope='module')
def alone(model, tmp_path_factory):
  """Runs of this process, which has one device: in turn, and one rollout ahead."""
  root = tmp_path_factory.mktemp('alone')
  for name, ahead in (('in turn', '0'), ('ahead', '1')):
    tiny.within(_train, root / name, model, '', '0', ahead)
  return root


def test_three_processes_train_the_parameters_of_one(model, alone, tmp_path):
  """With slow tools in one; after two steps it dies, and the others name it.

  One process goes on, with another mesh, other sizes and a chip that only samples.
  """
  workdir = tmp_path / 'run'
  first, died, last = _run(3, workdir, model, 'dies', '0', '0', 'data=3')
  assert died[0] == -signal.SIGKILL, died[1]
  for status, said in (first, last):
    assert status == 1, said
    assert 'process 1 of 3 is lost (killed' in said
    assert 'Traceback' not in said and len(said.splitlines()) <= 3, said
  assert max(line['step'] for line in metrics.read(workdir)) == 2
  sizes = ['data=2', 'rows=2', 'microbatch=8', 'keep=1', 'checkpoint_every=2']
  (ended,) = _run(1, workdir, model, '', '1', '0', *sizes, chips=3)
  assert ended[0] == 0, ended
  _assert_same(workdir, alone / 'in turn')
  names = [{p.name for p in path.iterdir()} for path in (workdir, alone / 'in turn')]
  assert names[0] == names[1]
  conversations = _logged_messages(alone / 'in turn')
  assert min(len(texts) for texts in conversations.values()) >= 2
  assert _logged_messages(workdir) == conversations


def test_chips_that_only_sample_change_no_parameter(model, alone, tmp_path):
  """One rollout ahead, after a preemption of one of two processes; above, in turn."""
  for moment in ('preempted', ''):
    ended = _run(2, tmp_path / 'ahead', model, moment, '1', '1', chips=2)
    expected = preemption.EXIT_STATUS if moment else 0
    assert {status for status, _ in ended} == {expected}, ended
    if moment:
      assert max(line['step'] for line in metrics.read(tmp_path / 'ahead')) == 1
  _assert_same(tmp_path / 'ahead', alone / 'ahead')
  age = [line.get('train/stale_steps_max') for line in _numbers(tmp_path / 'ahead')]
  assert age == [None, 0, 1, 1]


@pytest.mark.parametrize(
  ('moment', 'status', 'all_end_with', 'word'),
  [
    ('raises', 1, 1, 'raised LookupError: no such task'),
    ('no start', 1, 1, 'raised LookupError: no index here'),
    ('stuck', preemption.EXIT_STATUS, preemption.EXIT_STATUS, 'was told to end'),
  ],
)
def test_where_one_process_ends_the_others_end_and_name_it(
  moment, status, all_end_with, word, model, tmp_path
):
  """The other one says in one line who ended, and why."""
  died, lost = reversed(_run(2, tmp_path / 'run', model, moment))
  assert died[0] == status, died[1]
  assert 'LookupError' not in word or word.partition(' ')[2] in died[1]
  assert lost[0] == all_end_with, lost[1]
  assert f'process 1 of 2 {word}' in lost[1], lost[1]
  # A collective that broke off may have been noticed before; and JAX warns at its start.
  assert 'Traceback' not in lost[1] and len(lost[1].splitlines()) <= 3, lost[1]


def test_processes_that_were_given_different_things_are_refused(model, tmp_path):
  """Before anything is loaded, in all of them, and by the names of host and field."""
  ended = _run(2, tmp_path / 'run', model, 'other')
  assert [status for status, _ in ended] == [1, 1], ended
  log = next(log for _, log in ended if 'were given different things:' in log)
  assert f'1 on {socket.gethostname()}' in log
  names = [
    line.partition(':')[0].strip() for line in log.splitlines() if line.startswith('  ')
  ]
  expected = {'algorithm.kl.coef', 'config.seed', 'config.optimizer.learning_rate'}
  expected |= {'environment.step.code', 'sets.dev', 'sets.tasks', 'tasks.ids'}
  assert expected <= {*names}, log
  assert '  config.seed: 0 in process 0; 1 in process 1\n' in log
  assert not (tmp_path / 'run').exists()


def test_where_the_first_dies_a_line_says_so(model, tmp_path):
  """JAX's service lives in it, and aborts the other with lines of its own beside ours."""
  died, lost = _run(2, tmp_path / 'run', model, 'first dies')
  assert died[0] == -signal.SIGKILL and lost[0] not in (0, preemption.EXIT_STATUS)
  log, end = pathlib.Path(f'{tmp_path / "run"}.1.log'), time.monotonic() + 600
  words = ('is lost (killed', 'aborted by JAX for want of process 0')
  # The watchdog may say it a moment after the process that it watched has ended.
  while not any(word in log.read_text() for word in words):
    assert time.monotonic() < end, log.read_text()
    time.sleep(0.1)


class _Tasks(list):
  """Where the second process raises: a data set that it cannot read on."""

  def __getitem__(self, place):
    if os.environ.get('JAX_PROCESS_ID') == '1' and _Env.moment.startswith('raises'):
      if _Env.begun:
        raise LookupError('no such task')
    return super().__getitem__(place)


class _Env:
  """An episode of two turns, which are slow in the second process."""

  moment = ''
  begun = False

  async def reset(self, task):
    _Env.begun = True
    self.turns = 0
    return task.messages

  async def step(self, reply):
    self.turns += 1
    one = '0' if self.moment.startswith('first') else '1'
    if os.environ.get('JAX_PROCESS_ID') == one:
      await asyncio.sleep(0.2)
      # The lines that are written when it happens.
      at = {'dies': 2, 'preempted': 1, 'first dies': 0, 'stuck': 0}
      if self.moment and _learned(self.moment) == at.get(self.moment.split(':')[0]):
        dies = 'dies:' in self.moment
        if self.moment.startswith('stuck'):
          # It never gets to saving.
          processes.gather = lambda mine: time.sleep(1200)
        os.kill(os.getpid(), signal.SIGKILL if dies else signal.SIGTERM)
        await asyncio.sleep(600)
    again = [{'role': 'user', 'content': 'name'}]
    return types.Step(again, len(reply) % 7 / 7.0, self.turns == 2)


def _make_env():
  if os.environ.get('JAX_PROCESS_ID') == '1' and _Env.moment.startswith('no start'):
    raise LookupError('no index here')
  return _Env()


def _learned(moment):
  """Steps whose lines are written."""
  path = pathlib.Path(moment.split(':', 1)[1]) / 'metrics.jsonl'
  lines = path.read_text().splitlines() if path.exists() else []
  return max((json.loads(line)['step'] for line in lines), default=0)


class _OtherEnv(_Env):
  """With another reward."""

  async def step(self, reply):
    return dataclasses.replace(await super().step(reply), reward=0.0)


def main(*arguments):
  plots.plot_curves = lambda runs, path, *_, **__: pathlib.Path(path).touch()
  _train(*arguments)


def _train(workdir, model, moment='', samplers='0', ahead='0', *flags):
  """Trains; `moment` names what happens to the second process.

  It dies or is preempted after the first step, raises in the first rollout, and is stuck
  in the first evaluation, in which the first process dies.
  """
  _Env.moment = moment and f'{moment}:{workdir}'
  algorithm = algorithms.reinforce_plus_plus(kl_coef=0.01)
  if ahead != '0':
    algorithm = algorithm._replace(correction=losses.token_truncated())
  apart = {'samplers': int(samplers), 'ahead': int(ahead)}
  tasks = [
    types.Task(f't{i}', [{'role': 'user', 'content': f'{"x" * i} name'}])
    for i in range(4)
  ]
  evals, make_env = tasks[:3], _make_env
  if moment == 'other' and os.environ['JAX_PROCESS_ID'] == '1':
    apart |= {'seed': 1, 'learning_rate': 1e-3}
    algorithm = algorithms.reinforce_plus_plus(kl_coef=0.02)
    tasks, make_env = tasks[::-1], _OtherEnv
    evals = [dataclasses.replace(task, answer='other') for task in evals]
  train.run(
    _config(model, **apart | {k: int(x) for k, x in (flag.split('=') for flag in flags)}),
    workdir,
    tasks=_Tasks(tasks),
    make_env=make_env,
    algorithm=algorithm,
    evals={'dev': evals},
    watcher=report.Watcher(),
  )


if __name__ == '__main__':
  main(*sys.argv[1:])
