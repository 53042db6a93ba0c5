"""Tools: plain Python functions that a model may call.

A tool reports what happened. If it raises, hangs, gets wrong arguments or returns an
unsupported value, the model gets an error text; the run never gets an exception.
"""

import asyncio
from collections.abc import Callable, Mapping
import dataclasses
import functools
import inspect
import json
import math
import re
import time
from typing import Any, overload

from agent_r1_jax.agent import breaker as breaker_lib
from agent_r1_jax.agent import pictures, tool_schema
from agent_r1_jax.host import moments, workers

# Results are cut to this many characters, since a trajectory keeps its messages.
MAX_CHARS = 200_000
# An idempotent tool that fails is called again after each of these pauses, in seconds.
_PAUSES = (0.5, 1.0, 2.0, 4.0)
# A tool is isolated after this many failures in a row, over all episodes: its calls get
# an error at once, except for one try each time this many seconds have passed.
_ISOLATION = (20, 30.0)
# Exceptions that may be due to the arguments; others are the tool's fault.
_OF_ARGUMENTS = (
  *(ValueError, TypeError, LookupError, ArithmeticError, SyntaxError, FileNotFoundError),
  *(FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError),
)
_clock, _sleep = time.monotonic, asyncio.sleep


@dataclasses.dataclass(frozen=True)
class Tool:
  """A function and its description for the model.

  Attributes:
    name: The name that the model calls.
    schema: {'type': 'function', 'function': {'name', 'description', 'parameters'}}, the
      OpenAI form. The chat template shows it, and calls are checked against it.
    fn: The function. A plain function runs in a thread (see workers) and may block; an
      async one must not block.
    timeout: Seconds after which a call is abandoned, including the wait for a thread. A
      hung function keeps its thread, but does not keep the interpreter from exiting.
    idempotent: Whether calling it twice has the same effect as calling it once. It is
      then retried if it raises an OSError, such as a ConnectionError, within the same
      timeout.
  """

  name: str
  schema: dict[str, Any]
  fn: Callable[..., Any]
  timeout: float = 30.0
  idempotent: bool = False

  def __post_init__(self):
    function = self.schema.get('function', {})
    if function.get('name') != self.name:
      raise ValueError(
        f"tool {self.name}: schema must be {{'type': 'function', 'function': {{'name': "
        f"{self.name!r}, 'description': ..., 'parameters': ...}}}}, not {self.schema}."
      )
    # A null field counts as missing.
    function = {key: value for key, value in function.items() if value is not None}
    object.__setattr__(self, 'schema', {**self.schema, 'function': function})
    try:
      tool_schema.check(function.get('parameters', {}), 'parameters')
    except ValueError as error:
      raise ValueError(f'tool {self.name}: {error}') from None
    if not self.timeout > 0:
      raise ValueError(f'tool {self.name}: timeout={self.timeout} must be above 0.')

  def __call__(self, *args, **kwargs):
    """Calls the plain function; its exceptions pass through."""
    return self.fn(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class Report:
  """A function's return value with a reward: `Report('you won', reward=1)`.

  Attributes:
    value: The value for the model, of any type that a tool may return: text, bytes of
      text, a JSON value, a PIL image, or a list of texts and PIL images.
    reward: The reward; the environment decides what it means.
  """

  value: Any
  reward: float = 0.0

  def __post_init__(self):
    try:
      finite = math.isfinite(self.reward)
    except (TypeError, OverflowError):
      finite = False
    if not finite:
      # A ValueError would count as the agent's mistake (_OF_ARGUMENTS).
      text = f'the reported reward is {self.reward!r:.40}; make it a finite number.'
      raise RuntimeError(text)


@dataclasses.dataclass(frozen=True)
class ToolResult:
  """The result of a call.

  Attributes:
    text: The text for the model; empty if `parts` has it.
    ok: Whether the call succeeded.
    seconds: How long it took.
    reward: The reward of the tool's Report, else 0.
    timed_out: Whether it exceeded the tool's timeout.
    failed: Whether the tool failed, not the agent: it timed out or raised an OSError.
      Other exceptions may be due to the arguments; isolating a tool for them would
      obstruct an agent that is learning to call it.
    error: The type of the exception; empty if the tool was not called or returned.
    outage: Whether it timed out, is isolated, or raised an error that arguments do not
      explain; a run with too many outages ends (config.max_error_rate).
    retries: The number of retries.
    isolated: Whether it was not called because the tool is isolated: it failed too often
      in a row, over all episodes, so that only occasional calls are tried.
    parts: The texts and pictures of a result with pictures, as parts of a message.
  """

  text: str
  ok: bool
  seconds: float = 0.0
  reward: float = 0.0
  timed_out: bool = False
  failed: bool = False
  error: str = ''
  outage: bool = False
  retries: int = 0
  isolated: bool = False
  parts: tuple[dict[str, Any], ...] = ()


# Bounded, since episodes may make tools from new code that is never called again.
@functools.lru_cache(1024)
def _get_breaker(name: str, code: Any) -> breaker_lib.Breaker:
  """Returns the breaker of a tool, shared by the Tools that episodes make of its code."""
  return breaker_lib.Breaker(*_ISOLATION)


@overload
def tool(fn: Callable, /) -> Tool: ...


@overload
def tool(
  *, name: str | None = ..., timeout: float = ..., idempotent: bool = ...
) -> Callable[[Callable], Tool]: ...


def tool(
  fn: Callable | None = None,
  /,
  *,
  name: str | None = None,
  timeout: float = 30.0,
  idempotent: bool = False,
) -> Any:
  """Makes a Tool from a function: `@tool` or `@tool(timeout=5)`.

  transformers' `get_json_schema` makes the schema from the name, types, defaults and the
  Google docstring. It supports str, int, float, bool, list[T], dict[str, T], Literal,
  Any, their unions and None, and requires a line for each argument.

  Raises:
    ValueError: The docstring does not describe the tool or an argument, or an argument's
      type is not a JSON type.
  """

  def make(fn: Callable) -> Tool:
    called = name or fn.__name__
    return Tool(called, tool_schema.describe(fn, called), fn, timeout, idempotent)

  return make if fn is None else make(fn)


async def call(tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
  """Calls a tool within its timeout; never raises."""
  with moments.watch(moments.ToolCall(tool.name)) as moment:
    moment.result = await _call(tool, arguments)
  return moment.result


async def _call(tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
  start, retries = _clock(), 0
  breaker = _get_breaker(tool.name, getattr(tool.fn, '__code__', type(tool.fn)))
  # Calls that never reach the tool say nothing about it, and must not use up the try of
  # an isolated tool.
  parameters = tool.schema['function'].get('parameters', {})
  if problem := tool_schema.find_problem(parameters, arguments):
    result = ToolResult(f'Error: {tool.name}: {problem}', ok=False)
  elif breaker.hold_back():
    text = f'Error: {tool.name}: the tool failed too often and is not called for now'
    result = ToolResult(text, ok=False, isolated=True, outage=True)
  else:
    result = await _attempt(tool, arguments, tool.timeout)
    for pause in _PAUSES if tool.idempotent else ():
      left = start + tool.timeout - _clock() - pause
      if not result.failed or left <= 0:
        break
      await _sleep(pause)
      result, retries = await _attempt(tool, arguments, left), retries + 1
    # Other exceptions may be due to the arguments, and say nothing about the tool.
    if result.ok or result.failed:
      breaker.record(result.failed)
  text = result.text
  if len(text) > MAX_CHARS:
    text = f'{text[:MAX_CHARS]}\n[cut: {len(text):,} characters in all]'
  seconds = _clock() - start
  return dataclasses.replace(result, text=text, seconds=seconds, retries=retries)


async def _attempt(
  tool: Tool, arguments: Mapping[str, Any], seconds: float
) -> ToolResult:
  # The result is converted to text in the function's thread, since that may be slow too.
  def run():
    return _to_result(tool.fn(**arguments))

  async def run_async():
    return _to_result(await tool.fn(**arguments))

  fn = run_async if workers.is_async(tool.fn) else run
  try:
    return await workers.call(fn, name=tool.name, seconds=seconds)
  except workers.CallTimeoutError as error:
    text, raised = f'Error: {error}', error
  except workers.BaseExceptionError as error:
    text, raised = f'Error: {tool.name}: {error}', error.__cause__ or error
  except Exception as error:
    text, raised = f'Error: {tool.name}: {workers.describe_error(error)}', error
  return ToolResult(
    text,
    ok=False,
    timed_out=isinstance(raised, workers.CallTimeoutError),
    failed=isinstance(raised, OSError),
    error=type(raised).__name__,
    outage=not isinstance(raised, _OF_ARGUMENTS),
  )


def _to_result(value: Any) -> ToolResult:
  reward = 0.0
  if isinstance(value, Report):
    value, reward = value.value, float(value.reward)
  items = value if isinstance(value, list | tuple) else [value]
  if not any(map(pictures.is_image, items)):
    return ToolResult(_to_text(value), ok=True, reward=reward)
  parts = [
    pictures.make_part(x)
    if pictures.is_image(x)
    else {'type': 'text', 'text': _to_text(_get_text(x))[:MAX_CHARS]}
    for x in items
  ]
  return ToolResult('', ok=True, reward=reward, parts=tuple(parts))


def _get_text(value: Any) -> Any:
  """Returns the text of a message part; returns any other value unchanged."""
  match value:
    case {'type': 'text', 'text': str(text)}:
      return text
  return value


def _to_text(value: Any) -> str:
  if isinstance(value, bytes | bytearray | memoryview):
    return bytes(value).decode('utf-8', errors='replace')
  if inspect.isawaitable(value):
    raise TypeError('the function returned an awaitable; define it with async def')
  if not isinstance(value, str):
    try:
      value = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
      kind, value = type(value).__name__, str(value)
      # Python's default repr means nothing to a model.
      if re.search(r' at 0x[0-9a-f]+>', value):
        raise TypeError(
          f'the function returned a {kind}, which is no text; return a str, a number, '
          'or a list or dict of these'
        ) from None
  return str.__str__(value)  # A subclass of str may override it.
