"""verifiers: environments written for version 0.4 of its interface.

  tasks, make_env = verifiers.load({'taskset': {'id': 'my_environment'}})
  train.run(..., tasks=tasks, make_env=make_env)

Such an environment runs an agent itself instead of being stepped. So it is a program,
which requests every reply from the episode's endpoint (serve/program.py). Tool servers,
interceptors, stops, rewards and metrics are the environment's own. An agent without a
program of its own is played by a loop in this process that calls the environment's tools.

An environment's agents play at the same time, and each of their contexts is a segment of
the episode. An agent's reward goes to its own last reply, and the episode's reward is the
sum of its agents'. An agent that the environment does not train needs a client of its
own, because all replies of the policy are trained on.
"""

import collections
from collections.abc import Callable, Sequence
import contextlib
import functools
import json
import sys
import types as python_types
from typing import Any

from agent_r1_jax import types

# The name under which verifiers imports the loop below.
_LOOP = 'agent_r1_jax_loop'


def load(
  config: dict[str, Any],
  dialects: Sequence[Any] = (),
) -> tuple[list[types.Task], Callable[[], Any]]:
  """Loads an installed environment.

  Args:
    config: The fields of verifiers' EnvConfig, such as {'taskset': {'id': ...}}. The
      policy plays all agents without a client of their own; there must be at least one.
      All agents of an episode play at once, unless it has max_concurrent_agents.
    dialects: APIs that agents use besides chat completions; see program.Program.

  Returns:
    Its tasks, and a function that makes the program of an episode.

  Raises:
    ModuleNotFoundError: verifiers or the environment is not installed.
    ValueError: verifiers rejects the configuration.
  """
  import verifiers.v1 as v1  # pyright: ignore[reportMissingImports]
  from verifiers.v1.configs import agent  # pyright: ignore[reportMissingImports]
  from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]

  _define_loop()
  env_config = loaders.resolve_env_config(config)
  if 'max_concurrent_agents' not in env_config.model_fields_set:
    env_config.max_concurrent_agents = None
  agents = agent.agent_config_fields(env_config)
  default = loaders.default_harness_id(env_config.taskset.id)
  for spec in agents.values():
    # `null` is verifiers' own loop, which would be installed at each start.
    named = spec.harness.id if spec.harness else None
    if named == 'null' or (named is None and default == 'bash'):
      spec.harness = v1.HarnessConfig(id=_LOOP)
      if 'runtime' not in spec.model_fields_set:
        spec.runtime = v1.SubprocessConfig()
  rows = list(loaders.load_environment(env_config).taskset)
  tasks = []
  for index, row in enumerate(rows):
    name = row.data.id or f'{env_config.env_id}-{index}'
    tasks.append(types.Task(name, _read_prompt(row.data), info={'index': index}))

  async def play(task: types.Task, url: str) -> None:
    client = v1.EvalClientConfig(base_url=url, api_key_var='AGENT_R1_NO_KEY')
    # One environment per episode, since its servers belong to one event loop.
    environment = loaders.load_environment(env_config)
    async with environment.serving():
      episode = await environment.run_episode(
        rows[task.info['index']], v1.ModelContext('policy', client)
      )
    await _report(episode, url, several=len(agents) > 1)

  # Late, so that importing this module does not load the engine.
  from agent_r1_jax.serve import program

  return tasks, lambda: program.Program(play, dialects=dialects)


def _read_prompt(data: Any) -> list[types.Message]:
  """Returns the messages with which the loop below begins, as text."""
  system = [data.system_prompt] if data.system_prompt else []
  return [
    *({'role': 'system', 'content': text} for text in system),
    {'role': 'user', 'content': data.prompt_text},
  ]


async def _report(episode: Any, url: str, several: bool) -> None:
  """Reports the rewards of the trained agents, and the metrics of all.

  Each run of an agent is rewarded separately: verifiers sends a run's id with its
  requests. Metrics of several runs of one agent become means. If the environment has
  `several` agents, rewards and metrics are named AGENT/NAME.

  Raises:
    RuntimeError: The environment or one of its agents failed, or the policy played an
      agent that is not trained.
  """
  import httpx  # pyright: ignore[reportMissingImports]

  if not episode.ok:
    errors = [*episode.errors, *(e for t in episode.traces for e in t.errors)]
    raise RuntimeError('; '.join(f'{e.type}: {e.message}' for e in errors)[:2000])
  reports, metrics = [], collections.defaultdict(list)
  for trace in episode.traces:
    agent = trace.agent
    if not agent.trainable and agent.config.client.base_url == url:
      raise RuntimeError(
        f'the environment does not train its agent {agent.name}, but the policy played '
        f'it: give {agent.name} a client, such as {{{agent.name!r}: {{"client": '
        '{"type": "eval", "base_url": "http://127.0.0.1:8000/v1"}}}.'
      )
    prefix = f'{agent.name}/' if several else ''
    for name, x in trace.metrics.items():
      if x is not None:
        metrics[prefix + name].append(x)
    if agent.trainable:
      rewards = {prefix + n: r.value for n, r in trace.rewards.items() if r}
      reports.append(({'X-Session-ID': trace.id}, {'reward': rewards}))
  means = {name: sum(numbers) / len(numbers) for name, numbers in metrics.items()}
  async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
    for headers, body in [*reports, ({}, {'metrics': means})]:
      answer = await client.post(f'{url}/reward', json=body, headers=headers)
      answer.raise_for_status()


@functools.cache
def _define_loop():
  """Defines the program that plays an agent, where verifiers finds it by name."""
  import httpx  # pyright: ignore[reportMissingImports]
  import verifiers.v1 as v1  # pyright: ignore[reportMissingImports]
  from verifiers.v1.dialects import chat  # pyright: ignore[reportMissingImports]
  from verifiers.v1.harnesses.utils import mcp  # pyright: ignore[reportMissingImports]

  class Loop(v1.Harness[v1.HarnessConfig]):
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
        body = {'model': 'policy', 'messages': messages}
        body |= {'tools': tools} if tools else {}

        async def call(name, arguments):
          if name not in names:
            return f'Error: there is no tool {json.dumps(name)}.'
          try:
            given = json.loads(arguments)
          except ValueError as error:
            return f'Error: the arguments are no JSON: {error}'
          return await mcp.call_mcp(connections, names, name, given)

        while True:
          answer = await http.post(f'{endpoint}/chat/completions', json=body)
          # A turn is refused by a stop of the environment or by a budget of the episode;
          # the conversation so far is scored.
          if trace.stop_condition is not None or answer.status_code == 400:
            break
          answer.raise_for_status()
          choice = answer.json()['choices'][0]
          messages.append(choice['message'])
          tool_calls = choice['message'].get('tool_calls')
          if not tool_calls or choice['finish_reason'] == 'length':
            break
          for item in tool_calls:
            content = await call(item['function']['name'], item['function']['arguments'])
            said = {'role': 'tool', 'tool_call_id': item['id'], 'content': content}
            messages.append(said)
      return v1.ProgramResult(0, '', '')

  module = python_types.ModuleType(_LOOP)
  vars(module).update(Loop=Loop, __all__=['Loop'])
  sys.modules[_LOOP] = module
