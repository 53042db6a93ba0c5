"""NeMo Gym: plays the tasks of its resources servers, over HTTP.

  tasks = nemo_gym.load_tasks('resources_servers/SERVER/data/train.jsonl')
  train.run(..., tasks=tasks, make_env=lambda: nemo_gym.ServedEnv('http://127.0.0.1:8000'))

A resources server has the tools and rewards of tasks, but no model: POST /seed_session
begins a session, POST /NAME calls a tool, and POST /verify scores the conversation, which
it gets as a response of OpenAI's Responses API. A cookie identifies the session. The
server runs in an environment of its own.
"""

from collections.abc import Mapping, Sequence
import functools
import json
import math
import os
import pathlib
from typing import Any
import urllib.parse

from agent_r1_jax import types
from agent_r1_jax.agent import calls, env
from agent_r1_jax.agent import tool as tool_lib
from agent_r1_jax.web import bounded_http

# Maximum bytes of an answer. /verify's repeats the task and the conversation.
_MAX_BYTES = 1 << 24


def load_tasks(path: str | os.PathLike) -> list[types.Task]:
  """Reads the tasks of a file of JSON lines with `responses_create_params`.

  Raises:
    ValueError: It has no tasks, or a line has none that can be played.
  """
  path, tasks = pathlib.Path(path), []
  for number, line in enumerate(path.read_bytes().splitlines(), start=1):
    if not line.strip():
      continue
    try:
      row = json.loads(line)
      messages = _read_messages(row['responses_create_params'])
      ServedEnv('http://none').make_tools(row)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
      raise ValueError(f'{path}, line {number} is no task: {error!r}') from None
    tasks.append(types.Task(f'{path.stem}-{number}', messages, info={'row': row}))
  if not tasks:
    raise ValueError(f'{path} has no task; a task is a line of JSON.')
  return tasks


class ServedEnv(env.ToolEnv):
  """An episode with a session on a resources server.

  The tools come from the task's row; calls of one reply are made one after another. A
  call whose arguments do not fit their schema is answered here, all others by the server.
  Numbers in its verdict that are not in the task become metrics.
  """

  def __init__(self, url: str, *, seconds: float = 60.0):
    """Connects to nothing yet.

    Args:
      url: The resources server, such as 'http://127.0.0.1:8000'.
      seconds: Time limit of one answer.
    """
    metrics = lambda task, messages: self._numbers
    # Calls share a session, so a call may depend on earlier calls.
    super().__init__(
      [], self._verify, metrics=metrics, in_order=True, reward_seconds=seconds + 5
    )
    self._url, self._seconds = bounded_http.check_url(url), seconds
    self._client: Any = None
    # The conversation after the prompt, as items of the Responses API.
    self._output: list[dict[str, Any]] = []
    self._numbers: dict[str, float] = {}

  def reset(self, task: types.Task) -> list[types.Message]:
    """Begins a session.

    Raises:
      ValueError: All of the task's tools are MCP tools.
      ConnectionError: The server is unreachable or refused the task.
    """
    import httpx2

    self._client = httpx2.Client(trust_env=False)
    begun = self._ask('seed_session', task.info['row'])
    self.set_tools(self.make_tools(task.info['row']))
    if 'mcp' in begun and not self.tools:
      raise ValueError(f'{self._url} has tools of MCP alone, which are not played.')
    self.task, self._done = task, False
    self.messages = env.copy_containers(task.messages)
    return env.copy_containers(task.messages)

  def make_tools(self, row: Mapping[str, Any]) -> tuple[tool_lib.Tool, ...]:
    """Makes the tools of a task's row."""
    tools = []
    for item in row['responses_create_params'].get('tools') or ():
      if item['type'] != 'function':
        raise ValueError(f'a tool of the type {item["type"]!r} is not played')
      given = {
        name: item[name] for name in ('parameters', 'description') if item.get(name)
      }
      function = {'description': '', 'parameters': {'type': 'object', 'properties': {}}}
      schema = {'type': 'function', 'function': function | given | {'name': item['name']}}
      path = urllib.parse.quote(item['name'], safe='')
      call = functools.partial(self._call_tool, path)
      tools.append(tool_lib.Tool(item['name'], schema, call, self._seconds + 5))
    return tuple(tools)

  def process_reward(
    self, calls: Sequence[env.Call], results: Sequence[tool_lib.ToolResult]
  ) -> float:
    """Records the turn in the server's form; the score is 0."""
    replies = (m['content'] for m in reversed(self.messages) if m['role'] == 'assistant')
    pairs = [*zip(calls, results, strict=True)]
    self._output += _write_turn(len(self._output), next(replies), pairs)
    return 0.0

  def close(self):
    """Ends the connection."""
    if self._client is not None:
      self._client.close()

  def _verify(self, task, messages, status) -> float:
    row, output = task.info['row'], self._output
    if status != 'done' and messages[-1]['role'] == 'assistant':  # It is unfinished.
      output = output + _write_turn(len(output), messages[-1]['content'], [])
    made = {'id': 'resp_0', 'object': 'response', 'created_at': 0, 'model': 'policy'}
    made |= {'output': output, 'parallel_tool_calls': True, 'tool_choice': 'auto'}
    made |= {'tools': row['responses_create_params'].get('tools') or []}
    verdict = self._ask('verify', row | {'response': made})
    self._numbers = {
      name: float(x)
      for name, x in verdict.items()
      if isinstance(x, int | float) and math.isfinite(x) and name not in ('reward', *row)
    }
    return verdict['reward']

  def _call_tool(self, path: str, /, **arguments: Any) -> str:
    status, text = self._post(path, arguments)
    if status >= 400:
      raise ValueError(text)
    return text

  def _ask(self, path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Posts a task, and returns the object that the server answers."""
    status, text = self._post(path, fields)
    try:
      answer = json.loads(text)
    except (ValueError, RecursionError):
      answer = None
    if status != 200 or not isinstance(answer, dict):
      raise ConnectionError(f'{self._url}/{path}: status {status}: {text[:300]}')
    return answer

  def _post(self, path: str, fields: Mapping[str, Any]) -> tuple[int, str]:
    import httpx2

    limits: Any = {'seconds': self._seconds, 'max_bytes': _MAX_BYTES}
    try:
      answer = bounded_http.post(self._client, f'{self._url}/{path}', fields, **limits)
    except (httpx2.HTTPError, TimeoutError, bounded_http.LongAnswerError) as error:
      raise ConnectionError(f'{self._url}/{path}: {error or repr(error)}') from error
    return answer[0], answer[2].decode(errors='replace')


def _read_messages(params: Mapping[str, Any]) -> list[types.Message]:
  """Converts a request to the Responses API to messages; all parts must be texts."""
  given, messages = params['input'], []
  if params.get('instructions'):
    messages.append({'role': 'system', 'content': params['instructions']})
  for item in [{'role': 'user', 'content': given}] if isinstance(given, str) else given:
    content = item['content']
    if not isinstance(content, str):
      content = ''.join(part['text'] for part in content)
    role = 'system' if item['role'] == 'developer' else item['role']
    messages.append({'role': role, 'content': content})
  return messages


def _write_turn(
  number: int, reply: str, called: Sequence[tuple[Any, Any]]
) -> list[dict[str, Any]]:
  """Writes a reply, its calls and their results as items of the Responses API."""
  pairs = [pair for pair in called if isinstance(pair[0], calls.ToolCall)]
  text = reply[: called[0][0].begin] if pairs else reply
  part = {'type': 'output_text', 'text': text, 'annotations': []}
  message = {'id': f'msg_{number}', 'type': 'message', 'role': 'assistant'}
  items = [message | {'status': 'completed', 'content': [part]}] if text else []
  for i, (call, result) in enumerate(pairs):
    id_, given = f'call_{number}_{i}', json.dumps(call.arguments)
    named = {'call_id': id_, 'name': call.name, 'arguments': given}
    shown = {'call_id': id_, 'output': result.text}
    items += [{'type': 'function_call', **named}]
    items += [{'type': 'function_call_output', **shown}]
  return items
