"""Rollouts ahead of the updates: what is learned from is the same, and of known age."""

import asyncio
import dataclasses
import threading
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
import runs
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.engine import device
from agent_r1_jax.models.files import weights
from agent_r1_jax.rollout import decoding as decoding_lib
from agent_r1_jax.rollout import evaluate, rollout
from agent_r1_jax.train import curriculum, loop, metrics, run_files
from agent_r1_jax.train import schedule as schedule_lib
from agent_r1_jax.train.plan import first_state, setup

model = runs.model
pytestmark = pytest.mark.usefixtures('no_curves', 'traced_once')


def _run(model, workdir, learned=None, **kwargs):
  """The parameters, and in `learned` the trajectories of each update."""
  options = {name: kwargs.pop(name) for name in ('make_env', 'evals') if name in kwargs}
  config = runs.config(model, **{'steps': 4, 'ahead': 1} | kwargs)
  learn = loop.updates.learn

  def spy(train_state, trajectories, *args, **kwargs):
    if learned is not None:
      learned.append(trajectories)
    return learn(train_state, trajectories, *args, **kwargs)

  with mock.patch.object(loop.updates, 'learn', spy):
    return runs.run(config, workdir, algorithm=runs.STALE, **options)


@pytest.fixture(scope='module')
def whole(model, tmp_path_factory):
  """One step off-policy, which nothing interrupts."""
  workdir, learned = tmp_path_factory.mktemp('schedule') / 'run', []
  return _run(model, workdir, learned), workdir, learned


def _sampler(tasks, seed):
  return curriculum.TaskStream(config_lib.Curriculum(), tasks, seed=seed)


class TestOneStepOffPolicy:
  def test_each_rollout_is_of_the_policy_before_the_last_update(self, whole):
    _, workdir, learned = whole
    steps = [{*np.concatenate([t.policy_steps for t in ts])} for ts in learned]
    assert steps == [{0}, {0}, {1}, {2}]
    lines = metrics.read(workdir)[1:]
    assert [line['train/stale_steps'] for line in lines] == [0, 1, 1, 1]
    # The ratios say so too: a rollout is of the policy only before the first update.
    apart = [abs(line['train/correction_ratio_max'] - 1) for line in lines]
    assert apart[0] < 1e-3 and min(apart[1:]) > 1e-3

  def test_a_run_ahead_equals_rollouts_by_the_policy_before(self, whole, model):
    """Step by step, without a schedule: to the last bit."""
    config = runs.config(model, steps=4, ahead=1)
    shape, params, chat = setup.load(config.model, config.chat)
    engine = setup.make_engine(config, shape, params)
    engine.warm_up()
    update_config, train_state = first_state.make(config, shape, params, runs.STALE)
    policies = [jax.tree.map(np.array, params)]
    sampler = _sampler(runs.tasks(), config.seed)
    for step in range(4):
      engine.sync_weights(jax.device_put(policies[max(0, step - 1)]), max(0, step - 1))
      chosen = sampler.start_rollout(2)
      played = rollout.collect(
        engine,
        chat,
        chosen,
        runs.make_env,
        limits=config.limits,
        samples=config.schedule.samples,
        rollout_number=run_files.rollout_number(config.schedule, step),
      )
      train_state, *_ = loop.updates.learn(train_state, played, update_config)
      policies.append(jax.tree.map(np.array, train_state.states['policy'].params))
    runs.assert_equal(train_state.states['policy'].params, whole[0])

  def test_a_rollout_is_played_during_the_update(self, model, tmp_path):
    """In turn, this would wait for ever."""
    updating, learn = threading.Event(), loop.updates.learn
    begun = []

    class Waits(env_lib.ToolEnv):
      async def reset(self, task):
        begun.append(task)
        if len(begun) > 8:
          await asyncio.to_thread(updating.wait, 60)
          assert updating.is_set()
        return await super().reset(task)

    def spy(*args, **kwargs):
      updating.set()
      return learn(*args, **kwargs)

    with mock.patch.object(loop.updates, 'learn', spy):
      make_env = lambda: Waits([], lambda *_: 0.0)
      _run(model, tmp_path, make_env=make_env, steps=2, eval_every=0)
    # Of two rollouts; eval_every is 0, so there is no evaluation.
    assert len(begun) == 8 + 8


def test_a_greedy_episode_that_failed_takes_its_group_away():
  """ReMax: a reward of 0 that is due to an error is no baseline."""

  def episode(task, reward, status='done'):
    return types.Trajectory(task, 0, 0, [], [types.Turn(0, 0, 1, reward)], [], status)

  tasks = runs.tasks(3)
  groups = [[episode(task, 1.0)] * 2 for task in tasks]
  played = [episode(tasks[0], 0.25), episode(tasks[1], 0.0, 'error')]
  played.append(episode(tasks[2], 0.5, 'truncated'))
  unused: Any = None
  start = mock.Mock(**{'loop_state.draws': curriculum.Draws(), 'loop_state.step': 0})
  config, training = config_lib.Config(), decoding_lib.Decoding(unused)
  parts = {'schedule': config.schedule, 'curriculum': config.curriculum, 'seed': 0}
  plan = mock.Mock(tasks=tasks, training=training, **parts)
  schedule = schedule_lib.Rollouts(plan, unused, start, unused)
  with mock.patch.object(evaluate, 'run', return_value={'': played}) as run:
    kept, baselines = schedule.play_greedy(groups)
  assert run.call_args.args[2] == {'': tasks}
  assert run.call_args.kwargs['decoding'].sampling == config_lib.GREEDY
  assert kept == [groups[0], groups[2]]
  assert baselines == [0.25, 0.25, 0.5, 0.5]


class TestPartial:
  def test_a_long_episode_delays_no_update(self, model, tmp_path):
    """It goes on over updates, and the batches keep their order and their age."""
    learned, begun = [], []

    class Slow(env_lib.ToolEnv):
      async def reset(self, task):
        begun.append(len(begun))
        self.slow, self.turns = len(begun) % 8 == 3, 0
        return await super().reset(task)

      async def step(self, reply):
        # One in eight plays on until more rollouts than its own have been begun.
        deadline = len(begun) + 8
        while self.slow and len(begun) < min(deadline, 40):
          await asyncio.sleep(0.01)
        self.turns += 1
        again = [{'role': 'user', 'content': 'name'}]
        return types.Step(again, len(reply) % 5 / 5.0, done=self.turns == 2)

    _run(
      model,
      tmp_path,
      learned,
      make_env=lambda: Slow([], lambda *_: 0.0),
      ahead=2,
      partial=True,
      steps=5,
      eval_every=0,
    )
    assert [[t.group for t in ts] for ts in learned] == [[0] * 4 + [1] * 4] * 5
    ages = [[n - t.policy_steps for t in ts] for n, ts in enumerate(learned)]
    flat = np.concatenate([age for some in ages for age in some])
    assert flat.min() >= 0 and flat.max() == 2
    several = [t for ts in learned for t in ts if len({*t.policy_steps}) > 1]
    assert several
    for t in several:
      assert (np.diff(t.policy_steps) >= 0).all()
    lines = metrics.read(tmp_path)
    assert [line['train/stale_steps_max'] for line in lines] == [
      max(age.max() for age in some) for some in ages
    ]
    assert all(np.isfinite(line['train/loss']) for line in lines)


class TestEvaluationBesideRollouts:
  def test_what_is_learned_from_is_the_same_without(self, whole, model, tmp_path):
    params, _, learned = whole
    alone = []
    _run(model, tmp_path, alone, eval_every=0, evals=None)
    runs.assert_equal(weights.load(tmp_path / 'model')[1], params)
    for some, others in zip(learned, alone, strict=True):
      for a, b in zip(some, others, strict=True):
        for s, t in zip(a.segments, b.segments, strict=True):
          np.testing.assert_array_equal(s.tokens, t.tokens)
          np.testing.assert_array_equal(s.behaviour_logprobs, t.behaviour_logprobs)

  @pytest.mark.parametrize('partial', [False, True])
  def test_it_is_played_by_its_policy_while_a_rollout_is(self, model, tmp_path, partial):
    """The second rollout goes on when the evaluation of step 1 has ended."""
    ended, held, learned = threading.Event(), [], []
    evaluated, policies = [], [jax.tree.map(np.array, weights.load(model)[1])]
    tasks = runs.tasks(4)
    first = {t.id for t in _sampler(tasks, 0).start_rollout(2)}
    evals = {'dev': [dataclasses.replace(t, id=f'dev {t.id}') for t in tasks[:2]]}

    class Waits(env_lib.ToolEnv):
      async def reset(self, task):
        self.turns, self.waits = 0, task.id in {t.id for t in tasks} - first
        return await super().reset(task)

      async def step(self, reply):
        self.turns += 1
        if self.waits and self.turns == 1:
          held.append(ended.is_set())
          await asyncio.to_thread(ended.wait, 250)
          assert ended.is_set()
        again = [{'role': 'user', 'content': 'name'}]
        return types.Step(again, len(reply) % 5 / 5.0, done=self.turns == 2)

    learn, run = loop.updates.learn, loop.evaluate.run

    def learn_and_note(train_state, trajectories, *args, **kwargs):
      train_state, *rest = learn(train_state, trajectories, *args, **kwargs)
      learned.append(trajectories)
      policies.append(jax.tree.map(np.array, train_state.states['policy'].params))
      return train_state, *rest

    def run_and_note(*args, **kwargs):
      evaluated.append(run(*args, **kwargs)['dev'])
      if len(evaluated) == 2:
        ended.set()
      return {'dev': evaluated[-1]}

    config = runs.config(model, steps=2, ahead=1, partial=partial, eval_every=1, rows=20)
    with (
      mock.patch.object(loop.updates, 'learn', learn_and_note),
      mock.patch.object(loop.evaluate, 'run', run_and_note),
    ):
      make_env = lambda: Waits([], lambda *_: 0.0)
      given: Any = {'tasks': tasks, 'evals': evals, 'make_env': make_env}
      runs.run(config, tmp_path, algorithm=runs.STALE, **given)
    assert False in held and len(evaluated) == 3
    shape = tiny.config(layers=1)
    for step, played in enumerate(evaluated):
      assert all({*t.policy_steps} == {step} for t in played)
      segments = [s for t in played for s in t.segments]
      tiny.assert_on_policy(policies[step], segments, shape=shape)
    steps = {step for t in learned[1] for step in t.policy_steps.tolist()}
    assert steps <= {0, 1} if partial else steps == {0}
    for t in learned[1]:
      (segment,) = t.segments
      (logprobs,) = tiny.learned(policies[0], t.segments, shape=shape)
      # Later ones follow a text that two policies have computed.
      mask = segment.action_mask & (segment.policy_steps == 0)
      np.testing.assert_allclose(
        segment.behaviour_logprobs[mask], logprobs[mask], atol=2e-5
      )


def test_an_error_of_the_engine_ends_the_run(model, tmp_path):
  calls, decode = [], device.Device.decode

  def broken(*args):
    calls.append(args)
    if len(calls) == 12:
      raise MemoryError('out of device memory')
    return decode(*args)

  with mock.patch.object(device.Device, 'decode', broken):
    with pytest.raises(MemoryError, match='out of device memory'):
      _run(model, tmp_path)
  assert tiny.within(_run, model, tmp_path / 'again', steps=1) is not None
