"""Batches concurrent questions to one slow function."""

import asyncio
from collections.abc import Callable
import contextlib
import sys
import threading
import time
from typing import Any

from agent_r1_jax.host import workers


class Batcher:
  """Collects the questions of an event loop into batches.

  A batch belongs to the loop that opened it and is answered there, so one batcher can
  serve many loops. It grows until its turn comes. Questions that nobody awaits by then
  are dropped.
  """

  def __init__(
    self,
    answer: Callable[[list], Any],
    name: str,
    *,
    window: float = 0.003,
    timeout: float = 30.0,
    max_size: int = sys.maxsize,
    group: Callable[[Any], Any] = lambda question: None,
  ):
    """Begins without questions.

    Args:
      answer: Returns the answers to a list of questions, as a sequence. It runs in a
        thread, one call at a time: two calls overlap only if the first was abandoned.
      name: The name used in errors and counts.
      window: Seconds to wait for further questions.
      timeout: Seconds after which a call is abandoned.
      max_size: The maximum number of questions per call.
      group: Only questions with the same group share a call.
    """
    self._function, self._name = answer, name
    self._window, self._timeout = window, timeout
    self._max_size, self._group = max_size, group
    self._lock = threading.Lock()
    # The event loop of the batch that still grows, and its (question, future) pairs.
    self._open: tuple[asyncio.AbstractEventLoop, list] | None = None
    self._tasks: set[asyncio.Task] = set()
    # The batch whose turn it is, when its turn ends, and who waits for that.
    self._turn: tuple[object, float] | None = None
    self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

  async def ask(self, question: Any) -> Any:
    """Returns the answer to one question.

    Raises:
      workers.CallTimeoutError: The batch's call took too long.
    """
    loop, batch = asyncio.get_running_loop(), self._open
    if batch is None or batch[0] is not loop:
      batch = self._begin([], self._window)
    answer = loop.create_future()
    # If the asker is cancelled, asyncio would warn that the exception was never
    # retrieved.
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())
    batch[1].append((question, answer))
    return await answer

  def _begin(
    self, questions: list, window: float
  ) -> tuple[asyncio.AbstractEventLoop, list]:
    loop = asyncio.get_running_loop()
    self._open = batch = loop, questions
    task = loop.create_task(self._answer(questions, window))
    self._tasks.add(task)
    task.add_done_callback(self._tasks.discard)
    return batch

  async def _answer(self, waiting: list, window: float) -> None:
    await asyncio.sleep(window)
    turn = await self._take_turn()
    if self._open and self._open[1] is waiting:
      self._open = None
    if not (waiting := [pair for pair in waiting if not pair[1].done()]):
      self._end_turn(turn)
      return
    group = self._group(waiting[0][0])
    same = [pair for pair in waiting if self._group(pair[0]) == group]
    others = [pair for pair in waiting if self._group(pair[0]) != group]
    if others := others + same[self._max_size :]:
      self._begin(others, 0.0)
    questions, answers = zip(*same[: self._max_size], strict=True)
    try:
      found = await workers.call(
        self._ask, turn, [*questions], name=self._name, seconds=self._timeout
      )
    except Exception as error:
      for answer in answers:
        if not answer.done():
          answer.set_exception(error)
      return
    for answer, value in zip(answers, found, strict=True):
      if not answer.done():
        answer.set_result(value)

  async def _take_turn(self) -> object:
    """Waits for a turn, which ends after `timeout` seconds even if its call hangs."""
    while True:
      with self._lock:
        now = time.monotonic()
        if not self._turn or now >= self._turn[1]:
          self._turn = object(), now + self._timeout
          return self._turn[0]
        ended, seconds = asyncio.Event(), self._turn[1] - now
        self._waiters.append((asyncio.get_running_loop(), ended))
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
          await ended.wait()

  def _end_turn(self, turn: object) -> None:
    with self._lock:
      if self._turn and self._turn[0] is turn:
        self._turn = None
      waiters, self._waiters = self._waiters, []
    for loop, ended in waiters:
      with contextlib.suppress(RuntimeError):  # Its loop is closed.
        loop.call_soon_threadsafe(ended.set)

  def _ask(self, turn: object, questions: list) -> Any:
    try:
      answers = self._function(questions)
    finally:
      self._end_turn(turn)
    if len(answers) != len(questions):
      raise ValueError(
        f'{self._name} gave {len(answers)} answers to {len(questions)} questions'
      )
    return answers
