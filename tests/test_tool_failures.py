"""Tools that fail are called again, or no longer called."""

import pytest

from agent_r1_jax.agent import tool as tool_lib


@pytest.fixture
def clock(monkeypatch):
  """A clock that only pauses move; the list is of the pauses."""
  pauses = []

  async def sleep(seconds):
    pauses.append(seconds)

  monkeypatch.setattr(tool_lib, '_sleep', sleep)
  monkeypatch.setattr(tool_lib, '_clock', lambda: sum(pauses))
  return pauses


@pytest.mark.parametrize(
  ('idempotent', 'timeout', 'errors', 'pauses', 'ok'),
  [
    (True, 30.0, [OSError] * 2, [0.5, 1.0], True),
    (True, 30.0, [OSError] * 9, [0.5, 1.0, 2.0, 4.0], False),
    # Within one timeout: after 0.5 + 1 seconds another two are too many.
    (True, 3.0, [OSError] * 9, [0.5, 1.0], False),
    (True, 30.0, [OSError, ValueError], [0.5], False),
    (True, 30.0, [KeyError], [], False),
    (False, 30.0, [OSError], [], False),
  ],
)
async def test_idempotent_tools_are_called_again(
  clock, idempotent, timeout, errors, pauses, ok
):
  left = [*errors]

  @tool_lib.tool(timeout=timeout, idempotent=idempotent)
  def search() -> str:
    """Searches."""
    if left:
      raise left.pop(0)('no')
    return 'found'

  result = await tool_lib.call(search, {})
  assert clock == pauses and result.retries == len(pauses)
  assert (result.ok, result.seconds) == (ok, sum(pauses))


async def test_a_tool_that_keeps_failing_is_isolated_in_all_episodes(monkeypatch):
  calls, raised = [], [OSError]

  def make():
    @tool_lib.tool
    def lost() -> str:
      """Fails."""
      calls.append(1)
      raise raised[0]

    return lost

  for error in (ValueError, RuntimeError, ConnectionError):
    raised[0] = error
    results = [await tool_lib.call(make(), {}) for _ in range(20)]
    assert [r.failed for r in results] == [error is ConnectionError] * 20
  assert len(calls) == 60
  result = await tool_lib.call(make(), {})
  assert result.isolated and not result.ok and len(calls) == 60
  assert result.text == 'Error: lost: the tool failed too often and is not called for now'


async def test_calls_that_say_nothing_about_the_tool_do_not_change_its_isolation():
  now, outcome = [0.0], ConnectionError()

  @tool_lib.tool
  def gone(name: str) -> str:
    """Fails, until it works.

    Args:
      name: A name.
    """
    if outcome:
      raise outcome
    return 'found'

  async def call(**arguments):
    return await tool_lib.call(gone, arguments)

  assert tool_lib._get_breaker.cache_info().maxsize  # Tools may be made without end.
  tool_lib._get_breaker('gone', gone.fn.__code__)._clock = lambda: now[0]
  for number in range(20):
    if number % 3 == 0:
      assert 'unknown argument' in (await call(page=1)).text
      outcome = ValueError('no such name')
      assert not (await call(name='x')).failed
      outcome = ConnectionError()
    assert (await call(name='x')).failed
  assert (await call(name='x')).isolated
  now[0] = 31.0  # One call is tried, and a malformed one is not that call.
  assert not (await call(page=1)).isolated
  outcome = ValueError('no such name')
  assert not (await call(name='x')).isolated
  # It was an answer to that call alone: the others still wait.
  assert (await call(name='x')).isolated
  now[0], outcome = 62.0, None
  assert [(await call(name='x')).text for _ in range(2)] == ['found', 'found']
