"""Rollouts: what the model sampled is what is trained on, whatever the world does."""

import dataclasses
import datetime
import functools
import pathlib

import numpy as np
import pytest
import rollouts
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.engine import protocol
from agent_r1_jax.host import records
from agent_r1_jax.rollout import store as store_lib
from agent_r1_jax.tasks import context, rewards


@functools.cache
def _played():
  return rollouts.collect(rollouts.Env, rollouts.make_tasks(5), samples=3)


class TestTrajectory:
  def test_tokens_are_prompt_replies_and_deltas(self):
    assert {len(t.turns) for t in _played()} == {1, 2, 3}
    for trajectory in _played():
      rollouts.assert_exact(trajectory)

  def test_log_probs_are_the_learners(self):
    segments = [s for t in _played() for s in t.segments]
    tiny.assert_on_policy(rollouts.params(), segments)

  def test_metrics_are_summed_over_turns(self):
    for t in _played():
      steps = len(t.turns) - (t.status == 'truncated')
      assert t.metrics.get('steps', 0) == steps
      assert t.metrics.get('length', 0) == 8 * t.reward

  def test_each_end_has_its_status(self):
    for t in _played():
      last = t.segments[-1].tokens[t.turns[-1].stop - 1]
      if t.status == 'truncated':
        assert last not in tiny.chat().stop_ids
        assert t.turns[-1].stop - t.turns[-1].start == rollouts.LIMITS.max_turn_tokens
      else:
        assert last in tiny.chat().stop_ids
        assert t.status == (
          'done' if t.messages[-1]['role'] == 'assistant' else 'max_turns'
        )
      assert t.status != 'max_turns' or len(t.turns) == rollouts.LIMITS.max_turns
    assert {t.status for t in _played()} == {'done', 'truncated', 'max_turns'}

  def test_a_groups_prompt_is_prefilled_once(self):
    engine = rollouts.make_engine()
    task = rollouts.make_tasks(1, 'What is the capital of the country of {}?')
    limits = config_lib.Limits(1, 16)
    rollouts.collect(
      rollouts.Env, task, engine=engine, samples=tiny.SIZES['rows'], limits=limits
    )
    # The last token is computed by each sample's first decode.
    assert engine.stats.prefilled == len(tiny.chat().encode_prompt(task[0].messages)) - 1


class TestRandomness:
  def test_it_does_not_depend_on_latency_order_or_company(self):
    tasks = rollouts.make_tasks(5)
    for order, make_env in (
      (range(5), lambda: rollouts.Env(wait=0.01)),
      ((3, 0, 4, 1, 2), rollouts.Env),
      ((3,), rollouts.Env),
    ):
      again = rollouts.collect(make_env, [tasks[i] for i in order], samples=3)
      for t in again:
        number = int(t.task.id.split()[1])
        rollouts.assert_same(t, _played()[3 * number + t.sample])

  def test_it_depends_on_seed_draw_task_and_sample(self):
    task = rollouts.make_tasks(1)
    first, second = rollouts.collect(rollouts.Env, task, samples=2)
    marked = rollouts.make_engine()
    marked.sync_weights(rollouts.params(), 7)
    others = [
      rollouts.collect(rollouts.Env, task, seed=1)[0],
      rollouts.collect(rollouts.Env, task, rollout_number=1, engine=marked)[0],
      rollouts.collect(rollouts.Env, [types.Task('another id', task[0].messages)])[0],
      second,
    ]
    texts = {tuple(t.segments[0].tokens.tolist()) for t in [first, *others]}
    assert len(texts) == 5
    assert {*first.policy_steps} == {0} and {*others[1].policy_steps} == {7}
    (segment,) = others[1].segments
    np.testing.assert_array_equal(segment.policy_steps, 7 * segment.action_mask)

  def test_rewards_know_the_policys_step(self):
    engine = rollouts.make_engine()
    engine.sync_weights(rollouts.params(), 7)
    parts = rewards.hybrid(late=(lambda step: step / 8, lambda *_: 1.0))
    make_env = lambda: env_lib.ToolEnv([], parts)
    assert [t.reward for t in rollouts.collect(make_env, engine=engine)] == [7 / 8] * 4

  def test_a_task_that_comes_again_is_played_differently(self):
    twice = rollouts.collect(rollouts.Env, rollouts.make_tasks(1) * 2, samples=2)
    assert len({tuple(t.segments[0].tokens.tolist()) for t in twice}) == 4
    assert [t.group for t in twice] == [0, 0, 1, 1]
    rollouts.assert_same(
      twice[1], rollouts.collect(rollouts.Env, rollouts.make_tasks(1), samples=2)[1]
    )


class TestFresh:
  def test_segments_have_a_randomness_of_their_own(self):
    class Again(rollouts.Env):
      async def step(self, reply):
        return types.Step(list(self.task.messages), fresh=True)

    for t in rollouts.collect(Again):
      if len(t.segments) > 1:
        first, second = (s.tokens[s.action_mask].tolist() for s in t.segments[:2])
        assert first != second


class TestEnds:
  def test_a_prompt_that_fits_no_row_is_truncated_without_a_turn(self):
    long = rollouts.make_tasks(1, 'one two three ' * 100)
    lost, *others = rollouts.collect(rollouts.Env, long + rollouts.make_tasks(3))
    assert (lost.status, lost.segments, lost.turns) == ('truncated', [], [])
    assert lost.messages == long[0].messages
    length = len(tiny.chat().encode_prompt(long[0].messages))
    said = f'the prompt has {length} tokens, and a row {rollouts.SLOTS} (slots)'
    assert (lost.error, lost.metrics) == (said, {'prompt_too_long': 1.0})
    assert all(t.turns and not t.error for t in others)

  @pytest.mark.parametrize('broken', [{'role': 'user'}, 'hello'])
  def test_a_broken_message_is_the_environments_fault(self, broken):
    class Breaks(rollouts.Env):
      async def reset(self, task):
        await super().reset(task)
        return [broken] if task.answer == 1 else list(task.messages)

      async def step(self, reply):
        step = await super().step(reply)
        return dataclasses.replace(step, messages=step.messages and [broken])

    played = rollouts.collect(Breaks, limits=config_lib.Limits(3, 30))
    assert played[1].status == 'error' and not played[1].segments
    assert {t.status for t in played} <= {'done', 'truncated', 'error'}
    said = {t.error for t in played if t.status == 'error'}
    assert len(said) == 1 and ('no content' in said.pop()) != (broken == 'hello')

  @pytest.mark.parametrize('where', ['reset', 'step'])
  @pytest.mark.parametrize(
    'value', [pathlib.Path('a'), datetime.datetime(2026, 1, 1), [{'x': object()}]]
  )
  def test_a_message_that_cannot_be_written_costs_its_episode(
    self, tmp_path, recwarn, where, value
  ):
    """Written it must be, for the store and for the other processes."""
    seen = {'role': 'user', 'content': 'What?', 'seen': value}

    class Keeps(rollouts.Env):
      async def reset(self, task):
        messages = await super().reset(task)
        return [seen] if where == 'reset' and task.answer == 1 else messages

      async def step(self, reply):
        step = await super().step(reply)
        if where == 'step' and self.task.answer == 1:
          return dataclasses.replace(step, messages=[seen], done=False)
        return step

    kept, tasks = store_lib.EpisodeStore(tmp_path), rollouts.make_tasks(4)
    played = rollouts.collect(Keeps, tasks, store=kept, limits=config_lib.Limits(3, 80))
    assert not recwarn.list  # The store warns of what it cannot write.
    assert [t.status == 'error' for t in played] == [False, True, False, False]
    error = played[1].error
    assert error.startswith("'seen' of a message cannot be written: ")
    assert error.endswith(' is no plain data; give text, numbers, lists, dicts')
    again = kept.open_rollout(0, tasks)
    for t in played:
      assert records.unpack(records.pack(t.messages)) == t.messages
      assert again.get((t.task.id, 0)).messages == t.messages

  def test_an_answer_that_fits_no_row_truncates_the_episode(self):
    class Talks(rollouts.Env):
      async def step(self, reply):
        long = {'role': 'user', 'content': 'one two three ' * 100}
        return types.Step([long], reward=0.25)

    for t in rollouts.collect(Talks):
      assert (t.status, len(t.turns)) == ('truncated', 1)
      assert t.reward == (0.25 if len(t.messages) == 3 else 0)
      assert len(t.segments[0].tokens) == t.turns[0].stop

  def test_a_reply_that_fills_its_row_truncates_the_episode(self):
    """The row's room limits a reply, not the turn's budget alone."""
    task = rollouts.make_tasks(1, 'one two three ' * 18)
    room = rollouts.SLOTS - len(tiny.chat().encode_prompt(task[0].messages))
    assert 10 < room < 60
    silent = {i: -9.0 for i in tiny.chat().stop_ids}
    engine = rollouts.make_engine(tiny.params(tiny.config(), likely=silent))
    (t,) = rollouts.collect(
      rollouts.Env, task, engine=engine, limits=config_lib.Limits(3, 60)
    )
    assert t.status == 'truncated'
    assert len(t.segments[0].tokens) == rollouts.SLOTS
    assert t.segments[0].action_mask.sum() == room

  def test_the_environment_does_not_see_a_reply_without_an_end(self):
    class Refuses(rollouts.Env):
      async def step(self, reply):
        raise AssertionError('was asked')

    played = rollouts.collect(Refuses, samples=4, limits=config_lib.Limits(3, 3))
    assert {t.status for t in played} == {'truncated', 'error'}
    for t in played:
      assert (t.status == 'error') == ('was asked' in (t.error or ''))


class TestErrors:
  def test_what_fails_when_the_run_is_told_to_end_is_not_kept(self, tmp_path):
    """Its program got the signal, too: the next start plays the episode again."""
    engine, told = rollouts.make_engine(), []
    engine.interrupted = lambda: bool(told)

    class Told(rollouts.Env):
      async def step(self, reply):
        told.append(True)
        raise ChildProcessError('ended by SIGTERM')

    kept = store_lib.EpisodeStore(tmp_path)
    with pytest.raises(protocol.PreemptedError):
      rollouts.collect(Told, rollouts.make_tasks(1), engine=engine, store=kept)
    assert kept.open_rollout(0, rollouts.make_tasks(1)).get(('task 0', 0)) is None

  def test_tasks_of_equal_ids_keep_their_own_episodes(self, tmp_path):
    first, second = (dataclasses.replace(t, id='1') for t in rollouts.make_tasks(2))
    kept = store_lib.EpisodeStore(tmp_path)
    for samples in (1, 2):
      played = rollouts.collect(
        rollouts.Env, [first, second], samples=samples, store=kept
      )
      assert [(t.task, t.group, t.sample) for t in played] == [
        (task, g, s) for g, task in enumerate([first, second]) for s in range(samples)
      ]

  def test_on_done_hears_of_every_episode(self):
    ended = []
    played = rollouts.collect(rollouts.Env, samples=2, on_done=ended.append)
    assert len(ended) == 8
    assert sorted((t.group, t.sample) for t in ended) == [
      (t.group, t.sample) for t in played
    ]
    assert {id(t) for t in ended} == {id(t) for t in played}


def test_an_environment_gets_the_number_of_its_episode():
  """Equal in a repeated rollout, another for each sample and for the next rollout."""

  def numbers(wrap=lambda env: env, **given):
    found = set()

    class Seeded(rollouts.Env):
      def set_seed(self, number):
        found.add(number)

    make_env = lambda: wrap(Seeded())
    rollouts.collect(make_env, rollouts.make_tasks(2), samples=3, **given)
    return found

  first = numbers(seed=1)
  assert first == numbers(lambda env: context.SlidingWindow(env, turns=1), seed=1)
  assert first == numbers(seed=1) and len(first) == 6
  assert first.isdisjoint(numbers(seed=1, rollout_number=1) | numbers(seed=2))
