"""Environments answer the agent's replies and give rewards."""

import abc
import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
import copy
import functools
import json
import logging
from typing import Any, Protocol

from agent_r1_jax import fields, types
from agent_r1_jax.agent import call_formats
from agent_r1_jax.agent import calls as calls_lib
from agent_r1_jax.agent import messages as messages_lib
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.agent.scoring import (
  Metrics,
  Reward,
  Score,
  add_score,
  bind_status,
  copy_containers,
  count_calls,
  judge,
)
from agent_r1_jax.host import workers

_LOGGER = logging.getLogger(__name__)
Call = calls_lib.Call
# Like the method `ToolEnv.process_reward`; the first argument is the environment.
ProcessReward = Callable[
  ['ToolEnv', Sequence[Call], Sequence[tool_lib.ToolResult]], Score | Awaitable[Score]
]

# (schemas of tools, bytes of each token, vocabulary size) -> the grammar of their calls.
CallGrammar = Callable[[Sequence[Any], Sequence[bytes], int], types.Automaton]


class Env(Protocol):
  """The methods that every environment has; BaseEnv lists the optional ones."""

  def reset(
    self, task: types.Task
  ) -> list[types.Message] | Awaitable[list[types.Message]]:
    """Begins the episode and returns the first messages for the agent."""
    ...

  def step(self, reply: str) -> types.Step | Awaitable[types.Step]:
    """Answers one reply."""
    ...


class BaseEnv(abc.ABC):
  """One episode; plain attributes are its state.

  A subclass needs `reset` and `step`, and may override the rest:

    class Guess(env.BaseEnv):
      def reset(self, task):
        self.answer = task.answer
        return [dict(message) for message in task.messages]

      def step(self, reply):
        return types.Step([], reward=float(reply == self.answer), done=True)

  Any other object with these two methods is an environment too, and may have any of the
  others.

  Async methods share an event loop with other episodes and must not block it; plain
  methods run in a thread and may block. A method that raises or takes too long
  (config.Limits) gives the trajectory the status FAILED.

  Attributes:
    tools: Tools whose schemas go into the prompt.
    call_grammar: Makes the grammar of their calls, for `tool_grammar` of config.Sampling.
  """

  tools: Sequence[tool_lib.Tool] = ()
  call_grammar: CallGrammar | None = None

  @abc.abstractmethod
  def reset(
    self, task: types.Task
  ) -> list[types.Message] | Awaitable[list[types.Message]]:
    """Begins the episode and returns the first messages for the agent."""

  @abc.abstractmethod
  def step(self, reply: str) -> types.Step | Awaitable[types.Step]:
    """Answers one reply."""

  def finish(
    self, status: types.Status, reply: str | None
  ) -> types.Step | Awaitable[types.Step]:
    """Judges an episode that ran out of budget; by default turns keep their rewards.

    Args:
      status: One of types.BUDGET_STATUSES.
      reply: The unfinished reply, which `step` has not seen, or None.

    Returns:
      A step. Its reward is added to the last turn's, its metrics to the episode's.
    """
    return types.Step([], done=True)

  def set_seed(self, number: int) -> None | Awaitable[None]:
    """Receives the seed of the episode's own randomness, before `reset`.

    It depends only on run, rollout, task and sample, so a resumed run repeats it.
    """
    return None

  def close(self) -> None | Awaitable[None]:
    """Frees the environment's resources, such as a connection.

    Called exactly once per environment, however the episode ended, even if `reset` was
    never reached. A call that took too long may still be running. Exceptions are logged
    and counted, and change no result.
    """
    return None

  def clone(self) -> Env | Awaitable[Env]:
    """Returns an independent copy in the middle of an episode; guided/search.py needs it.

    Copies are not closed.
    """
    raise NotImplementedError

  def least_limits(self, task: types.Task) -> Mapping[str, float]:
    """Returns the smallest config.Limits that a task needs, by field.

    A run with lower limits raises ValueError.
    """
    return {}


def find_method(env: Any, name: str) -> Callable[..., Any] | None:
  """Finds an optional method of an environment; None if it has only BaseEnv's default."""
  method = getattr(env, name, None)
  is_default = getattr(method, '__func__', None) is getattr(BaseEnv, name)
  return None if is_default else method


class ToolEnv(BaseEnv):
  """The agent calls tools until it replies without a call; then the episode is done.

  Calls of one reply run concurrently, or one after another, and are answered in order.
  Malformed calls, calls of unknown tools and calls beyond the limit are answered with an
  error text, and the episode continues.

  Every turn gets its process reward, and the last turn also the reward of the
  conversation, even if a budget ended it. An unfinished reply is then the last message;
  its calls are not run, and it gets no process reward.

  Every step has the metrics tool_calls, tool_errors (including tool_timeouts),
  format_errors, and the named parts of its reward as 'reward/<name>'. Among tool_errors,
  tool_failures counts calls whose tool raised or timed out, and tool_outages the failures
  that arguments do not explain. The last step also has the numbers of `metrics`.

  Plain functions run in threads (see workers), several at a time. They get copies of the
  task and the messages, and may change them. Run a grader that may hold the interpreter
  in a subprocess (isolated.in_subprocess).

  Attributes:
    task: The task of the episode.
    messages: The conversation so far.
  """

  def __init__(
    self,
    tools: Sequence[tool_lib.Tool],
    reward: Reward,
    *,
    process_reward: ProcessReward | None = None,
    parse: Callable[[str], list[Call]] | None = None,
    metrics: Metrics | None = None,
    max_parallel_calls: int = 8,
    in_order: bool = False,
    reward_seconds: float = 60.0,
    call_grammar: CallGrammar | None = None,
  ):
    """Checks the arguments; nothing runs before `reset`.

    Args:
      tools: The tools, whose names must differ.
      reward: Scores the conversation when the episode ends.
      process_reward: Scores a turn, in place of the method of that name.
      parse: Parses the calls in a reply; the default uses the chat's format, or Hermes
        format outside a rollout.
      metrics: Computes additional metrics of the episode, such as F1.
      max_parallel_calls: Maximum number of calls of one reply that are run.
      in_order: Whether the calls of a reply run one after another.
      reward_seconds: Timeout of each of reward, process_reward, metrics and parse,
        including the wait for a thread; a longer call gives the status FAILED.
      call_grammar: Makes the grammar that constrains calls to their schemas if
        `tool_grammar` is set; for example grammars.compiler.tool_calls.
    """
    self.set_tools(tools)
    functions: dict[str, Any] = {'reward': reward}
    optional = {'process_reward': process_reward, 'metrics': metrics, 'parse': parse}
    functions |= {name: fn for name, fn in optional.items() if fn is not None}
    for name, fn in functions.items():
      if not callable(fn):
        raise ValueError(f'{name} is {fn!r:.100}; it must be a function.')
    fields.check_takes('reward', bind_status(reward, ''), 'task', 'messages')
    if max_parallel_calls < 1:
      raise ValueError(f'max_parallel_calls={max_parallel_calls} must be at least 1.')
    if not reward_seconds > 0:
      raise ValueError(f'reward_seconds is {reward_seconds}; it must be above 0.')
    self._reward, self._metrics = reward, metrics
    self._reward_seconds = reward_seconds
    self._process_reward = process_reward or type(self).process_reward
    self._parse, self._max_parallel_calls = parse, max_parallel_calls
    self._in_order, self.call_grammar = in_order, call_grammar
    self._done = True

  def set_tools(self, tools: Sequence[tool_lib.Tool]) -> None:
    """Replaces the tools, for a subclass whose tasks have their own.

    The prompt shows the tools that are set when `reset` returns.

    Raises:
      ValueError: Two tools have the same name, or an item is not a Tool.
    """
    if not isinstance(tools, Sequence):
      raise ValueError(f'tools is {tools!r:.100}; it must be a list: [my_tool].')
    for item in tools:
      if not isinstance(item, tool_lib.Tool):
        raise ValueError(f'tools: {item!r} is not a Tool; decorate it with @tool.')
    self.tools = tuple(tools)
    self._by_name = {item.name: item for item in tools}
    if len(self._by_name) < len(self.tools):
      raise ValueError(f'tools: two have one name in {[t.name for t in self.tools]}.')

  async def reset(self, task: types.Task) -> list[types.Message]:
    """Begins the episode with the task's messages."""
    self.task = task
    # `check` adds the content that messages with only calls lack: rewards read it.
    self.messages = [*map(messages_lib.check, copy_containers(task.messages))]
    self._done = False
    return copy_containers(self.messages)

  async def step(self, reply: str) -> types.Step:
    """Runs the reply's calls; without a call the episode is done."""
    if self._done:
      raise ValueError('step: the episode is over or never began; call reset first.')
    self.messages.append({'role': 'assistant', 'content': reply})
    calls = await self._find_calls(reply)
    answers = [] if calls else await self.answer_text()
    self._done = not (calls or answers)
    run = calls[: self._max_parallel_calls]
    if self._in_order:
      results = [await self._answer(call) for call in run]
    else:
      results = await asyncio.gather(*map(self._answer, run))
    messages = [_make_message(*pair) for pair in zip(calls, results, strict=False)]
    if refused := len(calls) - len(results):
      text = f'Error: {refused} more calls were not run; at most {len(results)} a turn.'
      messages.append({'role': 'tool', 'content': text})
    messages += answers
    # The process reward reads `messages`, so the answers are added before it.
    self.messages += messages
    step = types.Step(
      copy_containers(messages), done=self._done, metrics=count_calls(calls, results)
    )
    process_reward = functools.partial(self._process_reward, self)
    calls = calls[: len(results)]
    score = await self._call('process_reward', process_reward, calls, results)
    add_score(step, 'process reward', self.task, score)
    if self._done:
      await self._judge(step, 'done')
    return step

  async def finish(self, status: str, reply: str | None = None) -> types.Step:
    """Scores a conversation that a budget ended."""
    if self._done:
      raise ValueError('finish: the episode is over or never began; call reset first.')
    self._done = True
    if reply is not None:
      self.messages.append({'role': 'assistant', 'content': reply})
    step = types.Step([], done=True)
    await self._judge(step, status)
    return step

  async def answer_text(self) -> list[types.Message]:
    """Answers a reply without calls, the last of `messages`; [] ends the episode.

    Subclasses may override it.
    """
    return []

  def process_reward(
    self, calls: Sequence[Call], results: Sequence[tool_lib.ToolResult]
  ) -> Score | Awaitable[Score]:
    """Scores a turn by the sum of its tools' rewards, under the name 'process'.

    Subclasses may override it, sync or async. A dict names the parts of a sum; equally
    named parts of the process and final rewards are added.

    Args:
      calls: The turn's calls, including malformed ones; none in the last turn.
      results: The result of each call; `messages` ends with the results.
    """
    rewards = [result.reward for result in results]
    return {'process': float(sum(rewards))} if any(rewards) else 0.0

  async def _find_calls(self, reply: str) -> list[Call]:
    if self._parse is not None:
      return await self._call('parse', self._parse, reply)
    schemas = [item.schema for item in self.tools]
    return call_formats.chat_format.get().parse(reply, schemas)

  async def _answer(self, call: Call) -> tool_lib.ToolResult:
    if isinstance(call, calls_lib.CallError):
      return tool_lib.ToolResult(f'Error: {call.message}', ok=False)
    if call.name not in self._by_name:
      names = ', '.join(self._by_name) or 'none'
      text = f'Error: there is no tool {json.dumps(call.name)}; there are: {names}'
      return tool_lib.ToolResult(text, ok=False)
    return await tool_lib.call(self._by_name[call.name], call.arguments)

  async def score(self, task: types.Task, reply: str) -> float:
    """Scores a reply to a task's messages by the reward, without an episode."""
    messages = [*task.messages, {'role': 'assistant', 'content': reply}]
    step, seconds = types.Step([], done=True), self._reward_seconds
    await judge(step, task, messages, 'done', self._reward, None, seconds)
    return step.reward

  async def _judge(self, step: types.Step, status: str):
    functions, seconds = (self._reward, self._metrics), self._reward_seconds
    await judge(step, self.task, self.messages, status, *functions, seconds)

  async def _call(self, kind: str, fn: Callable, *args) -> Any:
    """Calls a user's function in a thread; the default process_reward runs directly."""
    if getattr(fn, 'func', fn) is ToolEnv.process_reward:
      return fn(*args)
    seconds = self._reward_seconds
    return await workers.call(
      fn, *args, name=kind, seconds=seconds, field='reward_seconds'
    )


class CloneableToolEnv(ToolEnv):
  """A ToolEnv whose tools and reward keep no state between calls, such as a search."""

  def clone(self) -> 'CloneableToolEnv':
    """Returns an independent copy."""
    other = copy.copy(self)
    other.messages = copy_containers(self.messages)
    return other


async def call_optional(env: Env, name: str, *args) -> Any:
  """Calls an optional method of an environment; returns None if it has none."""
  method = find_method(env, name)
  return None if method is None else await workers.call(method, *args, name=name)


async def close_env(envs: list[Any], seconds: float, owner: str) -> bool:
  """Closes the environment in the list, and logs if that fails or times out.

  It pops the environment first, so that only one of two threads closes it. The list is
  empty if the environment was never made. `owner` names its owner in the log.

  Returns:
    Whether closing failed.
  """
  try:
    method = find_method(envs.pop(), 'close')
  except IndexError:
    return False
  try:
    if method is not None:
      await workers.call_on_user_loop(
        method, name='close', seconds=seconds, field='close_seconds'
      )
  except Exception as error:
    text = workers.describe_error(error) + workers.locate_error(error)
    _LOGGER.warning('%s: close failed: %s', owner, text)
    return True
  return False


def find_tool_error(messages: Sequence[types.Message], metric: str) -> str:
  """Finds the answer to the first call that a metric '<kind>/<tool>/<type>' counts."""
  _, _, name = metric.partition('/')
  tool, _, kind = name.rpartition('/')
  answers = [m['content'] for m in messages if m.get('name') == tool]
  errors = [x for x in answers if isinstance(x, str) and x.startswith('Error: ')]
  # The error text of a timeout does not name its type.
  return next((x for x in errors if kind in x), errors[0] if errors else '')


def _make_message(call: Call, result: tool_lib.ToolResult) -> types.Message:
  name = {'name': call.name} if isinstance(call, calls_lib.ToolCall) else {}
  return {'role': 'tool', **name, 'content': [*result.parts] or result.text}
