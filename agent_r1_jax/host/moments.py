"""The observable moments of a run, such as a step, a turn or a tool call.

  with moments.watch(moments.ToolCall('search')) as call:
    call.result = await ...

By default nobody watches, and a moment costs about a microsecond. The observer is a
context variable, so it also watches the tasks, threads and event loops that are started
where it is set; context variables that it sets are passed on in the same way.
"""

from collections.abc import Callable
from concurrent import futures
import contextlib
import contextvars
import dataclasses
from typing import Any, Protocol, TypeVar


@dataclasses.dataclass
class Step:
  """A training step: its rollout and its update; `number` is as in metrics.jsonl."""

  number: int


@dataclasses.dataclass
class Rollout:
  """Episodes that are played together.

  Attributes:
    step: The training step that learns from them, if any.
    episodes: The number of episodes in this process.
  """

  step: int | None
  episodes: int


@dataclasses.dataclass
class Episode:
  """An episode, from the time it has a row; `trajectory` is complete at the end."""

  trajectory: Any


@dataclasses.dataclass
class Turn:
  """A reply and the environment's answer; `number` counts from 0 in an episode."""

  number: int


@dataclasses.dataclass
class Reply:
  """The sampling of a reply.

  Attributes:
    context_tokens: The number of tokens before it, including tokens in the cache.
    chunk: The sampled tokens; None if they were dropped.
  """

  context_tokens: int
  chunk: Any = None


@dataclasses.dataclass
class ToolCall:
  """A call of a tool; `result` is its ToolResult."""

  name: str
  result: Any = None


@dataclasses.dataclass
class Update:
  """An update of the policy from `episodes` episodes."""

  episodes: int


_Moment = TypeVar('_Moment', Step, Rollout, Episode, Turn, Reply, ToolCall, Update)


class Observer(Protocol):
  """Watches moments. An exception in it ends the run, so it must handle its errors."""

  def watch(self, moment: _Moment) -> contextlib.AbstractContextManager[_Moment]:
    """Returns a context manager of the moment, which gets its results inside `with`."""
    ...

  def carrier(self) -> dict[str, str]:
    """Returns headers that identify the moment in requests, such as traceparent."""
    ...


observer: contextvars.ContextVar[Observer | None] = contextvars.ContextVar(
  'observer', default=None
)


def watch(moment: _Moment) -> contextlib.AbstractContextManager[_Moment]:
  """Returns a context manager that watches a moment, if there is an observer."""
  watching = observer.get()
  return watching.watch(moment) if watching else contextlib.nullcontext(moment)


def carrier() -> dict[str, str]:
  """Returns headers for requests to other programs; none if nobody watches."""
  watching = observer.get()
  return watching.carrier() if watching else {}


def begin(
  moment: _Moment, context: contextvars.Context
) -> tuple[contextvars.Context, Callable[[], None]]:
  """Begins a moment that ends elsewhere, inside the moment of `context`.

  Returns:
    The context in which the moment is innermost, and a function that ends the moment.
  """
  context = context.copy()
  watched = context.run(watch, moment)
  context.run(watched.__enter__)

  def end():
    context.run(watched.__exit__, None, None, None)

  return context, end


def follow(moment: _Moment, start: Callable[[], futures.Future]) -> futures.Future:
  """Watches a moment from the call of `start` to the end of the future it returns.

  Work that `start` begins is inside the moment, which ends before the future is done.
  """
  if not observer.get():
    return start()
  context, end = begin(moment, contextvars.copy_context())
  # Callbacks of `start`'s own future may run after its waiters have continued.
  followed: futures.Future = futures.Future()

  def finish(started: futures.Future):
    try:
      end()
    except BaseException as error:
      # An error in a callback would be lost, and `followed` would never be done.
      followed.set_exception(error)
      return
    if started.cancelled():
      followed.cancel()
    elif error := started.exception():
      followed.set_exception(error)
    else:
      followed.set_result(started.result())

  context.run(start).add_done_callback(finish)
  return followed
