"""The moments of a run that somebody may watch, such as a step, a turn or a tool call.

  with moments.watch(moments.ToolCall('search')) as call:
    call.result = await ...

Nobody watches by default, and then a moment costs about a microsecond. An observer is a
context variable: it also watches what runs in the tasks, threads and event loops that
are started where it is set, and what it sets itself is passed on in the same way.
"""

from collections.abc import Callable
from concurrent import futures
import contextlib
import contextvars
import dataclasses
from typing import Any, Protocol, TypeVar


@dataclasses.dataclass
class Step:
  """A training step: its rollout and its update; `number` is its line's."""

  number: int


@dataclasses.dataclass
class Rollout:
  """Episodes that are played together.

  Attributes:
    step: The training step that learns from them; None if none does.
    episodes: How many there are, in this process.
  """

  step: int | None
  episodes: int


@dataclasses.dataclass
class Episode:
  """An episode, from the time it has a row; `trajectory` is complete at the end."""

  trajectory: Any


@dataclasses.dataclass
class Turn:
  """A reply and the environment's answer; `number` counts an episode's from 0."""

  number: int


@dataclasses.dataclass
class Reply:
  """The sampling of a reply.

  Attributes:
    context_tokens: How many tokens were before it, those in the cache included.
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
  """What a step learns from so many episodes."""

  episodes: int


_Moment = TypeVar('_Moment', Step, Rollout, Episode, Turn, Reply, ToolCall, Update)


class Observer(Protocol):
  """Watches moments. What it raises ends the run, so it handles its own faults."""

  def watch(self, moment: _Moment) -> contextlib.AbstractContextManager[_Moment]:
    """Returns what is entered around a moment; inside `with` it gets its results."""
    ...

  def carrier(self) -> dict[str, str]:
    """Returns headers that tell others which moment asks them, such as traceparent."""
    ...


observer: contextvars.ContextVar[Observer | None] = contextvars.ContextVar(
  'observer', default=None
)


def watch(moment: _Moment) -> contextlib.AbstractContextManager[_Moment]:
  """Returns what is entered around a moment."""
  watching = observer.get()
  return watching.watch(moment) if watching else contextlib.nullcontext(moment)


def carrier() -> dict[str, str]:
  """Returns headers for requests to others; none if nobody watches."""
  watching = observer.get()
  return watching.carrier() if watching else {}


def begin(
  moment: _Moment, context: contextvars.Context
) -> tuple[contextvars.Context, Callable[[], None]]:
  """Begins a moment that ends elsewhere, inside the moment of `context`.

  Returns:
    The context in which the moment is the innermost one, and what ends the moment.
  """
  context = context.copy()
  watched = context.run(watch, moment)
  context.run(watched.__enter__)

  def end():
    context.run(watched.__exit__, None, None, None)

  return context, end


def follow(moment: _Moment, start: Callable[[], futures.Future]) -> futures.Future:
  """Watches a moment from the call of `start` to the end of the future it returns.

  What `start` starts is inside the moment, which has ended when the future is done.
  """
  if not observer.get():
    return start()
  context, end = begin(moment, contextvars.copy_context())
  # Callbacks of `start`'s own future may run after whoever waits for it has gone on.
  followed: futures.Future = futures.Future()

  def finish(started: futures.Future):
    try:
      end()
    except BaseException as error:
      # Nobody would hear of it in a callback, and `followed` would never be done.
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
