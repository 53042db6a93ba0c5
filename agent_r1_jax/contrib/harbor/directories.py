r"""Task directories, played with a shell instead of a container.

  tasks = directories.load('tasks')
  print(directories.check(tasks))  # {}: every solution scores 1, and doing nothing 0
  train.run(..., tasks=tasks, make_env=directories.DirectoryEnv)

`task_folders.py` describes the folders; guide.md lists what is not supported.

The task's absolute paths, such as /app and /tests, are below the shell's workspace. They
are replaced by their real location in the task's files and the agent's commands, and vice
versa in the output of commands: so prompts and observations have the container's paths,
and no path of this machine. A program that assembles such a path itself does not find it;
`check` reports tasks whose own files do.
"""

import asyncio
from collections.abc import Sequence
from concurrent import futures
import contextlib
import json
import math
import os
import pathlib
import re
import shlex
import threading
import time

from agent_r1_jax import types
from agent_r1_jax.agent import env
from agent_r1_jax.contrib.harbor import task_folders
from agent_r1_jax.tools import shell

# For the workspace's own commands: to clear a directory, to read a reward.
_OWN_SECONDS = 10.0
# For judging, on top of the tests' time.
_JUDGE_SECONDS = 60.0
# Maximum bytes of a reward file, and the exceptions for files without a reward.
_MOST_REWARD = 4096
_NO_REWARD = ValueError, TypeError, KeyError, OverflowError, RecursionError
_MOST_ERRORS = 20
_NO_TEXT = re.compile('[\0\ud800-\udfff]')


def load(folder: str | os.PathLike) -> list[types.Task]:
  """Reads the tasks in a folder, or the task that it is, in the order of names.

  Files are read again when an episode begins; if they have changed by then, it raises. A
  task's info has the time limits of its agent and its judge.

  Raises:
    ValueError: There is none, or one needs something unsupported; names files and lines.
  """
  top, tasks, errors = pathlib.Path(folder), [], []
  files = *top.glob('task.toml'), *top.glob('*/task.toml')
  if not files:
    found = 'neither it nor a folder in it has a file task.toml'
    raise ValueError(f'{top}: {found if top.is_dir() else "no such directory"}.')
  for path in sorted(file.parent for file in files):
    try:
      read = task_folders.read(path)
    except (OSError, ValueError) as error:
      errors.append(str(error))
      continue
    info = {
      'folder': str(path),
      'digest': read.digest,
      'workdir': read.workdir,
      'agent_seconds': read.agent_seconds,
      'judge_seconds': read.test_seconds + _JUDGE_SECONDS,
    }
    prompt = [{'role': 'user', 'content': read.instruction}]
    tasks.append(types.Task(path.resolve().name, prompt, info=info))
  if errors:
    more = len(errors) - _MOST_ERRORS
    lines = [*errors[:_MOST_ERRORS], *([f'and {more} more'] if more > 0 else [])]
    raise ValueError(
      '{} tasks cannot be played:\n{}'.format(len(errors), '\n'.join(lines))
    )
  return tasks


class Paths:
  """Translates a task's absolute paths, which are below a workspace, in texts."""

  def __init__(self, workspace: str, places: Sequence[str]):
    """Takes the workspace's path and the directories of the task's files."""
    self._workspace = workspace
    either = '|'.join(map(re.escape, sorted(places, key=len, reverse=True)))
    # Not as part of a longer path or name: no x/app, ./app, /application or /app.py.
    self._inside = re.compile(rf'(?<![\w.~/}}-])(?:{either})(?![\w-]|\.\w)')
    # The directory is matched too, as it may have the workspace's path as a prefix.
    self._outside = re.compile(rf'{re.escape(workspace)}((?:{either})\b)')

  def enter(self, text: str) -> str:
    """Replaces the task's paths by their real location; keeps non-texts."""
    if _NO_TEXT.search(text):
      return text
    return self._inside.sub(lambda found: self._workspace + found[0], text)

  def leave(self, text: str) -> str:
    """Replaces paths below the workspace by the task's own."""
    return self._outside.sub(r'\1', text)


class Workspace(shell.Shell):
  """The shell of one task, with the files of its container and its judge.

  Attributes:
    folder: The task, once `lay` has set it up.
    printed: The output of the tests, once they have run.
    reason: Why `judge` found no reward; empty if it did, or was not called.
  """

  folder: task_folders.Folder

  def __init__(self, limits: shell.ShellLimits = shell.LIMITS):
    """Starts the shell; see `shell.Shell`."""
    super().__init__(limits, packages=True)
    self.reason, self.printed, self._end = '', '', math.inf
    # A command of the agent that waits for its turn must not run between the judge's.
    self._turn = threading.Lock()

  def lay(self, folder: task_folders.Folder) -> None:
    """Writes a task's initial files; the agent's time starts now.

    Raises:
      shell.CommandError: The files do not fit, and the shell has ended.
    """
    self.folder = folder
    self._paths = Paths(self.workspace, folder.places)
    self._write(folder.files)
    # All files may be elsewhere, or there may be none.
    workdir = shlex.quote(folder.workdir)
    output = self._run_own(f'mkdir -p {workdir} && cd {workdir}')
    if output.code:
      raise shell.CommandError(f'{folder.workdir} is no directory: {output.text}')
    self._end = time.monotonic() + folder.agent_seconds

  @property
  def seconds_left(self) -> float:
    """The agent's remaining time; 0 if it is over."""
    return max(self._end - time.monotonic(), 0.0)

  def run(self, command: str, seconds: float = 30.0) -> shell.CommandOutput:
    """Runs a command of the agent; see `shell.Shell.run`.

    Raises:
      shell.CommandError: Also if the task's time is over.
    """
    with self._turn:
      if not (left := self.seconds_left):
        raise shell.CommandError('the time of this task is over')
      output = self._run_own(command, min(seconds, left))
    return output._replace(text=self._paths.leave(output.text))

  def solve(self) -> shell.CommandOutput:
    """Runs the task's own solution instead of an agent.

    Raises:
      shell.CommandError: The shell has ended.
    """
    self._write({f'/solution/{k}': v for k, v in self.folder.solution.items()})
    return self.run('bash /solution/solve.sh', self.folder.agent_seconds)

  def judge(self) -> float:
    """Writes the tests, runs them, and returns the reward that they wrote, 0 to 1.

    The agent's processes have ended with its commands. Whatever it left in the place of
    the tests, the reward and the home directory is removed first. If there is no reward,
    the workspace's `reason` says why, and the reward is 0: otherwise an agent could
    escape a bad one.
    """
    with self._turn:
      self._end = -math.inf
      try:
        self._lay_tests()
        self._run_tests()
        return self._read_reward()
      except shell.CommandError as error:
        self.reason = str(error)
        return 0.0

  def _lay_tests(self) -> None:
    """Writes the tests, after clearing the layout's own directories."""
    paths = ' '.join(task_folders.OWN_PLACES)
    output = self._run_own(
      f'chmod -R u+rwx -- {paths} 2>/dev/null; rm -rf -- {paths} && '
      'mkdir -p -- /logs/verifier /logs/agent /logs/home'
    )
    if output.code or output.reason:
      raise shell.CommandError(f'the tests cannot be laid in: {output.text[-500:]}')
    self._write({f'/tests/{k}': v for k, v in self.folder.tests.items()})

  def _run_tests(self) -> None:
    workdir = shlex.quote(self.folder.workdir)
    output = self._run_own(
      f'cd {workdir} && HOME=/logs/home PYTHONNOUSERSITE=1 bash /tests/test.sh',
      self.folder.test_seconds,
    )
    self.printed = self._paths.leave(output.text)
    if output.reason:
      raise shell.CommandError(f'the tests were ended: {output.reason}')

  def _read_reward(self) -> float:
    for name in ('reward.txt', 'reward.json'):
      path = f'/logs/verifier/{name}'
      output = self._run_own(f'test -f {path} && head -c {_MOST_REWARD} {path}')
      if output.code or output.reason:
        continue
      text = output.text
      with contextlib.suppress(*_NO_REWARD):
        found = float(json.loads(text)['reward'] if name.endswith('json') else text)
        if 0 <= found <= 1:
          return found
      break  # The file exists, but has no reward.
    raise shell.CommandError(
      'the tests wrote no number from 0 to 1 to /logs/verifier/reward.txt or, as '
      f'"reward", to reward.json; they printed {self.printed[-500:]!r}'
    )

  def _write(self, files: dict[str, str]) -> None:
    self.write_files({k.lstrip('/'): self._paths.enter(v) for k, v in files.items()})

  def _run_own(self, command: str, seconds: float = _OWN_SECONDS) -> shell.CommandOutput:
    return super().run(self._paths.enter(command), seconds)


def open_workspace(
  task: types.Task, limits: shell.ShellLimits = shell.LIMITS
) -> Workspace:
  """Starts a workspace with a loaded task's files.

  Raises:
    ValueError: The task's folder has changed.
    shell.CommandError: Its files do not fit.
  """
  folder, workspace = read(task), Workspace(limits)
  try:
    workspace.lay(folder)
  except BaseException:
    workspace.close()
    raise
  return workspace


class DirectoryEnv(env.ToolEnv):
  """The agent has a shell in a task's files; the task's tests give the reward.

  make_env = directories.DirectoryEnv

  The metric 'reward/solved' is the same number; 'unjudged' counts episodes whose tests
  wrote no reward. When the task's time is over, the next reply ends the episode ('late').
  A run whose limits are below a task's times raises.
  """

  def __init__(self, *, seconds: float = 30.0, limits: shell.ShellLimits = shell.LIMITS):
    """Starts the shell.

    Args:
      seconds: Time limit of a command, in seconds of wall time.
      limits: The shell's resource limits.

    Raises:
      RuntimeError: This machine cannot confine a shell; says what to install.
    """
    self._workspace, self._late = Workspace(limits), False
    tool = shell.shell_tool(self._workspace, seconds=seconds)
    super().__init__(
      [tool],
      self._score,
      metrics=self._count,
      max_parallel_calls=1,
      # The workspace enforces each task's own limit.
      reward_seconds=task_folders.MOST_SECONDS + _JUDGE_SECONDS,
    )

  def least_limits(self, task: types.Task) -> dict[str, float]:
    """Returns the limits that a task needs to be judged whatever the agent does."""
    agent, judge = task.info['agent_seconds'], task.info['judge_seconds']
    return {'step_seconds': judge, 'episode_seconds': agent + judge}

  async def reset(self, task: types.Task) -> list[types.Message]:
    """Begins the episode with the task's initial files in the workspace.

    Raises:
      ValueError: The folder has changed since the task was loaded.
    """
    await asyncio.to_thread(lambda: self._workspace.lay(read(task)))
    return await super().reset(task)

  async def step(self, reply: str) -> types.Step:
    """Runs the reply's command; without one, or after the time, the episode is done."""
    if not self._workspace.seconds_left:
      self._late = True
      return await self.finish('max_turns', reply)
    return await super().step(reply)

  def close(self) -> None:
    """Ends the shell and its processes, and removes the workspace."""
    self._workspace.close()

  def _score(self, task: types.Task, messages: Sequence[types.Message]):
    return {'solved': self._workspace.judge()}

  def _count(self, task: types.Task, messages: Sequence[types.Message]):
    return {'unjudged': float(bool(self._workspace.reason)), 'late': float(self._late)}


def read(task: types.Task) -> task_folders.Folder:
  """Reads the folder of a loaded task again.

  Raises:
    ValueError: It has changed.
  """
  folder = task_folders.read(task.info['folder'])
  if folder.digest != task.info['digest']:
    raise ValueError(
      f'{task.info["folder"]}: the task has changed since it was loaded; start anew.'
    )
  return folder


def check(
  tasks: Sequence[types.Task],
  *,
  workers: int = 2,
  limits: shell.ShellLimits = shell.LIMITS,
) -> dict[str, str]:
  """Plays each task twice: its solution must score 1, and doing nothing 0.

  Args:
    tasks: Tasks as `load` returns them.
    workers: How many to play at a time, each in its own process.
    limits: A shell's resource limits.

  Returns:
    Why a task fails, by its id; empty if all pass.
  """
  with futures.ThreadPoolExecutor(workers) as pool:
    reasons = pool.map(lambda task: find_fault(task, limits), tasks)
    return {t.id: reason for t, reason in zip(tasks, reasons, strict=True) if reason}


def find_fault(task: types.Task, limits: shell.ShellLimits = shell.LIMITS) -> str:
  """Returns what is wrong with a task, as `check` does; '' if nothing is."""
  if 'solve.sh' not in read(task).solution:
    return 'it has no solution/solve.sh'
  for solve, wanted in ((True, 1.0), (False, 0.0)):
    try:
      workspace = open_workspace(task, limits)
      with contextlib.closing(workspace):
        output = workspace.solve() if solve else None
        reward = workspace.judge()
    except ValueError as error:  # Including CommandError.
      return str(error)
    who = 'the solution' if solve else 'doing nothing'
    if workspace.reason:
      return f'{who} is not judged: {workspace.reason}'
    if reward != wanted:
      said = output and (output.reason or f'status {output.code}, {output.text[-500:]!r}')
      return f'{who} scores {reward:g}' + (f'; it ended with {said}' if said else '')
  return ''
