"""The breaker that isolates a tool."""

from agent_r1_jax.agent import breaker as breaker_lib


def test_one_call_is_let_through_after_a_pause():
  now = [0.0]
  breaker = breaker_lib.Breaker(2, 10.0, clock=lambda: now[0])
  # (time, the outcome of a call that is let through there, or None where none is)
  for time, failed in [
    (0, True),
    (0, False),
    (0, True),
    (1, True),
    (2, None),
    (10, None),
    (11, True),
    (12, None),
    (21, False),
    (21, True),
    (21, False),
  ]:
    now[0] = time
    assert (breaker.hold_back() == 0) == (failed is not None), time
    if failed is not None:
      breaker.record(failed)
  breaker.record(True)
  breaker.record(True)
  now[0] = 31.5
  # Only one is tried; the others do not wait for it.
  assert [breaker.hold_back() for _ in range(3)] == [0.0, 10.0, 10.0]
