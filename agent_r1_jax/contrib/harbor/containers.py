r"""Agents that run commands in a container; here the container is a task's workspace.

Many agents start a container and run each command in it by `docker exec`. They get a
substitute for the docker command that leads into the shell of the episode's task. So the
model's commands are confined, but the agent's own code, which calls the endpoint, is not:

  def command(task, docker):
    return ['agent', '--docker', docker, task.messages[-1]['content']]

  run = containers.WorkspaceRun(command, directories.open_workspace)
  train.run(..., make_env=lambda: program.Program(run))

The workspace is judged when the program has ended.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
import contextlib
import dataclasses
import json
import pathlib
import shlex
import sys
import tempfile

from agent_r1_jax import types
from agent_r1_jax.contrib.harbor import directories
from agent_r1_jax.host import workers
from agent_r1_jax.serve import conversation, program, sources
from agent_r1_jax.tools import shell

# The substitute for docker: it sends its arguments, and prints the answer.
_SCRIPT = """#!{python} -IS
import json, socket, sys
there = socket.socket(socket.AF_UNIX)
there.connect({address!r})
lines = there.makefile('rw', encoding='utf-8', errors='surrogateescape')
print(json.dumps(sys.argv[1:]), file=lines, flush=True)
text, code = json.loads(lines.readline())
sys.stdout.reconfigure(errors='backslashreplace')
sys.stdout.write(text)
sys.exit(code)
"""
_MOST_BYTES = 1 << 20  # Of a command's arguments.
_SECONDS = 30.0  # For the arguments to arrive, and for the answer to be read.
_LATE, _FAILED = 124, 125  # The exit statuses of `timeout` and `docker`.
# What options of `exec` with a value prepend to the command.
_WITH_VALUE = {
  **dict.fromkeys(('-w', '--workdir'), 'cd -- {} && '),
  **dict.fromkeys(('-e', '--env'), 'export -- {} && '),
  **dict.fromkeys(('-u', '--user'), ''),
}
_WITHOUT_VALUE = ('-i', '-t', '-it', '-d', '--interactive', '--tty')
# The endpoint's error codes that appear in the error a program ends with.
_REFUSALS = (conversation.MAX_TURNS, sources.TOO_LONG)


@dataclasses.dataclass(frozen=True)
class WorkspaceRun:
  """A Program's `run` for a process whose commands run in a task's workspace.

  The reward is the part 'solved'. A non-zero exit status makes the episode an error,
  unless the endpoint had refused the program a reply because turns or tokens ran out: the
  workspace is then judged, as it is when the task's time is over.

  Attributes:
    command: (task, path of the docker substitute) -> the program and its arguments. It
      gets the environment of `program.process`.
    open_workspace: Makes an episode's workspace; runs in a thread. A task's info may have
      'agent_seconds' and 'judge_seconds': a run whose episodes may be shorter than both
      together raises.
    seconds: Time limit of a workspace command, in seconds of wall time.
  """

  command: Callable[[types.Task, str], Sequence[str]]
  open_workspace: Callable[[types.Task], directories.Workspace]
  seconds: float = 30.0

  async def __call__(self, task: types.Task, url: str) -> program.Output:
    """Runs the program, and judges what it left behind."""
    workspace = await workers.call(self.open_workspace, task, name='workspace')
    try:
      async with open_docker(workspace, self.seconds) as docker:
        play = program.process(self.command(task, docker), read=_check_end)
        with contextlib.suppress(TimeoutError):
          async with asyncio.timeout(workspace.seconds_left):
            await play(task, url)
      return {'solved': await workers.call(workspace.judge, name='judge')}
    finally:
      await workers.call(workspace.close, name='workspace')

  def least_limits(self, task: types.Task) -> dict[str, float]:
    """Returns the minimum length of an episode; see agent/env.py."""
    seconds = (task.info.get(f'{who}_seconds', 0.0) for who in ('agent', 'judge'))
    return {'episode_seconds': sum(seconds)}


def _check_end(status: int, output: str) -> None:
  if status and not any(code in output for code in _REFUSALS):
    raise RuntimeError(f'the program ended with status {status}: {output[-2000:]}')


@contextlib.asynccontextmanager
async def open_docker(
  workspace: directories.Workspace, seconds: float
) -> AsyncIterator[str]:
  """Yields the path of a docker substitute, which works inside `with`.

  It supports `run -d`, whose container is the workspace, whatever the image, `exec` with
  `-w` and `-e`, and `stop`, `kill` and `rm`, which do nothing.
  """

  async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
    try:
      async with asyncio.timeout(_SECONDS):
        words = json.loads(await reader.readline())
      reply = await workers.call(_run, workspace, seconds, words, name='exec')
      writer.write(json.dumps(reply).encode() + b'\n')
      async with asyncio.timeout(_SECONDS):
        await writer.drain()
      writer.close()
    except (OSError, ValueError):  # The client has gone, stalls, or has sent too much.
      writer.transport.abort()

  with tempfile.TemporaryDirectory(prefix='docker-') as folder:
    address = f'{folder}/socket'
    path = pathlib.Path(folder, 'docker')
    path.write_text(_SCRIPT.format(python=sys.executable, address=address))
    path.chmod(0o700)
    async with await asyncio.start_unix_server(answer, address, limit=_MOST_BYTES):
      yield str(path)


def _run(
  workspace: directories.Workspace, seconds: float, words: list[str]
) -> tuple[str, int]:
  """Executes docker's arguments; returns output and exit status."""
  verb, *words = words or ['']
  if verb in ('stop', 'kill', 'rm'):
    return '', 0
  if verb == 'run' and {'-d', '--detach'} & {*words}:
    return 'workspace\n', 0
  if verb != 'exec':
    return f'docker {verb}: only run -d, exec, stop, kill and rm work here\n', _FAILED
  try:
    start, words = _read_options(words)
  except ValueError as error:
    return f'docker exec: {error}\n', _FAILED
  # A login shell complains that there is no /etc/profile.
  words = ['-c' if word == '-lc' and n == 2 else word for n, word in enumerate(words)]
  try:
    # In a subshell, so that a command does not change the next one's directory.
    output = workspace.run(f'({start}{shlex.join(words[1:])})', seconds)
  except shell.CommandError as error:
    return f'{error}\n', _FAILED
  if output.reason:
    return f'{output.text}\nthe command was ended: {output.reason}\n', _LATE
  return output.text, output.code


def _read_options(words: list[str]) -> tuple[str, list[str]]:
  """Returns what the options of `exec` prepend to its command, and the other words.

  Raises:
    ValueError: An option is unknown, or has no value.
  """
  start = ''
  while words and words[0].startswith('-'):
    option, *words = words
    if option in _WITHOUT_VALUE:
      continue
    option, equals, value = option.partition('=')
    if option not in _WITH_VALUE:
      raise ValueError(f'{option} is not among the options that work here')
    if not equals:
      if not words:
        raise ValueError(f'{option} has no value')
      value, *words = words
    start += _WITH_VALUE[option].format(shlex.quote(value))
  return start, words
