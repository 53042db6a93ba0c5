"""Time-outs that strike when a function says that it hangs: no clock decides.

A test that uses the fixture `no_clock` gives its calls limits above a second. A call is
late from the moment at which something in it calls `late.hang()`; all others may take as
long as a busy machine needs.
"""

import asyncio
import contextvars

from agent_r1_jax.host import workers


class Call:
  """One call of a user's function."""

  def __init__(self):
    self.loop = asyncio.get_running_loop()
    self.is_late = asyncio.Event()

  def strike(self):
    """Lets its time be over; from any thread."""
    self.loop.call_soon_threadsafe(self.is_late.set)


_call: contextvars.ContextVar[Call | None] = contextvars.ContextVar('call', default=None)


def this_call() -> Call:
  """The call that the present function serves, also from threads that it started."""
  call = _call.get()
  assert call, 'this is in no call, or the test has not asked for no_clock'
  return call


def hang():
  """Says that the present call hangs: its time is over at once."""
  this_call().strike()


def install(monkeypatch):
  """Replaces what waits in `workers`; limits of a second or less are real ones."""
  real_wait = asyncio.wait

  def tracked(call):
    async def track(*args, **kwargs):
      token = _call.set(Call())
      try:
        return await call(*args, **kwargs)
      finally:
        _call.reset(token)

    return track

  async def wait(futures, *, timeout=None):
    call = _call.get()
    if call is None or timeout is None or timeout <= 1:
      return await real_wait(futures, timeout=timeout)
    struck = asyncio.ensure_future(call.is_late.wait())
    done = await real_wait([*futures, struck], return_when=asyncio.FIRST_COMPLETED)
    struck.cancel()
    return done

  monkeypatch.setattr(asyncio, 'wait', wait)
  for name in ('call', 'call_on_user_loop'):
    monkeypatch.setattr(workers, name, tracked(getattr(workers, name)))
