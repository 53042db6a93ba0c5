"""What pool.py does with samplers that are slow, silent, lost, broken and refused."""

import asyncio

import pytest

from agent_r1_jax import types
from agent_r1_jax.contrib.ray import places
from agent_r1_jax.contrib.ray import pool as pool_lib
from agent_r1_jax.contrib.ray import remote as remote_lib
from agent_r1_jax.rollout import sockets


class Remote:
  """A sampler in this process; `act` is what happens when it plays an order.

  After `hangs` calls it never answers again.
  """

  def __init__(self, act, hangs=1000):
    self.act, self.hangs, self.killed = act, hangs, False
    self.cancelled = []

  async def call(self, method, *args):
    await asyncio.sleep(0)
    self.hangs -= 1
    if self.hangs < 0:
      await asyncio.Event().wait()
    if method == 'open':
      return {'capacity': 4}
    if method == 'play':
      try:
        return await self.act(*args) or 'played'
      except asyncio.CancelledError:
        self.cancelled.append(args[0].number)
        raise
    return {'where': 'here'}

  def kill(self):
    self.killed = True


async def answer(order):
  pass


async def lose(order):
  raise remote_lib.LostError('its machine is gone')


async def fail(order):
  raise remote_lib.RaisedError('ValueError: 7')


def make_order(number=0):
  return sockets.Order(types.Task('t', []), 0, number, number, 0)


def read(packed, order):
  return types.Trajectory(order.task, 0, order.number, [], [], [], types.Status.DONE)


async def play(remotes, *orders, refuse=lambda found: None, **options):
  """Plays orders by a pool whose places start these samplers in turn."""
  given = iter(remotes)
  options = {'maximum': 2, 'wait_seconds': 30.0} | options
  pool = pool_lib.Pool(
    lambda number: next(given), 'job', refuse, read, pool_lib.Options(**options)
  )
  running = asyncio.create_task(pool.run())
  pool.publish(remote_lib.Policy(0, 0, 'learned', 'frozen'))
  try:
    async with asyncio.timeout(60):
      played = await asyncio.gather(*map(pool.orders.play, orders))
    return [t.sample for t in played], pool.orders.counts
  finally:
    running.cancel()
    await asyncio.wait([running])


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
  monkeypatch.setattr(pool_lib, '_LOOK_SECONDS', 0.01)
  for name in ('RESTART', 'LONGEST_PAUSE', 'PING'):
    monkeypatch.setattr(places, f'_{name}_SECONDS', 0.01)


@pytest.mark.parametrize('last', [3, 5])
async def test_a_straggler_is_played_twice_and_the_first_wins(last):
  """The other sampler has nothing to do."""

  async def hang(order):
    if order.number == last:
      await asyncio.Event().wait()

  remotes = Remote(hang), Remote(answer)
  if last == 3:
    remotes = remotes[::-1]  # The last four orders are those of the second one.
  orders = [make_order(number) for number in range(2 * last - 2)]
  found, counts = await play(remotes, *orders)
  assert found == [*range(2 * last - 2)]
  assert counts['twice'] <= 1 and counts['lost'] == 0
  assert [*remotes[0].cancelled, *remotes[1].cancelled] == [last][: counts['twice']]


@pytest.mark.parametrize(
  ('act', 'hangs', 'joined'),
  [(lose, 1000, 2), (fail, 1000, 2), (answer, 4, 2), (answer, 2, 1)],
)
async def test_the_episodes_of_a_lost_sampler_go_to_others(act, hangs, joined):
  """Gone, broken, silent from its first episode on, or hung while it loads."""
  first = Remote(act, hangs)
  remotes = [first, *(Remote(answer) for _ in range(9))]
  bounds = {'silence_seconds': 0.2, 'wait_seconds': 1.0, 'maximum': 1}
  found, counts = await play(remotes, *map(make_order, range(6)), **bounds)
  assert found == [*range(6)] and first.killed
  assert (counts['lost'], counts['joined']) == (joined - 1, joined)


@pytest.mark.parametrize(
  ('act', 'message'),
  [
    (fail, r"task 't', sample 0\) raised on 3 samplers: ValueError: 7"),
    (lose, 'it may be'),
  ],
)
async def test_an_episode_that_ends_all_samplers_ends_the_run(act, message):
  with pytest.raises(RuntimeError, match=message):
    await play((Remote(act) for _ in range(30)), make_order())


@pytest.mark.parametrize('minimum', [1, 3])
async def test_a_run_without_samplers_ends(minimum):
  """All are refused; or there are two, and three are needed."""
  refuse = (lambda found: 'other code') if minimum == 1 else (lambda found: None)
  remotes = (
    Remote(answer if minimum == 1 else lambda order: asyncio.Event().wait())
    for _ in range(99)
  )
  with pytest.raises(sockets.SamplersLostError) as error:
    await play(remotes, make_order(), minimum=minimum, wait_seconds=0.3, refuse=refuse)
  assert f'minimum={minimum}; there are {0 if minimum == 1 else 2}.' in str(error.value)
  assert ('other code' in str(error.value)) == (minimum == 1)
