"""The event loops of users' coroutines, and which one an episode's calls go to.

Why there are several, and what happens where a coroutine blocks one, is in workers.py.
"""

import asyncio
from concurrent import futures
import contextvars
import dataclasses
import functools
import sys
import threading
import weakref

from agent_r1_jax.host import thread_pool

# Calls that another one holds up are spread among so many event loops.
_MOST_LOOPS = 16


@dataclasses.dataclass(eq=False)
class Home:
  """The event loop of one episode's coroutines.

  Attributes:
    spread: Whether it is chosen among many, because other episodes block it.
    loop: The loop on which the first call began, where the later ones follow it.
  """

  spread: bool = False
  loop: 'UserLoop | None' = None


# The home of the episode that is being played.
home: contextvars.ContextVar[Home | None] = contextvars.ContextVar('home', default=None)


class UserLoop:
  """An event loop for users' coroutines, in a daemon thread."""

  def __init__(self, spread: bool):
    """Starts the loop's thread."""
    self.spread = spread  # Whether it is for calls that others have held up.
    self.homes: weakref.WeakSet[Home] = weakref.WeakSet()  # Whose calls came here.
    self.loop = asyncio.new_event_loop()
    self.loop.set_default_executor(_Executor())
    self.loop.set_task_factory(self._make_task)
    self._callers = weakref.WeakKeyDictionary()
    self.blocked = False
    self._thread = threading.Thread(target=self._run, name='users', daemon=True)
    self._thread.start()

  def pass_over(self):
    """Keeps new calls away from this loop until it goes on."""
    self.blocked = True
    # `blocked` is set before: `_resume` runs when the loop goes on, and so comes last.
    self.loop.call_soon_threadsafe(self._resume)

  def _resume(self):
    self.blocked = False

  def find_blocker(self) -> tuple[thread_pool.Caller | None, str]:
    """Finds who blocks the loop, which is known not to go on.

    Returns:
      The outermost caller, if it is known, and a text with name and place.
    """
    frame = sys._current_frames().get(self._thread.ident or 0)
    task = asyncio.current_task(self.loop)
    if frame is None:
      return None, ''
    caller = self._callers.get(task) if task else None
    where = f'({frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name})'
    name = caller.name if caller else 'a task of its own'
    text = f'{name} {where}, which should be a plain function or await asyncio.to_thread,'
    return (caller and caller.root), text

  def _make_task(self, loop, coroutine, **kwargs):
    task = asyncio.Task(coroutine, loop=loop, **kwargs)
    self._callers[task] = thread_pool.current_caller.get()
    return task

  def _run(self):
    thread_pool.mark_user_thread()
    while not self.loop.is_closed():
      try:
        self.loop.run_forever()
      except BaseException:
        pass  # A task raised SystemExit; whoever awaits the task gets it.


class _Executor(futures.ThreadPoolExecutor):
  """Lets asyncio.to_thread use the pool; a real executor's threads are joined at exit."""

  def submit(self, fn, /, *args, **kwargs):
    return thread_pool.POOL.submit(functools.partial(fn, *args, **kwargs))

  def shutdown(self, wait=True, *, cancel_futures=False):
    pass


# The event loops of users' coroutines, oldest first. None ends: one that is no longer
# needed is used again when another one is blocked.
_loops: list[UserLoop] = []
_loops_lock = threading.Lock()


def choose_loop(episode_home: Home, moved: bool) -> UserLoop:
  """Chooses an event loop that is not blocked for a call, and adds its home there.

  It is the home's or the oldest one, so that coroutines may share what is bound to it.
  For a call that moves, or a home that is spread, it is that of some others, which new
  episodes do not enter, with the fewest homes.
  """
  spread = moved or episode_home.spread
  with _loops_lock:
    free = [loop for loop in _loops if not (loop.blocked or loop.loop.is_closed())]
    loops = [loop for loop in free if loop.spread == spread]
    chosen = min(loops, key=lambda loop: len(loop.homes) * spread, default=None)
    if episode_home.loop in free and not moved:
      chosen = episode_home.loop
    elif not chosen or (spread and chosen.homes and len(loops) < _MOST_LOOPS):
      _loops.append(chosen := UserLoop(spread))
    chosen.homes.add(episode_home)
    return chosen
