"""Agents that are programs: they talk to an OpenAI-compatible endpoint.

make_env may make a Program instead of an environment. Its `run` gets the task and the
address of an endpoint, for this episode alone, where the policy answers:

  async def play(task, url):
    client = openai.AsyncOpenAI(base_url=url, api_key='none')
    ...

  train.run(..., make_env=lambda: program.Program(play, reward))

`run` may be a coroutine function, a plain function (it runs in a thread and may block),
or `process(['node', 'agent.js'])`. See docs/endpoint.md.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import json
import os
import signal
import tempfile
from typing import IO

from agent_r1_jax import types
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.agent import scoring
from agent_r1_jax.host import moments, thread_pool, workers
from agent_r1_jax.rollout import episode as episode_lib
from agent_r1_jax.rollout import faults, sockets
from agent_r1_jax.serve import conversation as conversation_lib
from agent_r1_jax.serve import dialect as dialect_lib
from agent_r1_jax.serve import endpoint

# How many bytes of a program's output are kept, from the end.
_MAX_OUTPUT = 1 << 16
# How long to wait for a program's last output after it has ended, in seconds.
_CLOSE_SECONDS = 1.0
Output = env_lib.Score | None
# The variables that every program inherits. None may be an API key.
_INHERITED = ('HOME', 'LANG', 'LOGNAME', 'PATH', 'SHELL', 'TERM', 'TMPDIR', 'USER')


@dataclasses.dataclass(frozen=True)
class Program(sockets.Player):
  """An agent that gets the policy's replies from an endpoint.

  An episode's reward is the sum of three: what `run` returns, what the program reports by
  `POST {url}/reward {"reward": 1.0, "metrics": {...}}`, and `reward`, which is called
  once `run` has ended.

  Attributes:
    run: (task, url) -> None, a number, or a dict of named parts, which are summed.
    reward: (task, messages) -> score, as for a ToolEnv.
    metrics: (task, messages) -> further numbers of the episode.
    dialects: APIs of the endpoint besides chat completions.
  """

  run: Callable[[types.Task, str], Output | Awaitable[Output]]
  reward: env_lib.Reward = lambda task, messages: 0.0
  metrics: env_lib.Metrics | None = None
  dialects: Sequence[dialect_lib.Dialect] = ()

  def least_limits(self, task: types.Task) -> Mapping[str, float]:
    """Returns the limits that a task needs, if `run` has any; see agent/env.py."""
    inner = getattr(self.run, 'least_limits', None)
    return inner(task) if inner else {}

  async def play(self, episode: episode_lib.Episode, task: types.Task) -> types.Status:
    """Runs the program against its own endpoint; returns the episode's status.

    If the endpoint refused a reply because tokens or turns ran out, an exception that the
    program then raises counts as that status, not as an error.
    """
    t, limits = episode.trajectory, episode.limits
    conversation = conversation_lib.EpisodeSource(
      episode.chat,
      task,
      episode.context,
      episode.transcript,
      limits.max_turns,
      limits.max_turn_tokens,
    )
    try:
      output = await self._run(episode, conversation, task)
      if episode.transcript.turns:
        await self._score(episode, conversation, task, output)
      elif conversation.refused == types.Status.OUT_OF_TOKENS:
        t.error, t.metrics['prompt_too_long'] = conversation.error, 1.0
      else:
        text = 'the program ended without a reply of the policy.'
        raise faults.EnvironmentFaultError(text)
      return conversation.status
    finally:
      # Metrics that the program reported take precedence.
      counts = {name: float(n) for name, n in conversation.metrics.items()}
      t.metrics = counts | t.metrics

  async def _run(self, episode, conversation, task) -> Output:
    """Runs the program, and ends the conversation."""
    t, seconds = episode.trajectory, episode.limits.episode_seconds
    thread_pool.current_turn.set(f'task {task.id}, sample {t.sample}')
    address = endpoint.open(
      conversation, episode.chat, episode.context.vocab_size, self.dialects
    )
    try:
      async with address as url:
        with faults.of_environment():
          # The episode cancels it earlier; the pool needs a bound, which the log names.
          return await workers.call_on_user_loop(
            self.run, env_lib.copy_containers(task), url, name='run', seconds=seconds
          )
    except faults.EnvironmentFaultError:
      if conversation.refused is None:
        raise
    finally:
      conversation.end()
      t.messages = conversation.list_messages()

  async def _score(self, episode, conversation, task, output: Output):
    """Adds the rewards that the program reported and that the functions return."""
    t, transcript = episode.trajectory, episode.transcript
    for turn, step in conversation.reports:
      episode.add_reward(step, turn)
    segments, _ = transcript.collect()
    newest = max(int(s.policy_steps[s.action_mask].max()) for s in segments)
    scoring.policy_step.set(newest)
    with faults.of_environment():
      step = await workers.call_on_user_loop(
        self.judge,
        task,
        env_lib.copy_containers(t.messages),
        conversation.status,
        output,
        name='judge',
        seconds=episode.limits.step_seconds,
        field='step_seconds',
      )
    episode.add_reward(step)

  async def judge(
    self, task: types.Task, messages: list[types.Message], status: str, output: Output
  ) -> types.Step:
    """Scores an episode that ended with `status`; `output` is what `run` returned.

    Raises:
      ValueError: A score is not a finite number, or `metrics` did not return a dict.
    """
    step = types.Step([], done=True)
    await env_lib.judge(step, task, messages, status, self.reward, self.metrics)
    if output is not None:
      env_lib.add_score(step, 'output', task, output)
    return step


def read_last_line(status: int, output: str) -> Output:
  """Scores a program by its last line of output, if that is a number or an object.

  Raises:
    RuntimeError: The exit status is not 0.
  """
  if status:
    raise RuntimeError(f'the program ended with status {status}: {output[-2000:]}')
  lines = output.split('\n')
  try:
    value = json.loads(next(line for line in reversed(lines) if line.strip()))
  except (StopIteration, ValueError, RecursionError):
    return None
  return value if isinstance(value, int | float | dict) else None


def process(
  command: Sequence[str],
  *,
  read: Callable[[int, str], Output] = read_last_line,
  cwd: str | None = None,
  env: Sequence[str] = (),
) -> Callable[[types.Task, str], Awaitable[Output]]:
  """Makes a Program's `run` from a command.

  The process gets the endpoint in OPENAI_BASE_URL and ANTHROPIC_BASE_URL and a key in
  OPENAI_API_KEY and ANTHROPIC_API_KEY, as the official clients expect, and on its
  standard input one line of JSON with the task's id and messages. If the run has
  observers, the headers of host/moments.py, such as TRACEPARENT, are variables too. Its
  process group is killed when it ends, times out, or the run stops.

  Args:
    command: The program and its arguments.
    read: Scores (exit status, the end of the output, standard output last); an exception
      makes the episode an error.
    cwd: The directory that it runs in.
    env: Names of further environment variables to pass on. By default it gets only HOME,
      LANG, LOGNAME, PATH, SHELL, TERM, TMPDIR and USER, and so no API key.

  Raises:
    ValueError: A variable of `env` is not set.
  """
  if missing := sorted({*env} - os.environ.keys()):
    raise ValueError(f'program.process: env: {missing} are not set in this process.')
  names = {*_INHERITED, *env} & os.environ.keys()
  variables = {name: os.environ[name] for name in names}
  return functools.partial(_run_process, tuple(command), read, cwd, variables)


async def _run_process(
  command, read, cwd, variables, task: types.Task, url: str
) -> Output:
  line = json.dumps({'id': task.id, 'messages': task.messages}) + '\n'
  async with contextlib.AsyncExitStack() as stack:
    stdin = stack.enter_context(tempfile.TemporaryFile())
    stdin.write(line.encode())
    stdin.seek(0)
    stdout, stdout_end = await _open_pipe(stack)
    stderr, stderr_end = await _open_pipe(stack)
    with stdout_end, stderr_end:  # The program inherits them when it starts.
      child = await asyncio.create_subprocess_exec(
        *command,
        stdin=stdin,
        stdout=stdout_end,
        stderr=stderr_end,
        cwd=cwd,
        env=variables
        | {name.upper(): value for name, value in moments.carrier().items()}
        | {'OPENAI_BASE_URL': url, 'OPENAI_API_KEY': 'none'}
        | {'ANTHROPIC_BASE_URL': url.removesuffix('/v1'), 'ANTHROPIC_API_KEY': 'none'},
        start_new_session=True,
      )
    try:
      status = await child.wait()
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
      await child.wait()
    # Processes that the program left behind may hold the pipes open forever.
    await asyncio.wait([stdout.closed, stderr.closed], timeout=_CLOSE_SECONDS)
    return read(status, f'{stderr.text}\n{stdout.text}')


async def _open_pipe(stack: contextlib.AsyncExitStack) -> tuple['_OutputEnd', IO[bytes]]:
  """Opens a pipe; returns the reader of its output and the end to write to."""
  reader, writer = (
    os.fdopen(fd, mode, 0) for fd, mode in zip(os.pipe(), ('rb', 'wb'), strict=True)
  )
  loop = asyncio.get_running_loop()
  transport, output = await loop.connect_read_pipe(_OutputEnd, reader)
  stack.callback(transport.close)
  return output, writer


class _OutputEnd(asyncio.Protocol):
  """Keeps the end of a program's output, however long it is.

  Attributes:
    closed: A future; done when nobody can write any more.
  """

  def __init__(self):
    self.closed, self._end = asyncio.get_running_loop().create_future(), bytearray()

  def data_received(self, data: bytes):
    self._end += data
    del self._end[:-_MAX_OUTPUT]

  def connection_lost(self, exc: Exception | None):
    if not self.closed.done():
      self.closed.set_result(None)

  @property
  def text(self) -> str:
    return self._end.decode(errors='replace')
