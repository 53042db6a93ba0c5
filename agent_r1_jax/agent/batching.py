"""Batches what many agents ask of one slow function at about the same time."""

import asyncio
from collections.abc import Callable
import threading
import time
from typing import Any

from agent_r1_jax.host import workers


class Batcher:
  """Collects the questions of an event loop into batches.

  A batch belongs to the loop that opened it and is answered there, so that one batcher
  can serve many loops. It grows until its turn comes.
  """

  def __init__(
    self,
    answer: Callable[[list], Any],
    name: str,
    window: float = 0.003,
    timeout: float = 30.0,
  ):
    """Begins without a question.

    Args:
      answer: Returns a sequence of the answers to a list of questions. It runs in a
        thread, one call at a time: two calls overlap only if the first was abandoned.
      name: What errors and counts call it.
      window: Seconds to wait for further questions.
      timeout: Seconds after which a call is abandoned.
    """
    self._function, self._name = answer, name
    self._window, self._timeout = window, timeout
    self._lock = threading.Lock()
    self._open = None  # (loop, questions, answer) of the batch that may still grow.
    # The batch whose turn it is, and the end of its turn.
    self._turn: tuple[object, float] | None = None

  async def ask(self, question: Any) -> Any:
    """Returns the answer to one question.

    Raises:
      workers.CallTimeoutError: The batch's call took too long.
    """
    loop = asyncio.get_running_loop()
    batch = self._open
    if batch is None or batch[0] is not loop:
      questions = []
      batch = self._open = (loop, questions, loop.create_task(self._answer(questions)))
      # Nobody may await it any longer; asyncio would warn of its exception.
      batch[2].add_done_callback(lambda task: task.cancelled() or task.exception())
    _, questions, answer = batch
    questions.append(question)
    row = len(questions) - 1
    # One agent's time-out must not cancel the call for the others.
    return (await asyncio.shield(answer))[row]

  async def _answer(self, questions: list) -> Any:
    await asyncio.sleep(self._window)
    # A call that hangs would hold a lock for ever.
    while not (turn := self._take_turn()):
      await asyncio.sleep(max(self._window, 0.001))
    batch = self._open
    if batch and batch[1] is questions:
      self._open = None
    return await workers.call(
      self._ask, turn, questions, name=self._name, seconds=self._timeout
    )

  def _take_turn(self) -> object | None:
    """Returns a turn of `timeout` seconds; None during the turn of another batch."""
    with self._lock:
      now = time.monotonic()
      if self._turn and now < self._turn[1]:
        return None
      self._turn = object(), now + self._timeout
      return self._turn[0]

  def _ask(self, turn: object, questions: list) -> Any:
    try:
      answers = self._function(questions)
    finally:
      with self._lock:
        if self._turn and self._turn[0] is turn:
          self._turn = None
    if len(answers) != len(questions):
      raise ValueError(
        f'{self._name} gave {len(answers)} answers to {len(questions)} questions'
      )
    return answers
