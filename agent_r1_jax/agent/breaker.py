"""A circuit breaker: keeps calls from what failed many times in a row."""

from collections.abc import Callable
import threading
import time


class Breaker:
  """Lets calls through until too many fail one after the other.

  Then no call is let through for a pause; after it a single one is, and if that succeeds
  all are again.
  """

  def __init__(
    self, failures: int, pause: float, clock: Callable[[], float] | None = None
  ):
    """Lets all calls through.

    So many `failures` in a row hold further calls back; `pause` seconds later one is let
    through.
    """
    self._max_failures, self._pause = failures, pause
    self._clock = clock or (lambda: time.monotonic())
    self._failures, self._until = 0, 0.0
    self._lock = threading.Lock()

  def hold_back(self) -> bool:
    """Whether a call must not be made now; False lets it through."""
    with self._lock:
      now = self._clock()
      if self._failures < self._max_failures:
        return False
      if now < self._until:
        return True
      self._until = now + self._pause  # Others wait for this call.
      return False

  def record(self, failed: bool) -> None:
    """Counts a call that was made."""
    with self._lock:
      self._failures = self._failures + 1 if failed else 0
      self._until = self._clock() + self._pause
