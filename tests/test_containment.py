"""Rollouts whose tools, rewards and environments hang, lie and raise what they can."""

import asyncio
import contextvars
import itertools
import os
import signal
import sys
import threading

import episode_ends
import late
import pytest
import raised
import rollouts
import runs
import script
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import calls
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.host import preemption, thread_pool, workers
from agent_r1_jax.tasks import rewards


@pytest.fixture
def pool(monkeypatch):
  made = thread_pool.Pool(threads=4)
  monkeypatch.setattr(thread_pool, 'POOL', made)
  return made


_ENDS = (*raised.ENDS, *raised.ERRORS)
_KINDS = [type(error).__name__ for error in _ENDS] + ['os._exit(0)']


def _raise(task):
  """Each task but the last has an error of its own; the last is played to its end."""
  if task.answer < len(_ENDS):
    raise _ENDS[task.answer].with_traceback(None)
  if task.answer == len(_ENDS):
    os._exit(0)


class TestRaising:
  @pytest.mark.parametrize('where', ['make_env', 'reset', 'step'])
  @pytest.mark.parametrize('kind', [episode_ends.Env, episode_ends.PlainEnv])
  def test_what_an_environment_raises_marks_its_own_episode(self, kind, where):
    def do(at, task):
      if at == where:
        _raise(task)

    def make_env():
      if where == 'make_env' and len(made := seen) < len(_KINDS):
        made.append(len(made))
        _raise(types.Task('', [], made[-1]))
      return kind(do)

    seen, tasks = [], episode_ends.tasks(len(_KINDS) + 2)
    played = episode_ends.collect(make_env, tasks)
    assert [t.status for t in played] == ['error'] * len(_KINDS) + ['done'] * 2
    for name, t in zip(_KINDS, played):
      assert name in t.error and 'test_containment.py' in t.error
      assert sum(v for k, v in t.metrics.items() if k.startswith('error/')) == 1
      assert len(t.turns) == (where == 'step')
    if where != 'make_env':
      for t, expected in zip(
        played[-2:], episode_ends.collect(episode_ends.Env, tasks)[-2:]
      ):
        rollouts.assert_same(t, expected)

  @pytest.mark.parametrize('where', ['reward', 'process_reward', 'metrics', 'parse'])
  @pytest.mark.parametrize('is_async', [True, False])
  def test_what_a_reward_raises_marks_its_own_episode(self, where, is_async):
    def fails(task_or_env, *_):
      _raise(getattr(task_or_env, 'task', task_or_env))
      return {} if where == 'metrics' else 1.0

    async def fails_later(*args):
      return fails(*args)

    class Parses(env_lib.ToolEnv):
      async def step(self, reply):
        if where == 'parse':
          self._parse = lambda reply: fails(self.task) and []
        return await super().step(reply)

    functions = {'reward': lambda task, messages: 1.0}
    if where != 'parse':
      functions[where] = fails_later if is_async else fails
    played = episode_ends.collect(
      lambda: Parses([], **functions), episode_ends.tasks(len(_KINDS) + 1)
    )
    assert [t.status for t in played] == ['error'] * len(_KINDS) + ['done']
    for name, t in zip(_KINDS, played):
      assert name in t.error and 'test_containment.py' in t.error

  def test_a_malformed_step_marks_its_episode(self):
    steps = [
      None,
      types.Step([], reward='much'),  # type: ignore
      types.Step([], reward=float('inf'), done=True),
      types.Step([], metrics={'reward/x': float('nan')}, done=True),
      types.Step([], metrics={'x': 'y'}, done=True),  # type: ignore
      types.Step(None),  # type: ignore
      types.Step(['hello']),  # type: ignore
      types.Step([{'content': 'x'}]),
      types.Step([{'role': 'user', 'content': 3}]),
    ]

    class Lies(episode_ends.Env):
      async def step(self, reply):
        return steps[self.task.answer]

    messages = [
      'not a Step',
      'TypeError',
      'the reward of a turn is inf',
      'the reward/x of a turn is nan',
    ]
    messages += ['ValueError', 'not a list', 'no message', 'no role', '']
    for t, message in zip(
      episode_ends.collect(Lies, episode_ends.tasks(9)), messages, strict=True
    ):
      assert t.status == 'error' and message in t.error

  def test_what_a_reward_does_to_its_arguments_nobody_sees(self):
    """Neither the other samples of the task, nor the other functions, nor the record."""
    seen = []

    def spoils(task, messages, status='done'):
      seen.append((repr(task), messages[0]['content'], len(messages)))
      task.messages.clear()
      task.info['list'].clear()
      task.info['more'] = 1
      messages[0]['content'] = ''
      del messages[1:]
      return 1.0

    class Spoils(env_lib.ToolEnv):
      async def reset(self, task):
        opening = await super().reset(task)
        task.info['list'].append('spoiled')
        task.messages.append('spoiled')  # type: ignore
        return opening

    (task,), other = episode_ends.tasks(1), episode_ends.tasks(1)[0]
    for make_env in (
      lambda: env_lib.ToolEnv([], spoils, metrics=lambda *a: {'m': spoils(*a)}),
      lambda: env_lib.ToolEnv([], rewards.hybrid(a=(1.0, spoils), b=(1.0, spoils))),
    ):
      seen.clear()
      played = episode_ends.collect(make_env, [task], samples=3)
      assert {s[:2] for s in seen} == {(repr(other), 'What is 0?')}
      assert min(n for _, _, n in seen) == 2
      assert task == other and all(t.task is task for t in played)
      assert all(t.messages[0]['content'] == 'What is 0?' for t in played)
    episode_ends.collect(lambda: Spoils([], spoils), [task], samples=2)
    assert task == other


class TestHanging:
  @pytest.mark.parametrize('kind', [episode_ends.Env, episode_ends.PlainEnv])
  @pytest.mark.parametrize('where', ['reset', 'step'])
  def test_an_environment_that_hangs_costs_its_own_episode(
    self, no_clock, gate, kind, where
  ):
    """The coroutine waits, the plain method holds its thread."""

    def do(at, task):
      if at == where and task.answer in (1, 2):
        late.hang()
        return asyncio.sleep(3600) if kind is episode_ends.Env else gate.wait()

    limits = config_lib.Limits(3, 80, **{f'{where}_seconds': 60.5})
    played = episode_ends.collect(lambda: kind(do), episode_ends.tasks(6), limits=limits)
    for t, expected in zip(
      played, episode_ends.collect(episode_ends.Env, episode_ends.tasks(6)), strict=True
    ):
      if t.task.answer not in (1, 2):
        rollouts.assert_same(t, expected)
        continue
      assert t.status == 'error'
      text = f'{where} gave no answer within 60.5 seconds ({where}_seconds)'
      assert text in t.error
      assert t.metrics['timeouts'] == 1.0
      abandoned = {k: v for k, v in t.metrics.items() if 'abandoned' in k}
      hung = {'abandoned_calls': 1.0, f'abandoned/{where}': 1.0}
      assert abandoned == ({} if kind is episode_ends.Env else hung)

  @pytest.mark.parametrize('where', ['make_env', 'reward', 'process_reward', 'metrics'])
  def test_a_function_that_hangs_is_abandoned_and_counted(self, no_clock, gate, where):
    def hangs(*args):
      late.hang()
      gate.wait()

    limits, make, field = config_lib.Limits(reset_seconds=60), hangs, 'reset_seconds'
    if where != 'make_env':
      functions = {'reward': lambda task, messages: 1.0} | {where: hangs}
      make = lambda: env_lib.ToolEnv([], **functions, reward_seconds=60)
      limits, field = episode_ends.LIMITS, 'reward_seconds'
    for t in episode_ends.collect(make, episode_ends.tasks(2), limits=limits):
      assert t.status == 'error'
      assert f'{where} gave no answer within 60 seconds ({field})' in t.error
      assert t.metrics['timeouts'] == t.metrics[f'abandoned/{where}'] == 1.0

  def test_an_episode_beyond_its_time_is_an_error(self, monkeypatch):
    """Its time is over when its step hangs."""
    timeout, episode = asyncio.timeout, contextvars.ContextVar('episode')

    def timeout_of_episode(seconds):
      assert seconds == 5
      clock = timeout(None)
      episode.set((asyncio.get_running_loop(), clock))
      return clock

    def do(where, task):
      if task.answer == 1 and where == 'step':
        loop, clock = episode.get()
        loop.call_soon_threadsafe(clock.reschedule, 0)
        return asyncio.sleep(3600)

    monkeypatch.setattr(asyncio, 'timeout', timeout_of_episode)
    limits = config_lib.Limits(3, 80, episode_seconds=5.0)
    first, hung, last = episode_ends.collect(
      lambda: episode_ends.Env(do), episode_ends.tasks(3), limits=limits
    )
    assert (first.status, last.status) == ('done', 'done')
    assert hung.error == 'the episode took longer than 5 seconds (episode_seconds)'
    assert (hung.status, hung.metrics['timeouts']) == ('error', 1.0)
    assert hung.metrics['error/LateEpisode'] == 1.0

  def test_where_more_tools_hang_than_there_are_threads_the_others_are_served(
    self, no_clock, gate, pool
  ):
    """In plain functions and in to_thread; the others are served and end."""

    def hang():
      late.hang()
      gate.wait()
      return 'too late'

    @tool_lib.tool(timeout=60.0)
    def hangs() -> str:
      """Hangs."""
      return hang()

    @tool_lib.tool(timeout=60.0)
    async def hangs_in_thread() -> str:
      """Hangs."""
      return await asyncio.to_thread(hang)

    @tool_lib.tool(timeout=60.0)
    def works() -> str:
      """Works."""
      return 'served'

    class Calls(env_lib.ToolEnv):
      async def reset(self, task):
        kinds = ['hangs', 'hangs_in_thread', 'works']
        found = [calls.ToolCall(k, {}) for k in kinds[task.answer % 2 :]]
        self._parse = lambda r: found * (self.messages[-2]['role'] != 'tool')
        return await super().reset(task)

    tools = [hangs, hangs_in_thread, works]
    played = episode_ends.collect(
      lambda: Calls(tools, lambda *_: 1.0), episode_ends.tasks(12)
    )
    assert [(t.status, t.reward) for t in played] == [('done', 1.0)] * 12
    for t in played:
      said = [m['content'] for m in t.messages if m['role'] == 'tool']
      assert all(text.endswith('gave no answer within 60 seconds') for text in said[:-1])
      hung = 2 - t.task.answer % 2
      assert t.metrics['tool_timeouts'] == t.metrics['tool_errors'] == hung
      assert t.metrics['abandoned_calls'] >= 1
      assert t.metrics['abandoned_calls'] == sum(
        t.metrics.get(f'abandoned/{tool.name}', 0) for tool in tools
      )
    most = 2 * tiny.SIZES['rows']  # A rollout lets so many be at work.
    assert sum(t.metrics['abandoned_calls'] for t in played) > most
    assert sum(pool.abandoned.values()) > most

  def test_what_is_stuck_is_named_before_it_is_given_up(self, caplog, gate):
    @tool_lib.tool(timeout=0.5)
    def search() -> str:
      """Hangs."""
      gate.wait()
      return 'too late'

    class Calls(env_lib.ToolEnv):
      async def reset(self, task):
        self._parse = lambda r: [calls.ToolCall('search', {})] * (len(self.messages) == 2)
        return await super().reset(task)

    (played,) = episode_ends.collect(
      lambda: Calls([search], lambda *_: 1.0), episode_ends.tasks(1)
    )
    assert played.metrics['tool_timeouts'] == 1
    assert [r.message for r in caplog.records if 'no answer' in r.message] == [
      'search has given no answer for 0.25 of 0.5 seconds (task task 0, sample 0, turn 1)'
    ]

  def test_any_number_that_block_at_once_cost_their_own_episodes(
    self, no_clock, monkeypatch, gate
  ):
    """One is caught by five others, one after the other, and still played to its end."""
    # So that no call leaves a loop that is slow and not blocked.
    monkeypatch.setattr(workers, 'BLOCKED_SECONDS', 600)
    attempts, caught, over = itertools.count(), [], threading.Event()

    class Caught(episode_ends.Env):
      """In its first attempts task 0 waits, and something blocks its event loop."""

      def reset(self, task):
        self.task = task
        assert task.answer == 0 or over.wait(600)
        return list(task.messages)

      async def step(self, reply):
        if self.task.answer == 0 and next(attempts) < 5:
          caught.append(late.this_call())
          asyncio.get_running_loop().call_soon(block)
          await asyncio.sleep(3600)
        return await super().step(reply)

    def block():
      caught[-1].strike()
      gate.wait()

    limits = config_lib.Limits(3, 80, reset_seconds=60, step_seconds=60)
    played = episode_ends.collect(
      Caught, episode_ends.tasks(6), limits=limits, on_done=lambda t: over.set()
    )
    assert len(caught) == 5
    for t, expected in zip(
      played, episode_ends.collect(episode_ends.Env, episode_ends.tasks(6)), strict=True
    ):
      rollouts.assert_same(t, expected)


model = runs.model


class TestRun:
  """Whole runs in processes of their own: `main` below."""

  def test_sigterm_saves_and_ends_a_run_whose_tools_all_hang(self, model, tmp_path):
    """More than there are threads, and the event loop of users' coroutines."""
    ended = script.run(__file__, str(tmp_path), model)
    assert ended.returncode == preemption.EXIT_STATUS, ended.stderr
    assert 'without a new checkpoint' not in ended.stderr
    assert list((tmp_path / 'checkpoints').iterdir())


def main(workdir, model):
  """Trains while all tools, and the event loop of users' coroutines, hang for ever."""
  never, hung = threading.Event(), []

  @tool_lib.tool(timeout=1000.0)
  def hangs() -> str:
    """Hangs in its thread."""
    never.wait()
    return ''

  class Hangs(env_lib.ToolEnv):
    async def step(self, reply):
      hung.append(reply)
      if len(hung) == 4:  # All rows.
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
        never.wait()  # Blocks the loop.
      return await super().step(reply)

  parse = lambda reply: [calls.ToolCall('hangs', {})]
  config = runs.config(model, steps=2, tasks=3, eval_every=0)
  thread_pool.POOL = thread_pool.Pool(threads=4)
  os.environ['AGENT_R1_GRACE_SECONDS'] = '600'  # However slow the machine is.
  make = lambda: Hangs([hangs], lambda task, messages: 1.0, parse=parse)
  runs.run_here(config, workdir, make_env=make, evals=None)


if __name__ == '__main__':
  main(*sys.argv[1:])
