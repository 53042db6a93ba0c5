"""A circuit breaker: holds back calls to something that failed many times in a row."""

from collections.abc import Callable
import threading
import time


class Breaker:
  """Lets calls through until too many fail in a row.

  It then holds all calls back for a pause, after which it lets one through. If that call
  succeeds, it lets all calls through again.
  """

  def __init__(
    self, failures: int, pause: float, clock: Callable[[], float] | None = None
  ):
    """Starts by letting all calls through.

    Args:
      failures: How many failures in a row hold calls back.
      pause: Seconds after which one call is let through.
      clock: Returns the time in seconds; time.monotonic by default.
    """
    self._max_failures, self._pause = failures, pause
    self._clock = clock or (lambda: time.monotonic())
    self._failures, self._until = 0, 0.0
    self._lock = threading.Lock()

  def hold_back(self) -> bool:
    """Whether to hold a call back; False lets it through."""
    with self._lock:
      now = self._clock()
      if self._failures < self._max_failures:
        return False
      if now < self._until:
        return True
      self._until = now + self._pause  # Others wait for this call.
      return False

  def record(self, failed: bool) -> None:
    """Records the outcome of a call that was let through."""
    with self._lock:
      self._failures = self._failures + 1 if failed else 0
      self._until = self._clock() + self._pause
