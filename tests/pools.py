"""A small pool of threads for one test, and a function that hangs in it."""

import late
import pytest

from agent_r1_jax.host import thread_pool


@pytest.fixture
def pool(monkeypatch):
  """A small one for the test alone; what hangs in it is let go at the end."""
  made = thread_pool.Pool(threads=3, max_abandoned=6)
  monkeypatch.setattr(thread_pool, 'POOL', made)
  return made


@pytest.fixture
def hang(no_clock, gate):
  """A function that hangs: a call of it is late as soon as it has begun."""

  def hang():
    late.hang()
    return gate.wait()

  return hang
