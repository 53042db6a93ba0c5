"""TextWorld's and ALFWorld's games, each in a process of its own.

Both packages run games in C code, which may crash, hang or share state between games. So
no game runs in the trainer: a process that has imported TextWorld forks one process per
game (a few milliseconds), and a failing game costs only its own episode.
"""

import faulthandler
import json
from multiprocessing import connection
import os
import re
import signal
import socket
import sys
import threading
from typing import Any
import weakref

from agent_r1_jax.host import isolated, workers

# Time limit for importing TextWorld, once.
_START_SECONDS = 120.0


class GameError(RuntimeError):
  """A game cannot be loaded or played; the text names its file."""


class GameProcess:
  """A game with Gymnasium's `reset` and `step`, and `close`; its methods block."""

  def __init__(self, path: str, *, seconds: float = 30.0):
    """Loads the game.

    Args:
      path: A game of TextWorld (.z8, with its .json next to it) or ALFWorld (.tw-pddl).
      seconds: Time limit of one action; a game that exceeds it is ended.

    Raises:
      GameError: TextWorld or ALFWorld is not installed, or cannot load the file.
    """
    self._path, self._seconds = path, seconds
    self._pipe, there = connection.Pipe()
    _send_to_fork_server(there)
    try:
      self._ask([path, seconds], _START_SECONDS)
    except GameError:
      self.close()
      raise

  def reset(self, **_) -> tuple[str, dict[str, Any]]:
    """Begins the game; returns its text and the admissible commands."""
    text, _, _, info = self._ask('reset', self._seconds)
    return text, info

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """Acts; the reward is the gain in score, and a game's rewards sum to 1."""
    text, reward, done, info = self._ask(['step', action], self._seconds)
    return text, reward, done, False, info

  def close(self):
    """Ends the process."""
    self._pipe.close()

  def _ask(self, request, seconds) -> Any:
    """Sends a request and returns the answer; ends the process if there is none."""
    try:
      self._pipe.send_bytes(json.dumps(request).encode())
      if not self._pipe.poll(seconds):
        raise GameError(f'{self._path}: no answer within {seconds:g} seconds')
      ok, answer = json.loads(self._pipe.recv_bytes())
    except (OSError, EOFError) as error:
      self.close()
      raise GameError(f'{self._path}: the game has ended its process') from error
    except GameError:
      self.close()
      raise
    if not ok:
      raise GameError(f'{self._path}: {answer}')
    return answer


class _ForkServer:
  """The process that forks the games' processes."""

  def __init__(self):
    self.control, there = socket.socketpair()
    self.process = isolated.start_module(__name__, there.fileno())
    there.close()
    weakref.finalize(self, isolated.end_process, self.process, self.control)


_fork_server: _ForkServer | None = None
_fork_server_lock = threading.Lock()


def _send_to_fork_server(pipe: connection.Connection):
  """Sends the pipe to a new process; starts the fork server if necessary."""
  global _fork_server
  with _fork_server_lock:
    if _fork_server is None or _fork_server.process.poll() is not None:
      _fork_server = _ForkServer()
    socket.send_fds(_fork_server.control, [b'x'], [pipe.fileno()])
  pipe.close()


def _run_fork_server(control: socket.socket):
  """Forks a process for every pipe received; ends with the trainer."""
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda *_: None)
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for the games.
  os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Nobody reads their output.
  os.environ['OPENBLAS_NUM_THREADS'] = '1'  # Forking needs a single thread.
  try:
    from textworld import logic  # pyright: ignore[reportMissingImports]
    from textworld.generator import data  # pyright: ignore[reportMissingImports]

    # Every game would parse the rules of its world, for a third of a second: cache parses
    # of the same text.
    logic.GameLogic.deserialize(data.KnowledgeBase.default().logic.serialize())
  except ImportError:
    pass  # Each game reports it.
  while True:
    message, (*descriptors,), *_ = socket.recv_fds(control, 1, 1)
    if not message:
      return
    (descriptor,) = descriptors
    if os.fork() == 0:
      control.close()
      _serve(connection.Connection(descriptor))
      os._exit(0)
    os.close(descriptor)


def _serve(pipe: connection.Connection):
  """Loads a game and answers until the pipe is closed."""
  nowhere, game = open(os.devnull, 'w'), None
  path, seconds = json.loads(pipe.recv_bytes())
  request = 'load'
  while True:
    # This time-out needs no interpreter, and works even if the trainer is gone.
    faulthandler.dump_traceback_later(seconds + 5.0, exit=True, file=nowhere)
    try:
      if game is None:
        ok, answer, game = True, None, _Game(path)
      else:
        ok, answer = True, game.reset() if request == 'reset' else game.step(request[1])
    except BaseException as error:
      ok, answer = False, workers.describe_error(error)
    faulthandler.cancel_dump_traceback_later()
    try:
      pipe.send_bytes(json.dumps([ok, answer]).encode())
      request = json.loads(pipe.recv_bytes())
    except (OSError, EOFError):
      return


class _Game:
  """A game in its own process."""

  def __init__(self, path):
    try:
      import textworld  # pyright: ignore[reportMissingImports]

      wrappers = []
      if path.endswith('.tw-pddl'):
        from alfworld.agents.environment import alfred_tw_env  # pyright: ignore[reportMissingImports]

        wrappers = [alfred_tw_env.AlfredDemangler]
    except ImportError as error:
      raise GameError(f'{error}; pip install agent_r1_jax[environments]') from error
    names = ('admissible_commands', 'description', 'max_score', 'objective', 'won')
    infos = textworld.EnvInfos(**dict.fromkeys(names, True))
    self._env = textworld.start(path, infos, wrappers)
    self._score, self._max_score = 0.0, 1.0

  def reset(self):
    state = self._env.reset()
    self._score = 0.0
    if not state.get('admissible_commands'):
      # Without the game's .json, TextWorld knows neither these nor the score.
      raise GameError('TextWorld knows no command of it; is its .json beside it?')
    self._max_score = float(state.get('max_score') or 1)
    if state.get('objective'):
      # The feedback begins with the title in letters of $ signs.
      return self._answer(state, f'{state["objective"]}\n\n{state["description"]}')
    return self._answer(state, state.feedback)

  def step(self, action):
    state, score, done = self._env.step(action)
    gain, self._score = float(score) - self._score, float(score)
    return self._answer(state, state.feedback, gain / self._max_score, done)

  def _answer(self, state, text, reward=0.0, done=False):
    # The prompt is followed by the status line, drawn for a terminal.
    text = re.split(r'\n>\s', text)[0].strip()
    info = {'admissible_commands': list(state.get('admissible_commands') or ())}
    return text, reward, bool(done), info | {'won': bool(state.get('won'))}


if __name__ == '__main__':
  _run_fork_server(socket.socket(fileno=int(sys.argv[1])))
