"""How runs end: killed, preempted, on a full disk, without their checkpoints.

Run as a script, it trains until it kills itself (see `main`). What a run resumes with, by
feature, is test_resume.py.
"""

import os
import pathlib
import random
import shutil
import signal
import sys
import time
import warnings

import mounts
import pytest
import runs
import script

from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.host import checkpoint, preemption
from agent_r1_jax.models.files import weights
from agent_r1_jax.rl import learner
from agent_r1_jax.rollout import store as store_lib
from agent_r1_jax.train import metrics

pytestmark = pytest.mark.usefixtures('no_curves', 'traced_once')
model, whole = runs.model, runs.whole


def _wait_for_lock(workdir, process):
  """Waits until the process has begun to train."""
  lock = workdir / '.lock'
  while process.poll() is None:
    if lock.exists() and f'process {process.pid} ' in lock.read_text():
      return
    time.sleep(0.05)


def _start(workdir, model, moment):
  """Starts a process that trains as `whole` does, until the moment comes."""
  with pathlib.Path(f'{workdir}.log').open('w') as log:
    return script.Process(__file__, workdir, model, moment, stdout=log, stderr=log)


def _step_reached(workdir):
  return max(line['step'] for line in metrics.read(workdir))


def _check_and_forget(workdir, expected):
  """Checks a run that ended between two kills, and deletes it: the next starts anew."""
  ours, theirs = (weights.load(path / 'model')[1] for path in (workdir, expected))
  runs.assert_equal(ours, theirs)
  assert runs.read_numbers(workdir) == runs.read_numbers(expected)
  shutil.rmtree(workdir)


def _assert_resumes(workdir, model, whole):
  """The same command ends with the parameters and the numbers of an unbroken run."""
  params, other = whole
  runs.assert_equal(runs.run(runs.config(model), workdir), params)
  assert runs.read_numbers(workdir) == runs.read_numbers(other)
  runs.assert_equal(weights.load(workdir / 'model')[1], params)


def test_a_process_killed_and_told_to_end_is_uninterrupted(whole, model, tmp_path):
  """Killed while it saves, then told to end in an update."""
  for moment, status, step in (
    ('save', -signal.SIGKILL, 2),
    ('update', preemption.EXIT_STATUS, 3),
  ):
    with _start(tmp_path / 'run', model, moment) as process:
      ended = process.wait(1200)
    said = (tmp_path / 'run.log').read_text()
    assert ended == status, said
    assert ('saved step 4' in said) == (status == preemption.EXIT_STATUS)
    assert _step_reached(tmp_path / 'run') == step
  _assert_resumes(tmp_path / 'run', model, whole)


def test_killed_at_random_moments_is_uninterrupted(whole, model, tmp_path):
  """AGENT_R1_KILLS=50 for the long version."""
  rng, kills = random.Random(0), 0
  while kills < int(os.environ.get('AGENT_R1_KILLS', 1)):
    with _start(tmp_path / 'run', model, 'none') as process:
      _wait_for_lock(tmp_path / 'run', process)
      time.sleep(rng.uniform(0, 3))
    status = process.returncode
    assert status in (0, -signal.SIGKILL)
    kills += status != 0
    if status == 0:
      _check_and_forget(tmp_path / 'run', whole[1])
  _assert_resumes(tmp_path / 'run', model, whole)


@pytest.fixture
def at_episode(monkeypatch):
  """Calls a function when so many episodes have begun; gives the list of their tasks."""
  reset = env_lib.ToolEnv.reset

  def install(number, act):
    begun = []

    async def reset_and_act(self, task):
      begun.append(task)
      if len(begun) == number:
        act()
      return await reset(self, task)

    monkeypatch.setattr(env_lib.ToolEnv, 'reset', reset_and_act)
    return begun

  return install


def test_episodes_that_had_ended_are_not_played_again(model, tmp_path, at_episode):
  """Nor is half an episode read that a kill left."""
  config = runs.config(model, steps=2, checkpoint_every=1, keep_rollouts=True)
  one, other = tmp_path / 'one', tmp_path / 'other'
  # The last episode of the first rollout, after an evaluation of two.
  at_episode(10, lambda: shutil.copytree(one, other))
  params = runs.run(config, one)
  (path,) = (other / 'rollouts' / '0').iterdir()
  path.write_bytes(path.read_bytes()[:-1])
  kept = len(list(store_lib._read(path)))
  begun = at_episode(0, None)
  runs.assert_equal(runs.run(config, other), params)
  assert runs.read_numbers(other) == runs.read_numbers(one)
  # Two evaluations of two tasks, two rollouts of eight episodes.
  assert kept >= 2 and len(begun) == 2 * 2 + 2 * 8 - kept
  assert {p.name for p in (other / 'rollouts').iterdir()} == {'1'}


@pytest.mark.filterwarnings('ignore:tensorboard')
@pytest.mark.filterwarnings('ignore:finished episodes are not written')
@pytest.mark.parametrize('moment', [1, 14])
def test_a_full_disk_ends_it_and_the_same_command_goes_on(
  whole, model, tmp_path, moment, at_episode
):
  """In the first evaluation, or in the second rollout; told, and nothing hangs."""
  fillers = []
  at_episode(moment, lambda: fillers.append(mounts.fill(tmp_path / 'run')))
  config = runs.config(model, keep_rollouts=True)
  with mounts.mounted(tmp_path / 'run', 'size=64m') as workdir:
    with pytest.raises(OSError, match=r'the disk is full \(0\.0 MB free'):
      runs.run(config, workdir)
    fillers[0].unlink()
    runs.assert_equal(runs.run(config, workdir), whole[0])
    assert runs.read_numbers(workdir) == runs.read_numbers(whole[1])


def test_where_checkpoints_are_lost_a_run_is_refused_and_keeps_its_metrics(
  whole, model, tmp_path
):
  """Deleted, or damaged: whatever is started, no line of metrics is lost."""
  shutil.copytree(whole[1], tmp_path / 'run')
  lines = (tmp_path / 'run' / 'metrics.jsonl').read_bytes()
  checkpoints = tmp_path / 'run' / 'checkpoints'
  checkpoints.rename(tmp_path / 'away')
  with pytest.raises(ValueError, match='step 2 was completed, and there is no checkpo'):
    runs.run(runs.config(model), tmp_path / 'run')
  shutil.rmtree(checkpoints)
  (tmp_path / 'away').rename(checkpoints)
  for path in checkpoints.glob('*/arrays/manifest.ocdbt'):
    path.write_bytes(path.read_bytes()[:-1])
  for start in range(2):
    with warnings.catch_warnings(record=True) as said:
      warnings.simplefilter('always')
      with pytest.raises(ValueError, match=r'can be read; .* 2\.unreadable, 4\.unread'):
        runs.run(runs.config(model), tmp_path / 'run')
    assert sum('cannot be read' in str(w.message) for w in said) == 3 * (start == 0)
  assert (tmp_path / 'run' / 'metrics.jsonl').read_bytes() == lines


def test_a_finished_run_goes_on_for_more_steps(whole, model, tmp_path):
  params, workdir = whole
  shutil.copytree(workdir, tmp_path / 'more')
  (tmp_path / 'more' / 'made_of.json').unlink()  # as of an earlier version
  runs.assert_equal(runs.run(runs.config(model), tmp_path / 'more'), params)
  assert runs.read_numbers(tmp_path / 'more') == runs.read_numbers(workdir)
  runs.run(runs.config(model, steps=6), tmp_path / 'more')
  assert runs.read_numbers(tmp_path / 'more')[:-1] == runs.read_numbers(workdir)
  assert metrics.read(tmp_path / 'more')[-1]['step'] == 6


def main(workdir, model, moment):
  """Trains as `whole` does, until the moment comes."""
  save, step = checkpoint.Checkpointer.save, learner.optim_step

  def save_and_die(self, *args):
    save(self, *args)
    os.kill(os.getpid(), signal.SIGKILL)

  def step_and_end(state, *args, **kwargs):
    out = step(state, *args, **kwargs)
    if int(out[0].step) == 4:
      os.kill(os.getpid(), signal.SIGTERM)
    return out

  if moment == 'save':
    checkpoint.Checkpointer.save = save_and_die
  if moment == 'update':
    learner.optim_step = step_and_end
  # Signals reach the main thread only.
  runs.run_here(runs.config(model), workdir)


if __name__ == '__main__':
  main(*sys.argv[1:])
