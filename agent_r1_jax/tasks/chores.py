"""Chores in a terminal: files in a workspace, a shell, and a checked end state.

A task has the workspace's initial files as texts by path in `info['files']`, the chore in
words in `info['question']`, and in `answer`, which the agent cannot reach, how the
episode has to end:

  'reply': The text that the last reply has inside <answer> and </answer>.
  'files': Texts by path; None means that the path must not exist.
  'edited': Paths of initial files whose text `test` judges.
  'test': {'command', 'files'}: a command that must exit with status 0 in another
    workspace, which has the final files, with these replacing the agent's.

Any part may be missing. Initial files that no part names must be unchanged; additional
files are allowed.
"""

import asyncio
from collections.abc import Sequence

from agent_r1_jax.agent import env
from agent_r1_jax.agent import messages as messages_lib
from agent_r1_jax.tasks import qa
from agent_r1_jax.tools import shell
from agent_r1_jax.types import ControlText, Message, Task

AGENT = ControlText(
  'Do what is asked in the directory of the shell tool: call it as often as necessary, '
  'and read what it prints. If there is a question, give the answer inside <answer> and '
  '</answer>, without explanation, for example <answer>12</answer>.\n\n{question}'
)
_TEST_SECONDS = 10.0


def agent_task(task: Task) -> Task:
  """Returns the task with the prompt for an agent that has the shell tool."""
  return task.ask(AGENT.format(question=task.info['question']))


class TerminalEnv(env.ToolEnv):
  """A shell in a workspace of the episode; the reward is 1.0 if the chore is done.

  The metric 'reward/done' is the same number.

  make_env = chores.TerminalEnv

  A workspace too large to read, or a shell that a command has ended, earns nothing:
  otherwise an agent could escape a bad reward by it.
  """

  def __init__(self, *, seconds: float = 10.0, limits: shell.ShellLimits = shell.LIMITS):
    """Starts the shell.

    Args:
      seconds: Time limit of a command, in seconds of wall time.
      limits: The shell's resource limits.

    Raises:
      RuntimeError: This machine cannot confine a shell; says what to install.
    """
    self._session, self._limits = shell.Shell(limits), limits
    tool = shell.shell_tool(self._session, seconds=seconds)
    # Parallel calls of one reply would finish in any order.
    super().__init__([tool], self._score, max_parallel_calls=1)

  async def reset(self, task: Task) -> list[Message]:
    """Begins the episode with the task's files in the workspace."""
    await asyncio.to_thread(self._session.write_files, task.info['files'])
    return await super().reset(task)

  def close(self) -> None:
    """Ends the shell and its processes, and removes the workspace."""
    self._session.close()

  def _score(self, task: Task, messages: Sequence[Message]) -> dict[str, float]:
    try:
      files = self._session.read_files()
    except shell.CommandError:
      return {'done': 0.0}
    reply = qa.extract_answer(messages_lib.last_reply(messages))
    done = is_done(task, reply, files) and passes_test(task, files, self._limits)
    return {'done': float(done)}


def is_done(task: Task, reply: str | None, files: dict[str, str | None]) -> bool:
  """Whether a reply and the final files match the answer.

  Args:
    task: The task.
    reply: The answer in the last reply.
    files: As `shell.Shell.read_files` returns them.
  """
  goal = task.answer
  if 'reply' in goal and reply != goal['reply']:
    return False
  unchanged = {
    k: v for k, v in task.info['files'].items() if k not in goal.get('edited', ())
  }
  wanted = unchanged | goal.get('files', {})
  there = {path.rstrip('/') for path in files}
  return all(
    path not in there if text is None else files.get(path) == text
    for path, text in wanted.items()
  )


def passes_test(
  task: Task, files: dict[str, str | None], limits: shell.ShellLimits = shell.LIMITS
) -> bool:
  """Whether the answer's test, if it has one, passes in another workspace."""
  if not (test := task.answer.get('test')):
    return True
  session = shell.Shell(limits)
  try:
    regular = {path: text for path, text in files.items() if text is not None}
    session.write_files(regular | test['files'])
    output = session.run(test['command'], _TEST_SECONDS)
  except shell.CommandError:
    return False
  finally:
    session.close()
  return not output.code and not output.reason
