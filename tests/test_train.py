"""Training: it learns, it writes its files, and it says what is wrong."""

import dataclasses
import functools
import json
import re
from unittest import mock

import numpy as np
import pytest
import runs
import tiny

from agent_r1_jax import types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.engine import drafts as drafts_lib
from agent_r1_jax.guided import critic
from agent_r1_jax.host import checkpoint
from agent_r1_jax.host import workdir as workdir_lib
from agent_r1_jax.models.files import weights
from agent_r1_jax.report import episodes as episodes_lib
from agent_r1_jax.rollout import rollout
from agent_r1_jax.train import loop, metrics
from agent_r1_jax.train.plan import first_state

pytestmark = pytest.mark.usefixtures('no_curves', 'traced_once')
model, whole = runs.model, runs.whole


class TestRun:
  def test_a_run_writes_config_metrics_trajectories_and_model(self, whole, model):
    params, workdir = whole
    # Sizes that were left to be chosen are written as they were chosen.
    chosen = runs.config(model, row_tokens=96, replicas=1)
    chosen.model.remat = 'none'
    written = json.loads((workdir / 'config.json').read_text())
    assert written.pop('devices') == '1 x cpu, processes: 1'
    assert re.fullmatch(
      r'[\d.]+(, commit [0-9a-f]{12}(-dirty)?)?', written.pop('version')
    )
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
    config = runs.config(model, **given, log_episodes=5)
    with mock.patch.object(loop.updates, 'learn', learn):
      runs.run(config, tmp_path, algorithm=runs.PPO, evals=None)
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
    runs.run(
      runs.config(model, steps=1, eval_every=0, log_episodes=0), tmp_path, evals=None
    )
    assert saved == [tmp_path / 'model'] and saved[0].is_dir()
    assert not (tmp_path / 'trajectories').exists(), 'none is asked for'
    with workdir_lib.lock(tmp_path):
      pass

  def test_ppo_trains_a_critic(self, model, tmp_path):
    config = runs.config(
      model, steps=2, minibatches=2, critic_learning_rate=1e-2, eval_every=0
    )
    with (
      mock.patch.object(rollout, 'start', wraps=rollout.start) as start,
      mock.patch.object(loop.updates, 'learn', wraps=loop.updates.learn) as learn,
    ):
      runs.run(config, tmp_path, algorithm=runs.PPO)
    numbers = [c.kwargs.get('rollout_number') for c in start.call_args_list]
    assert numbers == [0, 1]  # eval_every is 0: no evaluation, not even a last one.
    learned = [c.args[1] for c in learn.mock_calls]
    assert [{*t.policy_steps} for ts in learned for t in ts] == [{0}] * 8 + [{1}] * 8
    first, second = metrics.read(tmp_path)
    assert first['train/value_loss'] > 0 and first['train/grad_norm'] > 0
    assert np.isfinite(list(second.values())).all()
    assert second['train/behaviour_kl'] != 0  # The second mini-batch is off-policy.
    shape, params = weights.load(model)
    update_config, train_state = first_state.make(config, shape, params, runs.PPO)
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
    runs.assert_equal(saved, arrays['critic'].params)
    assert (how['estimator'], how['step'], how['privileged']) == ('gae', 'token', False)

  def test_the_reward_of_a_learnable_task_rises(self, model, tmp_path):
    """The policy learns which of four words is wanted."""
    config = runs.config(model, steps=20, samples=8, learning_rate=1e-2, eval_every=0)
    runs.run(config, tmp_path, evals=None)
    rewards = [line['rollout/reward'] for line in metrics.read(tmp_path)]
    assert rewards[0] < 0.5  # Before the first update.
    assert np.mean(rewards[-3:]) > 0.85

  def test_with_drafts_a_run_learns_the_same(self, model, tmp_path, monkeypatch):
    # Whether they pay is decided by what the first calls accept, which differs.
    monkeypatch.setattr(drafts_lib, '_LEAST_TOKENS', 0.0)
    lines = {}
    for drafts in (0, 3):
      config = runs.config(
        model, steps=3, samples=8, learning_rate=1e-2, eval_every=0, drafts=drafts
      )
      runs.run(config, tmp_path / str(drafts), evals=None)
      lines[drafts] = metrics.read(tmp_path / str(drafts))
    for plain, drafted in zip(lines[0], lines[3], strict=True):
      assert 'accepted/decode' not in plain
      for name in ('rollout/reward', 'rollout/action_tokens'):
        assert drafted[name] == pytest.approx(plain[name])
    assert lines[3][-1]['accepted/decode'] > 1.2


class TestTasks:
  def test_where_no_prompt_fits_the_run_ends_at_once(self, model, tmp_path, capfd):
    config = runs.config(model, steps=2, eval_every=0)
    run = functools.partial(runs.run, tasks=[_LONG], evals=None, make_env=_Other)
    with pytest.raises(ValueError, match="could begin. Task 'long': the prompt has .*96"):
      run(config, tmp_path / 'refused')
    skip = tiny.run_config(config, long_prompts='skip')
    params = run(skip, tmp_path / 'all')
    runs.assert_equal(params, weights.load(model)[1])
    for line in metrics.read(tmp_path / 'all'):
      assert line['rollout/prompt_too_long'] == 1
    # Once, not at each step.
    said = capfd.readouterr().out
    assert said.count('Alarm at step 1, truncated: 100% of the episodes ran out') == 1
    assert said.count('Alarm at step 1, dead_groups') == said.count('dead_groups') == 1

  def test_long_prompts_are_refused_or_left_out(self, model, tmp_path, capfd):
    tasks, config = [_LONG, *runs.tasks(1)], runs.config(model, steps=1, eval_every=1)
    with pytest.raises(ValueError, match="1 of 2 tasks.*'long' with a prompt of"):
      runs.run(config, tmp_path / 'refused', tasks=tasks[1:], evals={'dev': tasks})
    assert not (tmp_path / 'refused').exists()
    skip = tiny.run_config(config, long_prompts='skip')
    runs.run(skip, tmp_path / 'skipped', tasks=tasks, evals={'dev': tasks})
    _, line = metrics.read(tmp_path / 'skipped')
    assert 'rollout/prompt_too_long' not in line
    assert line['eval/dev/prompt_too_long'] == 0.5
    said = capfd.readouterr().out
    assert 'They are left out.' in said and 'They count as unanswered.' in said


_LONG = types.Task('long', [{'role': 'user', 'content': 'one two ' * 100}])


class _Other(env_lib.ToolEnv):
  """Begins in a way of its own, so that nobody can know its prompts beforehand."""

  def __init__(self):
    super().__init__([runs.look], runs.reward, parse=runs.parse)

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
      return Fails(made, [runs.look], runs.reward, parse=runs.parse)

    def spy(train_state, trajectories, *args, **kwargs):
      trained.extend(trajectories)
      return learn(train_state, trajectories, *args, **kwargs)

    monkeypatch.setattr(loop.updates, 'learn', spy)
    config = runs.config(model, steps=1, max_error_rate=0.125, eval_every=0)
    runs.run(config, tmp_path / 'few', make_env=make_env, evals=None)
    (line,) = metrics.read(tmp_path / 'few')
    assert len(trained) == 7 and all(t.error is None for t in trained)
    to_fail.append(True)
    assert line['rollout/status/error'] == 0.125
    assert [env.closings for env in made] == [1] * 9  # One was made to look at.
    assert line['train/grad_norm'] > 0
    config = tiny.run_config(config, max_error_rate=0.1)
    message = r"1 of 8 episodes raised.*max_error_rate=0.1.*KeyError: 'page 7 is missing'"
    with pytest.raises(RuntimeError, match=message):
      runs.run(config, tmp_path / 'many', make_env=make_env, evals=None)

  def test_a_tool_that_is_out_ends_the_run(self, model, tmp_path, capfd):
    @tool_lib.tool
    def look(seconds: float) -> str:
      """Is out.

      Args:
        seconds: How long it takes.
      """
      raise ConnectionError('the index is down')

    config = runs.config(model, steps=1, eval_every=0)
    with pytest.raises(RuntimeError, match='tool calls .*look: ConnectionError: the in'):
      runs.run(config, tmp_path, make_env=lambda: runs.make_env(tools=[look]))
    said = capfd.readouterr().out
    assert (
      'outage/look/ConnectionError: ' in said and said.count('the index is down') == 1
    )

  def test_another_config_on_a_workdir_is_refused(self, whole, model):
    _, workdir = whole
    before = (workdir / 'metrics.jsonl').read_bytes()
    with pytest.raises(ValueError, match='learning_rate: 0.003 there, 0.5 now'):
      runs.run(runs.config(model, learning_rate=0.5), workdir)
    assert (workdir / 'metrics.jsonl').read_bytes() == before

  def test_another_reward_is_refused(self, whole, model):
    """Until its record is deleted, which the message says."""
    _, workdir = whole
    before = (workdir / 'metrics.jsonl').read_bytes()
    other = lambda: runs.make_env(reward=lambda t, m: 0.0)
    with pytest.raises(
      ValueError, match=r'(?s)made_of.json .*reward\.function: '
    ) as told:
      runs.run(runs.config(model), workdir, make_env=other)
    assert f'delete {workdir / "made_of.json"}' in str(told.value)
    assert (workdir / 'metrics.jsonl').read_bytes() == before
