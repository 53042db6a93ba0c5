"""Episodes that a budget ends are scored, and every environment is closed."""

import asyncio
import threading

import episode_ends
import late
import pytest
import rollouts
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import calls
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.rl import table
from agent_r1_jax.rollout import rollout
from agent_r1_jax.tasks import context, rewards


@tool_lib.tool
def count(text: str) -> tool_lib.Report:
  """Counts.

  Args:
    text: Anything.
  """
  ran.append(text)
  return tool_lib.Report(len(text), reward=0.25)


ran: list[str] = []


def _parse(reply):
  return [calls.ToolCall('count', {'text': reply})] if len(reply) % 8 else []


_VALUE = {'done': 16.0, 'truncated': 32.0, 'max_turns': 64.0}


class TestBudgets:
  def _played(self, reward, wrap=lambda env: env, **kwargs):
    make = lambda: wrap(env_lib.ToolEnv([count], reward, parse=_parse, **kwargs))
    limits = config_lib.Limits(max_turns=3, max_turn_tokens=16)
    played = episode_ends.collect(
      make, episode_ends.tasks(8), limits=limits, samples=3, tree=episode_ends.params(1.4)
    )
    assert {t.status for t in played} == {'done', 'truncated', 'max_turns'}
    return played

  @pytest.mark.parametrize(
    'wrap', [lambda env: env, lambda env: context.SlidingWindow(env, turns=1)]
  )
  def test_the_reward_is_told_how_it_ended_and_what_was_said(self, wrap):
    heard = {}
    said = lambda messages: [m['content'] for m in messages if m['role'] == 'assistant']

    def reward(task, messages, *, status):
      heard[task.id, *said(messages)] = status
      return {'end': _VALUE[status]}

    ran.clear()
    played = self._played(reward, wrap, metrics=lambda task, messages: {'asked': 1.0})
    for t in played:
      tokens = [
        t.segments[turn.segment].tokens[turn.start : turn.stop] for turn in t.turns
      ]
      replies, status = [tiny.chat().decode(part) for part in tokens], t.status
      assert heard[t.task.id, *replies] == status
      # An unfinished reply's calls are not run and not paid.
      called = sum(bool(_parse(r)) for r in replies[: -1 if status != 'max_turns' else 3])
      assert t.metrics.get('reward/process', 0.0) == 0.25 * called
      assert t.metrics['reward/end'] == _VALUE[status] and t.metrics['asked'] == 1.0
      tokens = table.build([t])
      paid = tokens.rewards[tokens.action_mask]
      assert paid.sum() == t.reward == 0.25 * called + _VALUE[status]
      assert paid[-1] >= _VALUE[status]  # On the last action token: never lost.
    assert len(ran) == sum(4 * t.metrics.get('reward/process', 0.0) for t in played)

  def test_each_part_of_a_hybrid_gets_the_status(self):
    def end(task, messages, status):
      return _VALUE[status]

    async def end_later(task, messages, status='unknown'):
      return _VALUE[status]

    one = lambda task, messages: 1.0
    mixed = rewards.hybrid(a=(1.0, end), b=(3.0, end_later), c=(1.0, one))
    for t in self._played(mixed):
      assert t.reward - t.metrics.get('reward/process', 0.0) == 4 * _VALUE[t.status] + 1

  def test_finish_of_an_own_environment_scores_the_end_by_a_budget(self):
    class Judges(episode_ends.Env):
      def finish(self, status, reply):
        return types.Step([], reward=1000.0, metrics={status: float(reply is not None)})

    limits = config_lib.Limits(max_turns=1, max_turn_tokens=16)
    played = episode_ends.collect(
      Judges, episode_ends.tasks(8), limits=limits, tree=episode_ends.params(1.4)
    )
    assert {t.status for t in played} == {'truncated', 'max_turns'}
    for t in played:
      assert t.metrics[t.status] == (t.status == 'truncated')
      assert t.reward == 1000 + (len(t.messages[1]['content']) * (len(t.messages) > 2))

  def test_what_finish_raises_marks_its_episode_as_an_error(self):
    class Fails(episode_ends.Env):
      async def finish(self, status, reply):
        raise SystemExit('all is well')

    for t in episode_ends.collect(
      Fails, episode_ends.tasks(4), limits=config_lib.Limits(1, 16)
    ):
      assert t.status == 'error' and 'SystemExit: all is well' in t.error

  def test_a_prompt_that_fits_no_row_is_not_judged(self):
    task = types.Task('long', [{'role': 'user', 'content': 'one two three ' * 100}])
    (t,) = episode_ends.collect(lambda: env_lib.ToolEnv([], lambda *_: 1.0), [task])
    assert (t.status, t.turns, t.reward) == ('truncated', [], 0.0)


@pytest.mark.parametrize(
  'field',
  ['reset_seconds', 'step_seconds', 'close_seconds', 'episode_seconds', 'reward_seconds'],
)
@pytest.mark.parametrize('seconds', [0, -1.0, float('nan')])
def test_a_time_limit_that_is_not_above_0_is_refused(field, seconds):
  with pytest.raises(ValueError, match=f'{field} is .*must be a'):
    if field == 'reward_seconds':
      env_lib.ToolEnv([], lambda *_: 1.0, reward_seconds=seconds)
    else:
      config_lib.Limits(**{field: seconds}).check()


class TestClosing:
  @pytest.mark.parametrize('kind', [episode_ends.Env, episode_ends.PlainEnv])
  def test_every_environment_is_closed_once(self, no_clock, gate, kind, caplog):
    """Odd tasks are broken in their steps, even ones in reset; the first and last end."""
    closed = []

    def do(where, task):
      if where == ('reset', 'step')[task.answer % 2] and task.answer in (1, 2):
        raise ValueError('broken')
      if where == ('reset', 'step')[task.answer % 2] and task.answer in (3, 4):
        late.hang()
        return asyncio.sleep(3600) if kind is episode_ends.Env else gate.wait()

    class Plain(kind):
      def close(self):
        closed.append(self.task.answer)
        if self.task.answer == 2:
          raise SystemExit('close is broken')
        if self.task.answer == 3:
          late.hang()
          gate.wait()

    class Later(Plain):
      async def close(self):
        await asyncio.to_thread(super().close)

    limits = config_lib.Limits(1, 80, close_seconds=60)
    for make in (Plain, Later):
      closed.clear()
      played = episode_ends.collect(
        lambda make=make: make(do), episode_ends.tasks(6), limits=limits
      )
      assert sorted(closed) == list(range(6))
      assert [t.task.answer for t in played if 'close_failed' in t.metrics] == [2, 3]
      statuses = [t.status for t in played]
      assert statuses == ['max_turns'] + ['error'] * 4 + ['max_turns']
    assert 'SystemExit: close is broken' in caplog.text
    assert 'close gave no answer within 60 seconds (close_seconds)' in caplog.text

  def test_an_environment_that_is_made_too_late_is_closed(self, no_clock, gate):
    closed = threading.Event()

    class Closes(episode_ends.Env):
      def close(self):
        closed.set()

    def make_env():
      late.hang()
      gate.wait()
      return Closes()

    (t,) = episode_ends.collect(
      make_env, episode_ends.tasks(1), limits=config_lib.Limits(reset_seconds=60)
    )
    assert t.status == 'error' and not closed.is_set()
    gate.set()
    assert closed.wait(600)

  def test_environments_of_a_stopped_run_are_closed(self):
    closed, inside = [], threading.Semaphore(0)

    class Waits(episode_ends.Env):
      async def step(self, reply):
        inside.release()
        await asyncio.sleep(3600)

      async def close(self):
        # The end of the first episode must not interrupt the close of the second.
        await asyncio.sleep(0.2 * self.task.answer)
        closed.append(self.task.answer)

    engine = rollouts.make_engine(episode_ends.params())
    with engine.open():
      rollout.start(
        engine, tiny.chat(), episode_ends.tasks(2), Waits, limits=episode_ends.LIMITS
      )
      assert inside.acquire(timeout=600) and inside.acquire(timeout=600)
    assert sorted(closed) == [0, 1]
