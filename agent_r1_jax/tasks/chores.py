"""Chores in a terminal: files in a workspace, a shell, and an end state that is checked.

A task has the texts of the workspace's first files by path in `info['files']`, the chore
in words in `info['question']`, and in `answer` how the episode has to end, which the
agent cannot reach:

  'reply': The text that the last reply has inside <answer> and </answer>.
  'files': Texts by path, or None where nothing may be.
  'edited': Paths of first files whose text `test` judges.
  'test': {'command', 'files'}: a command that has to end with status 0, in another
    workspace that has the files of the end, with these in place of the agent's.

Any part may be missing. First files that no part names have to be as they were; further
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
  """A shell in a workspace of the episode; the reward is 1.0 where the chore is done.

  That is the metric 'reward/done', too.

  make_env = chores.TerminalEnv

  A workspace that holds more than can be read, or a shell that a command has ended, has
  no reward: else an agent could escape a bad one by it.
  """

  def __init__(self, *, seconds: float = 10.0, limits: shell.ShellLimits = shell.LIMITS):
    """Starts the shell.

    Args:
      seconds: Seconds of the clock that a command may take.
      limits: What the shell may use.

    Raises:
      RuntimeError: This machine cannot confine a shell; says what to install.
    """
    self._session, self._limits = shell.Shell(limits), limits
    tool = shell.shell_tool(self._session, seconds=seconds)
    # Calls of one reply that ran at a time would end in any order.
    super().__init__([tool], self._score, max_parallel_calls=1)

  async def reset(self, task: Task) -> list[Message]:
    """Begins the episode with the task's files in the workspace."""
    await asyncio.to_thread(self._session.write_files, task.info['files'])
    return await super().reset(task)

  def close(self) -> None:
    """Ends the shell and all that it started, and removes the workspace."""
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
  """Whether a reply and the files of the end are as the answer wants them.

  Args:
    task: The task.
    reply: What the last reply gave as its answer.
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
  """Whether the test of the answer, if it has one, passes in another workspace."""
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
