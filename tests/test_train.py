"""Training: it learns, it says what is wrong, and after a kill it goes on exactly.

Run as a script, it trains until it kills itself (see `main`).
"""

import asyncio
import dataclasses
import functools
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import time
from unittest import mock
import warnings

import httpx2
import jax
import mounts
import numpy as np
import pytest
import script
import tiny

from agent_r1_jax import report, train, types
from agent_r1_jax.agent import calls
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.engine import drafts as drafts_lib
from agent_r1_jax.guided import critic
from agent_r1_jax.host import checkpoint, preemption
from agent_r1_jax.host import workdir as workdir_lib
from agent_r1_jax.models.files import weights
from agent_r1_jax.report import episodes as episodes_lib
from agent_r1_jax.rl import algorithms, learner
from agent_r1_jax.rollout import rollout
from agent_r1_jax.rollout import store as store_lib
from agent_r1_jax.serve import program
from agent_r1_jax.train import loop, metrics
from agent_r1_jax.train.plan import setup

_GRPO = algorithms.grpo(kl_coef=0.01)
pytestmark = pytest.mark.usefixtures('no_curves', 'traced_once')
_PPO = algorithms.ppo(kl_coef=0.0)
_WORDS = (' the', ' city', ' capital', ' is')


def _config(model, **kwargs):
  small = {
    'steps': 5,
    'tasks': 2,
    'samples': 4,
    'max_turns': 3,
    'max_turn_tokens': 6,
    'learning_rate': 3e-3,
    'rows': 4,
    'slots': 96,
    'decode_steps': 4,
    'prefill_rows': 4,
    'prefill_tokens': 32,
    'bucket': 96,
    'narrow': False,  # for the sake of the last bit
    'microbatch': 2,
    'checkpoint_every': 2,
    'eval_every': 2,
  }
  return tiny.run_config(model=str(model), **small | kwargs)


def _likely():
  """Returns the biases of a policy that says one of four words and ends its reply."""
  tokenizer = tiny.chat().tokenizer
  ids = [tokenizer.encode(word, add_special_tokens=False) for word in _WORDS]
  assert all(len(i) == 1 for i in ids)
  return {i: 2.5 for (i,) in ids} | {tiny.chat().stop_ids[0]: 2.7}


@pytest.fixture(scope='session')
def model(tmp_path_factory):
  return tiny.save(tmp_path_factory.mktemp('model') / 'tiny', _likely())


def _tasks(n=3):
  return [
    types.Task(f't{i}', [{'role': 'user', 'content': f'{"x" * i} name'}])
    for i in range(n)
  ]


@tool_lib.tool
async def look(seconds: float) -> str:
  """Looks something up.

  Args:
    seconds: How long it takes.
  """
  await asyncio.sleep(seconds)
  return 'it is'


def _parse(reply):
  return (
    [calls.ToolCall('look', {'seconds': 0.001 * len(reply)})]
    if 'capital' in reply
    else []
  )


def _reward(task, messages):
  return {'city': float(' city' in messages[-1]['content']), 'length': -0.01}


def _make_env(tools=(look,), reward=_reward):
  return env_lib.ToolEnv(tools, reward, parse=_parse)


def _run(config, workdir, **kwargs):
  return tiny.within(_train, config, workdir, **kwargs)


def _train(config, workdir, algorithm=_GRPO, make_env=_make_env, **kwargs):
  kwargs = {'tasks': _tasks(), 'evals': {'dev': _tasks(2)}} | kwargs
  return train.run(
    config,
    str(workdir),
    make_env=make_env,
    algorithm=algorithm,
    **kwargs,
    watcher=report.Watcher(),
  )


@functools.cache
def _uninterrupted(model, root):
  """Trains without an interruption."""
  return _run(_config(model), root / 'whole')


@pytest.fixture
def whole(model, tmp_path_factory):
  root = tmp_path_factory.getbasetemp()
  return _uninterrupted(model, root), root / 'whole'


def _numbers(workdir):
  """Returns all metrics but the times, a dict a line."""
  return [
    {k: v for k, v in line.items() if not k.startswith(('time/', 'machine/'))}
    for line in metrics.read(workdir)
  ]


def _assert_equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(np.testing.assert_array_equal, a, b)


def _wait_for_lock(workdir, process):
  """Waits until the process has begun to train."""
  lock = workdir / '.lock'
  while process.poll() is None:
    if lock.exists() and f'process {process.pid} ' in lock.read_text():
      return
    time.sleep(0.05)


def _start(workdir, model, *moment):
  """Starts a process that trains as `_uninterrupted` does, until the moment comes."""
  with pathlib.Path(f'{workdir}.log').open('w') as log:
    return script.Process(__file__, workdir, model, *moment, stdout=log, stderr=log)


def _run_until(workdir, model, *moment):
  """Runs such a process; returns its exit status and what it printed."""
  with _start(workdir, model, *moment) as process:
    status = process.wait(1200)
  return status, pathlib.Path(f'{workdir}.log').read_text()


def _step_reached(workdir):
  return max(line['step'] for line in metrics.read(workdir))


def _check_and_forget(workdir, expected):
  """Checks a run that ended between two kills, and deletes it: the next starts anew."""
  ours, theirs = (weights.load(path / 'model')[1] for path in (workdir, expected))
  _assert_equal(ours, theirs)
  assert _numbers(workdir) == _numbers(expected)
  shutil.rmtree(workdir)


class TestRun:
  def test_a_run_writes_config_metrics_trajectories_and_model(self, whole, model):
    params, workdir = whole
    # Sizes that were left to be chosen are written as they were chosen.
    chosen = _config(model, row_tokens=96, replicas=1)
    chosen.model.remat = 'none'
    written = json.loads((workdir / 'config.json').read_text())
    assert written.pop('devices') == '1 x cpu, processes: 1'
    chosen.chat.date = written['chat']['date']
    assert chosen.chat.date and written == dataclasses.asdict(chosen)
    lines = metrics.read(workdir)
    assert [line['step'] for line in lines] == [0, 1, 2, 3, 4, 5]
    for line in lines[1:]:
      assert np.isfinite(list(line.values())).all()
      assert line['rollout/status/error'] == 0
      # Of one mini-batch: no log-prob has moved yet when it is trained.
      assert abs(line['train/behaviour_kl']) < 1e-6
      assert line['train/clip_fraction'] == 0
      assert line['train/grad_norm'] > 0
      for name in ('rollout/reward', 'rollout/tool_calls', 'train/kl', 'time/rollout'):
        assert name in line
    evaluated = [line['step'] for line in lines if 'eval/dev/reward' in line]
    assert evaluated == [0, 2, 4, 5]
    logs = {path.name for path in (workdir / 'trajectories').iterdir()}
    assert logs == {f'step-{step:05}-dev.jsonl' for step in evaluated} | {
      f'step-{step:05}-rollout.jsonl' for step in range(1, 6)
    }
    assert sum(line.get('rollout/tool_calls', 0) for line in lines) > 0
    before = weights.load(model)[1]
    assert not np.array_equal(before['embed']['embedding'], params['embed']['embedding'])

  def test_rollouts_are_written_with_the_numbers_of_their_tokens(self, model, tmp_path):
    tables = []

    def learn(*args, learn=loop.updates.learn, **kwargs):
      tables.append((args[1], learned := learn(*args, **kwargs)))
      return learned

    given = {'steps': 1, 'critic_learning_rate': 1e-2, 'eval_every': 0}
    config = _config(model, **given, log_episodes=5)
    with mock.patch.object(loop.updates, 'learn', learn):
      _run(config, tmp_path, algorithm=_PPO, evals=None)
    (log,) = (tmp_path / 'trajectories').iterdir()
    ((chosen, (*_, table)),) = tables
    by_member = {(t.task.id, t.sample): i for i, t in enumerate(chosen)}
    logged = episodes_lib.read(log)
    assert len(logged) == 5
    for episode in logged:
      i = by_member[episode['id'], episode['sample']]
      columns = episode['columns']
      rows = table.take(table.trajectory == i)
      assert columns.pop('segments') == [len(s.tokens) for s in chosen[i].segments]
      assert {len(column) for column in columns.values()} == {len(rows)}
      assert 'ref_logprobs' not in columns, 'there is no reference'
      names = 'tokens action_mask old_logprobs behaviour_logprobs policy_steps rewards'
      for name in f'{names} values advantages returns'.split():
        np.testing.assert_allclose(columns[name], getattr(rows, name), atol=6e-5)

  def test_the_workdir_is_locked_until_the_model_is_written(
    self, model, tmp_path, monkeypatch
  ):
    saved, save = [], weights.save

    def watched(directory, *args, **kwargs):
      with (
        pytest.raises(ValueError, match='in use by another run'),
        workdir_lib.lock(tmp_path),
      ):
        pass
      assert (tmp_path / 'checkpoints' / '1').is_dir()
      saved.append(directory)
      save(directory, *args, **kwargs)

    monkeypatch.setattr(weights, 'save', watched)
    _run(_config(model, steps=1, eval_every=0, log_episodes=0), tmp_path, evals=None)
    assert saved == [tmp_path / 'model'] and saved[0].is_dir()
    assert not (tmp_path / 'trajectories').exists(), 'none is asked for'
    with workdir_lib.lock(tmp_path):
      pass

  def test_ppo_trains_a_critic(self, model, tmp_path):
    config = _config(
      model, steps=2, minibatches=2, critic_learning_rate=1e-2, eval_every=0
    )
    with (
      mock.patch.object(rollout, 'start', wraps=rollout.start) as start,
      mock.patch.object(loop.updates, 'learn', wraps=loop.updates.learn) as learn,
    ):
      _run(config, tmp_path, algorithm=_PPO)
    numbers = [c.kwargs.get('rollout_number') for c in start.call_args_list]
    assert numbers == [0, 1]  # eval_every is 0: no evaluation, not even a last one.
    learned = [c.args[1] for c in learn.mock_calls]
    assert [{*t.policy_steps} for ts in learned for t in ts] == [{0}] * 8 + [{1}] * 8
    first, second = metrics.read(tmp_path)
    assert first['train/value_loss'] > 0 and first['train/grad_norm'] > 0
    assert np.isfinite(list(second.values())).all()
    assert second['train/behaviour_kl'] != 0  # The second mini-batch is off-policy.
    shape, params = weights.load(model)
    update_config, train_state = setup.make_state(config, shape, params, _PPO)
    assert not np.any(train_state.states['critic'].params['value_head']['kernel'])
    with checkpoint.Checkpointer(tmp_path, every=2) as checkpoints:
      step, arrays, host = checkpoints.restore(
        train_state.checkpoint_arrays(update_config)
      )
    assert host['position']['draws']['count'] == 4
    assert host['train_state']['step'] == step == 2
    assert {name: int(state.step) for name, state in arrays.items()} == {
      'policy': 4,
      'critic': 4,
    }
    assert np.any(arrays['critic'].params['value_head']['kernel'])
    saved, how = critic.load(tmp_path / 'critic', tmp_path / 'model', gamma=1.0)
    _assert_equal(saved, arrays['critic'].params)
    assert (how['estimator'], how['step'], how['privileged']) == ('gae', 'token', False)

  def test_the_reward_of_a_learnable_task_rises(self, model, tmp_path):
    """The policy learns which of four words is wanted."""
    config = _config(model, steps=20, samples=8, learning_rate=1e-2, eval_every=0)
    _run(config, tmp_path, evals=None)
    rewards = [line['rollout/reward'] for line in metrics.read(tmp_path)]
    assert rewards[0] < 0.5  # Before the first update.
    assert np.mean(rewards[-3:]) > 0.85

  def test_with_drafts_a_run_learns_the_same(self, model, tmp_path, monkeypatch):
    # Whether they pay is decided by what the first calls accept, which differs.
    monkeypatch.setattr(drafts_lib, '_LEAST_TOKENS', 0.0)
    lines = {}
    for drafts in (0, 3):
      config = _config(
        model, steps=3, samples=8, learning_rate=1e-2, eval_every=0, drafts=drafts
      )
      _run(config, tmp_path / str(drafts), evals=None)
      lines[drafts] = metrics.read(tmp_path / str(drafts))
    for plain, drafted in zip(lines[0], lines[3], strict=True):
      assert 'accepted/decode' not in plain
      for name in ('rollout/reward', 'rollout/action_tokens'):
        assert drafted[name] == pytest.approx(plain[name])
    assert lines[3][-1]['accepted/decode'] > 1.2


class TestTasks:
  def test_where_no_prompt_fits_the_run_ends_at_once(self, model, tmp_path, capfd):
    config = _config(model, steps=2, eval_every=0)
    run = functools.partial(_run, tasks=[_LONG], evals=None, make_env=_Other)
    with pytest.raises(ValueError, match="could begin. Task 'long': the prompt has .*96"):
      run(config, tmp_path / 'refused')
    skip = tiny.run_config(config, long_prompts='skip')
    params = run(skip, tmp_path / 'all')
    _assert_equal(params, weights.load(model)[1])
    for line in metrics.read(tmp_path / 'all'):
      assert line['rollout/prompt_too_long'] == 1
    # Once, not at each step.
    said = capfd.readouterr().out
    assert said.count('Alarm at step 1, truncated: 100% of the episodes ran out') == 1
    assert said.count('Alarm at step 1, dead_groups') == said.count('dead_groups') == 1

  def test_long_prompts_are_refused_or_left_out(self, model, tmp_path, capfd):
    tasks, config = [_LONG, *_tasks(1)], _config(model, steps=1, eval_every=1)
    with pytest.raises(ValueError, match="1 of 2 tasks.*'long' with a prompt of"):
      _run(config, tmp_path / 'refused', tasks=tasks[1:], evals={'dev': tasks})
    assert not (tmp_path / 'refused').exists()
    skip = tiny.run_config(config, long_prompts='skip')
    _run(skip, tmp_path / 'skipped', tasks=tasks, evals={'dev': tasks})
    _, line = metrics.read(tmp_path / 'skipped')
    assert 'rollout/prompt_too_long' not in line
    assert line['eval/dev/prompt_too_long'] == 0.5
    said = capfd.readouterr().out
    assert 'They are left out.' in said and 'They count as unanswered.' in said


_LONG = types.Task('long', [{'role': 'user', 'content': 'one two ' * 100}])


class _Other(env_lib.ToolEnv):
  """Begins in a way of its own, so that nobody can know its prompts beforehand."""

  def __init__(self):
    super().__init__([look], _reward, parse=_parse)

  async def reset(self, task):
    return await super().reset(task)


class TestErrors:
  def test_episodes_that_raise_are_passed_over_up_to_the_limit(
    self, model, tmp_path, monkeypatch
  ):
    to_fail, trained, made, learn = [True], [], [], loop.updates.learn

    class Fails(tiny.ClosedOnce):
      async def step(self, reply):
        if to_fail:
          to_fail.pop()
          raise KeyError('page 7 is missing')
        return await super().step(reply)

    def make_env():
      return Fails(made, [look], _reward, parse=_parse)

    def spy(train_state, trajectories, *args, **kwargs):
      trained.extend(trajectories)
      return learn(train_state, trajectories, *args, **kwargs)

    monkeypatch.setattr(loop.updates, 'learn', spy)
    config = _config(model, steps=1, max_error_rate=0.125, eval_every=0)
    _run(config, tmp_path / 'few', make_env=make_env, evals=None)
    (line,) = metrics.read(tmp_path / 'few')
    assert len(trained) == 7 and all(t.error is None for t in trained)
    to_fail.append(True)
    assert line['rollout/status/error'] == 0.125
    assert [env.closings for env in made] == [1] * 9  # One was made to look at.
    assert line['train/grad_norm'] > 0
    config = tiny.run_config(config, max_error_rate=0.1)
    message = r"1 of 8 episodes raised.*max_error_rate=0.1.*KeyError: 'page 7 is missing'"
    with pytest.raises(RuntimeError, match=message):
      _run(config, tmp_path / 'many', make_env=make_env, evals=None)

  def test_a_tool_that_is_out_ends_the_run(self, model, tmp_path, capfd):
    @tool_lib.tool
    def look(seconds: float) -> str:
      """Is out.

      Args:
        seconds: How long it takes.
      """
      raise ConnectionError('the index is down')

    config = _config(model, steps=1, eval_every=0)
    with pytest.raises(RuntimeError, match='tool calls .*look: ConnectionError: the in'):
      _run(config, tmp_path, make_env=lambda: _make_env(tools=[look]))
    said = capfd.readouterr().out
    assert (
      'outage/look/ConnectionError: ' in said and said.count('the index is down') == 1
    )

  def test_another_config_on_a_workdir_is_refused(self, whole, model):
    _, workdir = whole
    before = (workdir / 'metrics.jsonl').read_bytes()
    with pytest.raises(ValueError, match='learning_rate: 0.003 there, 0.5 now'):
      _run(_config(model, learning_rate=0.5), workdir)
    assert (workdir / 'metrics.jsonl').read_bytes() == before

  @pytest.mark.parametrize(
    'other, said',
    [
      (
        {'algorithm': algorithms.grpo(kl_coef=0.02)},
        r'algorithm\.kl\.coef: "0\.01"',
      ),
      ({'make_env': lambda: _make_env(reward=lambda t, m: 0.0)}, r'reward\.function: '),
      ({'make_env': lambda: _make_env([])}, r'tools\.look\.schema: .* absent now'),
      ({'tasks': _tasks(2)}, r'tasks\.count: "?3"? there, "?2"? now'),
    ],
  )
  def test_another_algorithm_reward_or_tool_is_refused(self, whole, model, other, said):
    """Until its record is deleted, which the message says."""
    _, workdir = whole
    before = (workdir / 'metrics.jsonl').read_bytes()
    with pytest.raises(ValueError, match=f'(?s)made_of.json .*{said}') as told:
      _run(_config(model), workdir, **other)
    assert f'delete {workdir / "made_of.json"}' in str(told.value)
    assert (workdir / 'metrics.jsonl').read_bytes() == before


class TestResume:
  @pytest.mark.parametrize(
    ('moments', 'status', 'reached'),
    [
      (['rollout', 'save', 'update'], -signal.SIGKILL, [0, 2, 3]),
      # The line of a step waits for its evaluation, which is made anew: 1 and not 2. So
      # it is in the update before the second evaluation.
      (
        ['term in rollout', 'ctrl-c in evaluation', 'term in update'],
        preemption.EXIT_STATUS,
        [0, 1, 3],
      ),
    ],
    ids=['killed', 'preempted'],
  )
  def test_ended_and_resumed_is_uninterrupted(
    self, whole, model, tmp_path, moments, status, reached
  ):
    for moment, step in zip(moments, reached, strict=True):
      ended = _run_until(tmp_path / 'run', model, moment)
      assert ended[0] == status, ended[1]
      assert ('saved step' in ended[1]) == (status == preemption.EXIT_STATUS)
      assert _step_reached(tmp_path / 'run') == step
    self._assert_resumes(tmp_path / 'run', model, whole)

  def _assert_resumes(self, workdir, model, whole):
    """The same command ends with the parameters and the numbers of an unbroken run."""
    params, other = whole
    _assert_equal(_run(_config(model), workdir), params)
    assert _numbers(workdir) == _numbers(other)
    _assert_equal(weights.load(workdir / 'model')[1], params)

  def test_killed_at_random_moments_is_uninterrupted(self, whole, model, tmp_path):
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
    self._assert_resumes(tmp_path / 'run', model, whole)

  def test_episodes_that_had_ended_are_not_played_again(self, whole, model, tmp_path):
    params, workdir = whole
    ended = _run_until(tmp_path / 'run', model, 'end of rollout', 'keep')
    assert ended[0] == -signal.SIGKILL, ended[1]
    (path,) = (tmp_path / 'run' / 'rollouts' / '0').iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    kept = len(list(store_lib._read(path)))
    begun = []

    class Counts(env_lib.ToolEnv):
      # As if of the package: it must not count as another environment.
      __module__ = env_lib.__name__

      async def reset(self, task):
        begun.append(task)
        return await super().reset(task)

    resumed = _run(
      _config(model, keep_rollouts=True),
      tmp_path / 'run',
      make_env=lambda: Counts([look], _reward, parse=_parse),
    )
    _assert_equal(resumed, params)
    assert _numbers(tmp_path / 'run') == _numbers(workdir)
    # Four evaluations of two tasks, five rollouts of eight episodes.
    assert kept >= 2 and len(begun) == 4 * 2 + 5 * 8 - kept
    left = {p.name for p in (tmp_path / 'run' / 'rollouts').iterdir()}
    assert left == {'4'}

  @pytest.mark.filterwarnings('ignore:tensorboard')
  @pytest.mark.filterwarnings('ignore:finished episodes are not written')
  @pytest.mark.parametrize('moment', [1, 14])
  def test_a_full_disk_ends_it_and_the_same_command_goes_on(
    self, whole, model, tmp_path, moment
  ):
    """In the first evaluation, or in the second rollout; told, and nothing hangs."""
    resets, fillers = [], []

    class Fills(env_lib.ToolEnv):
      # As if of the package: it must not count as another environment.
      __module__ = env_lib.__name__

      async def reset(self, task):
        resets.append(task)
        if len(resets) == moment:
          fillers.append(mounts.fill(tmp_path / 'run'))
        return await super().reset(task)

    config = _config(model, keep_rollouts=True)
    with mounts.mounted(tmp_path / 'run', 'size=64m') as workdir:
      with pytest.raises(OSError, match=r'the disk is full \(0\.0 MB free'):
        _run(config, workdir, make_env=lambda: Fills([look], _reward, parse=_parse))
      fillers[0].unlink()
      resumed = _run(config, workdir)
      _assert_equal(resumed, whole[0])
      assert _numbers(workdir) == _numbers(whole[1])

  def test_where_checkpoints_are_lost_a_run_is_refused_and_keeps_its_metrics(
    self, whole, model, tmp_path
  ):
    """Deleted, or damaged: whatever is started, no line of metrics is lost."""
    shutil.copytree(whole[1], tmp_path / 'run')
    lines = (tmp_path / 'run' / 'metrics.jsonl').read_bytes()
    checkpoints = tmp_path / 'run' / 'checkpoints'
    checkpoints.rename(tmp_path / 'away')
    with pytest.raises(ValueError, match='step 2 was completed, and there is no checkpo'):
      _run(_config(model), tmp_path / 'run')
    shutil.rmtree(checkpoints)
    (tmp_path / 'away').rename(checkpoints)
    for path in checkpoints.glob('*/arrays/manifest.ocdbt'):
      path.write_bytes(path.read_bytes()[:-1])
    for start in range(2):
      with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        with pytest.raises(ValueError, match=r'can be read; .* 2\.unreadable, 4\.unread'):
          _run(_config(model), tmp_path / 'run')
      assert sum('cannot be read' in str(w.message) for w in said) == 3 * (start == 0)
    assert (tmp_path / 'run' / 'metrics.jsonl').read_bytes() == lines

  def test_a_finished_run_goes_on_for_more_steps(self, whole, model, tmp_path):
    params, workdir = whole
    shutil.copytree(workdir, tmp_path / 'more')
    (tmp_path / 'more' / 'made_of.json').unlink()  # as of an earlier version
    _assert_equal(_run(_config(model), tmp_path / 'more'), params)
    assert _numbers(tmp_path / 'more') == _numbers(workdir)
    _run(_config(model, steps=6), tmp_path / 'more')
    assert _numbers(tmp_path / 'more')[:-1] == _numbers(workdir)
    assert metrics.read(tmp_path / 'more')[-1]['step'] == 6


def _die(number=signal.SIGKILL):
  os.kill(os.getpid(), number)


def main(workdir, model, moment, keep=''):
  """Trains as `_uninterrupted` does, until the moment comes."""
  make_env, save, step = _make_env, checkpoint.Checkpointer.save, learner.optim_step
  resets = []
  # Of the first evaluation, the first rollout, the second one, the second evaluation.
  died_at = {'rollout': 7, 'end of rollout': 10}
  died_at |= {'term in rollout': 7, 'ctrl-c in evaluation': 18}
  signals = {'term in rollout': signal.SIGTERM, 'ctrl-c in evaluation': signal.SIGINT}

  class Dies(env_lib.ToolEnv):
    # As if of the package: it must not count as another environment.
    __module__ = env_lib.__name__

    async def reset(self, task):
      resets.append(task)
      if len(resets) == died_at[moment]:
        _die(signals.get(moment, signal.SIGKILL))
      return await super().reset(task)

  def save_and_die(self, *args):
    save(self, *args)
    _die()

  def step_and_die(state, *args, **kwargs):
    out = step(state, *args, **kwargs)
    if int(out[0].step) == 4:
      _die(signal.SIGTERM if moment.startswith('term') else signal.SIGKILL)
    return out

  if moment in died_at:
    make_env = functools.partial(Dies, [look], _reward, parse=_parse)
  elif moment == 'save':
    checkpoint.Checkpointer.save = save_and_die
  elif moment != 'none':
    learner.optim_step = step_and_die
  # Signals reach the main thread only.
  _train(_config(model, keep_rollouts=bool(keep)), workdir, make_env=make_env)


async def _ask_the_endpoint(task, url):
  async with httpx2.AsyncClient(timeout=60) as http:
    asked = {'messages': task.messages}
    (await http.post(f'{url}/chat/completions', json=asked)).raise_for_status()


def test_a_program_is_trained_and_resumed_like_an_environment(model, tmp_path):
  make_env = lambda: program.Program(_ask_the_endpoint, _reward)

  def run(name, steps):
    config = _config(model, steps=steps, eval_every=2)
    _run(config, tmp_path / name, make_env=make_env)
    return _numbers(tmp_path / name)

  whole = run('whole', 2)
  run('parts', 1)
  assert run('parts', 2)[-1] == whole[-1]
  assert whole[-1]['eval/dev/turns'] == whole[-1]['rollout/turns'] == 1
  assert whole[-1]['rollout/forks'] == 0
  made_of = (tmp_path / 'whole' / 'made_of.json').read_text()
  assert '_ask_the_endpoint' in made_of


if __name__ == '__main__':
  main(*sys.argv[1:])
