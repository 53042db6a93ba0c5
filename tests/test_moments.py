"""Moments of a run: who watches sees them nested, and else nothing happens."""

import asyncio
from concurrent import futures
import contextlib
import contextvars
import threading

import pytest
import runs
import tiny

from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.host import moments

# The moment that is watched where this is read; a context variable, as an observer's.
_inside: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
  'inside', default=()
)


class Observer:
  """Keeps the path of each moment, and what it knew at its end."""

  def __init__(self):
    self.seen, self._lock = [], threading.Lock()

  @contextlib.contextmanager
  def watch(self, moment):
    path = (*_inside.get(), type(moment).__name__)
    token = _inside.set(path)
    try:
      yield moment
    finally:
      _inside.reset(token)
      with self._lock:
        self.seen.append((path, moment))

  def carrier(self):
    return {'inside': '/'.join(_inside.get())}

  def find(self, name):
    return [(path, moment) for path, moment in self.seen if path[-1] == name]


@contextlib.contextmanager
def _observed():
  observer = Observer()
  token = moments.observer.set(observer)
  try:
    yield observer
  finally:
    moments.observer.reset(token)


def test_moments_of_a_run_are_nested(tmp_path, model):
  def run():
    with _observed() as observer:
      runs.run_here(runs.config(model, steps=2, eval_every=1), tmp_path)
      return observer

  observer = tiny.within(run)
  paths = {path for path, _ in observer.seen}
  episode = ('Rollout', 'Episode')
  within = [(), ('Turn',), ('Turn', 'Reply'), ('Turn', 'ToolCall')]
  in_steps = {('Step', *episode, *rest) for rest in within}
  # Evaluations are rollouts that belong to no step.
  others = {('Step',), ('Step', 'Rollout'), ('Step', 'Update'), ('Rollout',)}
  # A greedy policy may call no tool.
  paths.add(('Rollout', 'Episode', 'Turn', 'ToolCall'))
  assert paths == in_steps | {path[1:] for path in in_steps} | others
  assert [moment.number for _, moment in observer.find('Step')] == [1, 2]
  steps = [moment.step for _, moment in observer.find('Rollout')]
  assert steps == [None, 1, None, 2, None]
  assert all(moment.chunk is not None for _, moment in observer.find('Reply'))
  assert all(moment.result.ok for _, moment in observer.find('ToolCall'))


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  return tiny.save(tmp_path_factory.mktemp('model') / 'tiny', runs.likely())


def test_without_an_observer_there_is_nothing():
  update = moments.Update(3)
  with moments.watch(update) as moment:
    assert moment is update
  assert moments.carrier() == {}
  future = futures.Future()
  assert moments.follow(moments.Rollout(None, 1), lambda: future) is future


def test_a_followed_moment_has_ended_when_its_future_is_done():
  with _observed() as observer:
    started = futures.Future()
    inside = []

    def start():
      inside.append(_inside.get())
      return started

    followed = moments.follow(moments.Rollout(1, 2), start)
    assert inside == [('Rollout',)] and _inside.get() == () and not observer.seen
    started.set_result('all')
    assert followed.result(10) == 'all' and len(observer.seen) == 1
    failed = futures.Future()
    followed = moments.follow(moments.Rollout(1, 2), lambda: failed)
    failed.set_exception(KeyError('one'))
    with pytest.raises(KeyError):
      followed.result(10)
    dropped = futures.Future()
    followed = moments.follow(moments.Rollout(1, 2), lambda: dropped)
    dropped.cancel()
    assert followed.cancelled() and len(observer.seen) == 3


def test_a_followed_moment_that_fails_at_its_end_keeps_nobody_waiting():
  class Failing(Observer):
    @contextlib.contextmanager
    def watch(self, moment):
      yield moment
      raise ValueError('no room')

  token = moments.observer.set(Failing())
  try:
    started = futures.Future()
    followed = moments.follow(moments.Rollout(1, 2), lambda: started)
    started.set_result('all')
    with pytest.raises(ValueError, match='no room'):
      followed.result(10)
  finally:
    moments.observer.reset(token)


@pytest.mark.parametrize('is_async', [False, True])
def test_a_tool_is_inside_its_call_wherever_it_runs(is_async):
  seen = []

  @tool_lib.tool
  def act() -> str:
    """Acts."""
    seen.append(moments.carrier())
    return ''

  @tool_lib.tool(name='act')
  async def act_async() -> str:
    """Acts."""
    return await asyncio.to_thread(act)

  with _observed() as observer:
    result = asyncio.run(tool_lib.call(act_async if is_async else act, {}))
  ((_, moment),) = observer.seen
  assert result.ok and moment.name == 'act' and moment.result is result
  assert seen == [{'inside': 'ToolCall'}]
