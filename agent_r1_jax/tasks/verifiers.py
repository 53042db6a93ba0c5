"""verifiers: environments that are written for its interface of version 0.4.

  tasks, make_env = verifiers.load({'taskset': {'id': 'my_environment'}})
  train.run(..., tasks=tasks, make_env=make_env)

Such an environment runs an agent and does not wait to be stepped: its agent's program
asks an endpoint for every reply. Here each episode has a small endpoint, where the
environment asks; what it asks is the observation, and the next reply of the policy is the
answer. So tool servers, interceptors, stops, rewards and metrics are the environment's
own. Without a program of its own, an agent is played by a loop in this process, which
calls the environment's tools.
"""

import asyncio
from collections.abc import Callable
import contextlib
import functools
import json
import sys
import types as python_types
from typing import Any

from agent_r1_jax import types
from agent_r1_jax.agent import call_formats, calls
from agent_r1_jax.agent import tool as tool_lib

# The name under which verifiers imports the loop below.
_LOOP = 'agent_r1_jax_loop'


def load(config: dict[str, Any]) -> tuple[list[types.Task], Callable[[], 'DrivenEnv']]:
  """Loads an installed environment.

  Args:
    config: The fields of verifiers' EnvConfig, such as {'taskset': {'id': ...}}. Agents
      without a client of their own are played by the policy; there must be one such.

  Returns:
    Its tasks and what makes the environment of an episode.

  Raises:
    ModuleNotFoundError: verifiers or the environment is not installed.
    ValueError: The configuration is wrong, says verifiers.
  """
  import verifiers.v1 as v1  # pyright: ignore[reportMissingImports]
  from verifiers.v1.configs import agent  # pyright: ignore[reportMissingImports]
  from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]

  _define_loop()
  env_config = loaders.resolve_env_config(config)
  for spec in agent.agent_config_fields(env_config).values():
    if (
      spec.harness is None and loaders.default_harness_id(env_config.taskset.id) == 'bash'
    ):
      spec.harness = loaders.harness_config_type(_LOOP)(id=_LOOP)
      if 'runtime' not in spec.model_fields_set:
        spec.runtime = v1.SubprocessConfig()
  rows = list(loaders.load_environment(env_config).taskset)
  tasks = [
    types.Task(
      row.data.id or f'{env_config.env_id}-{index}',
      # To be read by people: what the agent sees is what the environment asks.
      [{'role': 'user', 'content': row.data.prompt_text}],
      info={'index': index},
    )
    for index, row in enumerate(rows)
  ]
  return tasks, lambda: DrivenEnv(lambda: loaders.load_environment(env_config), rows)


class DrivenEnv:
  """An episode of a verifiers environment.

  Attributes:
    tools: What the environment's agent may call, from the first request on.
  """

  def __init__(self, make: Callable[[], Any], rows: list[Any]):
    """Starts nothing; `make` makes the verifiers environment of `rows`."""
    self._make, self._rows = make, rows
    self.tools: tuple[tool_lib.Tool, ...] = ()
    self._requests: asyncio.Queue[tuple[dict, asyncio.Future]] = asyncio.Queue()
    self._reply: asyncio.Future | None = None
    self._episode: asyncio.Task | None = None

  async def reset(self, task: types.Task) -> list[types.Message]:
    """Starts the episode and returns what it first asks."""
    self._episode = asyncio.create_task(self._run(self._rows[task.info['index']]))
    request = await self._wait()
    if request is None:
      self._judge()
      raise RuntimeError(f'{task.id}: the environment ended without asking its agent.')
    self.tools = tuple(map(_make_tool, request.get('tools') or ()))
    self._seen = [_read_message(message) for message in request['messages']]
    return [dict(message) for message in self._seen]

  async def step(self, reply: str) -> types.Step:
    """Answers the request with a reply; what is asked next is the observation.

    Where the next request does not go on from this one, a new context begins.
    """
    assert self._reply
    self._reply.set_result((reply, 'stop'))
    request = await self._wait()
    if request is None:
      return self._judge()
    before = self._seen
    self._seen = [_read_message(message) for message in request['messages']]
    # It goes on if it repeats the last request, and adds the reply and something new.
    goes_on = self._seen[: len(before)] == before and len(self._seen) > len(before) + 1
    messages = self._seen[len(before) + 1 :] if goes_on else self._seen
    return types.Step([dict(message) for message in messages], fresh=not goes_on)

  async def finish(self, status: str, reply: str | None = None) -> types.Step:
    """Ends the agent's program, so that the environment scores what was said."""
    assert self._reply
    self._reply.set_result((reply or '', 'length'))
    while await self._wait() is not None:
      # Further turns of the agent, to which it says nothing.
      self._reply.set_result(('', 'length'))
    return self._judge()

  async def close(self):
    """Ends the episode with its servers."""
    if self._reply is not None:
      self._reply.cancel()  # Nobody answers it any more.
    if self._episode is not None:
      self._episode.cancel()
      with contextlib.suppress(asyncio.CancelledError, Exception):
        await self._episode

  async def _wait(self) -> dict[str, Any] | None:
    """Returns the next request, or None when the episode is over."""
    assert self._episode
    request = asyncio.ensure_future(self._requests.get())
    try:
      ends = asyncio.FIRST_COMPLETED
      await asyncio.wait([request, self._episode], return_when=ends)
      if not request.done():
        return None
      body, self._reply = request.result()
      return body
    finally:
      request.cancel()

  def _judge(self) -> types.Step:
    """Returns the rewards of the policy's agents, and all metrics."""
    assert self._episode
    episode = self._episode.result()
    if not episode.ok:
      errors = [*episode.errors, *(e for t in episode.traces for e in t.errors)]
      raise RuntimeError('; '.join(f'{e.type}: {e.message}' for e in errors)[:2000])
    step = types.Step([], done=True)
    for trace in episode.traces:
      step.metrics |= {k: float(v) for k, v in trace.metrics.items() if v is not None}
      if trace.agent.trainable:
        step.reward += trace.reward
        scores = {f'reward/{k}': r.value for k, r in trace.rewards.items() if r}
        step.metrics |= scores
    return step

  async def _run(self, row) -> Any:
    """Plays the episode against an endpoint of its own."""
    from aiohttp import web  # pyright: ignore[reportMissingImports]
    import verifiers.v1 as v1  # pyright: ignore[reportMissingImports]

    async def answer(request):
      reply = asyncio.get_running_loop().create_future()
      self._requests.put_nowait((await request.json(), reply))
      return web.json_response(_write_completion(*(await reply)))

    app = web.Application(client_max_size=1 << 28)
    app.router.add_post('/v1/chat/completions', answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
      site = web.TCPSite(runner, '127.0.0.1', 0)
      await site.start()
      port = runner.addresses[0][1]
      client = v1.EvalClientConfig(
        base_url=f'http://127.0.0.1:{port}/v1', api_key_var='AGENT_R1_NO_KEY'
      )
      environment = self._make()
      async with environment.serving():
        return await environment.run_episode(row, v1.ModelContext('policy', client))
    finally:
      await runner.cleanup()


def _make_tool(schema: dict[str, Any]) -> tool_lib.Tool:
  def is_called_by_the_environment():
    raise RuntimeError('the environment of verifiers calls its tools itself')

  function = {'description': '', 'parameters': {'type': 'object'}} | schema['function']
  return tool_lib.Tool(
    function['name'],
    {'type': 'function', 'function': function},
    is_called_by_the_environment,
  )


def _read_message(message: dict[str, Any]) -> types.Message:
  """Makes a message of one of the chat completions API; images are left out."""
  content = message.get('content') or ''
  if not isinstance(content, str):
    content = '\n'.join(part['text'] for part in content if part['type'] == 'text')
  for call in message.get('tool_calls') or ():
    named = {
      'name': call['function']['name'],
      'arguments': json.loads(call['function']['arguments']),
    }
    content += f'\n<tool_call>\n{json.dumps(named)}\n</tool_call>'
  return {'role': message['role'], 'content': content.strip()}


def _write_completion(reply: str, reason: str) -> dict[str, Any]:
  """Makes a chat completion; a reply with a broken call is a text."""
  parsed = call_formats.HERMES.parse(reply) if reason == 'stop' else []
  message: dict[str, Any] = {'role': 'assistant', 'content': reply}
  if parsed and all(isinstance(call, calls.ToolCall) for call in parsed):
    message['content'] = reply.partition('<tool_call>')[0].strip()
    message['tool_calls'] = [
      {
        'id': f'call_{number}',
        'type': 'function',
        'function': {'name': call.name, 'arguments': json.dumps(call.arguments)},
      }
      for number, call in enumerate(parsed)
      if isinstance(call, calls.ToolCall)
    ]
    reason = 'tool_calls'
  choice = {'index': 0, 'message': message, 'finish_reason': reason}
  return {
    'id': 'reply',
    'object': 'chat.completion',
    'created': 0,
    'model': 'policy',
    'choices': [choice],
  }


async def _converse(ask, messages, tools, call) -> None:
  """Asks until a reply has no calls, or ran out of tokens."""
  while True:
    body = {'model': 'policy', 'messages': messages}
    choice = await ask(body | ({'tools': tools} if tools else {}))
    if choice is None:
      return
    messages.append(choice['message'])
    tool_calls = choice['message'].get('tool_calls')
    if not tool_calls or choice['finish_reason'] == 'length':
      return
    for item in tool_calls:
      content = await call(item['function']['name'], item['function']['arguments'])
      messages.append({'role': 'tool', 'tool_call_id': item['id'], 'content': content})


@functools.cache
def _define_loop():
  """Defines the program that plays an agent, where verifiers finds it by its name."""
  import httpx  # pyright: ignore[reportMissingImports]
  import verifiers.v1 as v1  # pyright: ignore[reportMissingImports]
  from verifiers.v1.dialects import chat  # pyright: ignore[reportMissingImports]
  from verifiers.v1.harnesses.utils import mcp  # pyright: ignore[reportMissingImports]

  class LoopConfig(v1.HarnessConfig):
    pass

  class Loop(v1.Harness[LoopConfig]):
    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
      self, ctx, trace, runtime, endpoint, secret, mcp_urls, data
    ) -> v1.ProgramResult:
      system, prompt = self.resolve_prompt(data)
      messages = [{'role': 'system', 'content': system}] if system else []
      if isinstance(prompt, str):
        messages.append({'role': 'user', 'content': prompt})
      else:
        messages += [chat.message_to_wire(message) for message in prompt or ()]
      servers = {'mcpServers': {name: {'url': url} for name, url in mcp_urls.items()}}
      headers = {'Authorization': f'Bearer {secret}'}
      async with contextlib.AsyncExitStack() as stack:
        tools, names, connections = await mcp.connect_mcp(servers, stack)
        http = httpx.AsyncClient(headers=headers, timeout=None, trust_env=False)
        await stack.enter_async_context(http)

        async def ask(body):
          answer = await http.post(f'{endpoint}/chat/completions', json=body)
          if trace.stop_condition is not None:
            return None  # A stop of the environment refused the turn.
          answer.raise_for_status()
          return answer.json()['choices'][0]

        async def call(name, arguments):
          if name not in names:
            return f'Error: there is no tool {json.dumps(name)}.'
          return await mcp.call_mcp(connections, names, name, json.loads(arguments))

        await _converse(ask, messages, tools, call)
      return v1.ProgramResult(0, '', '')

  module = python_types.ModuleType(_LOOP)
  vars(module).update(Loop=Loop, LoopConfig=LoopConfig, __all__=['Loop'])
  sys.modules[_LOOP] = module
