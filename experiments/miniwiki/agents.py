"""Two third-party agents that play the quickstart's task.

One uses only OpenAI's client, the other pydantic-ai. Both know only the address of an
endpoint. Their episodes equal the native environment's, token for token, as long as each
call can be parsed; the first one also answers malformed calls as ToolEnv does.
"""

from collections.abc import Awaitable, Callable
import json
from typing import Any

from agent_r1_jax import types
from agent_r1_jax.agent import call_formats
from agent_r1_jax.agent import tool as tool_lib

# An agent's program; see serve/program.py.
Run = Callable[[types.Task, str], Awaitable[None]]


def with_openai(search: tool_lib.Tool) -> Run:
  """Makes an agent's loop, written with OpenAI's client."""
  import openai  # noqa: F401  Fails early if the package is missing.

  async def play(task: types.Task, url: str):
    messages: list = [*task.messages]
    async with _make_client(url) as client:
      while True:
        answer = await client.chat.completions.create(
          model='policy', messages=messages, tools=[search.schema]
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
          return
        for call in message.tool_calls:
          content = await _call(search, call.function.arguments)
          reply = {'role': 'tool', 'tool_call_id': call.id, 'content': content}
          messages.append(reply)

  return play


def with_pydantic_ai(search: tool_lib.Tool) -> Run:
  """Makes an agent with the library pydantic-ai."""
  import pydantic_ai
  from pydantic_ai.models.openai import OpenAIChatModel
  from pydantic_ai.providers.openai import OpenAIProvider

  async def play(task: types.Task, url: str):
    agent = pydantic_ai.Agent(retries=100)

    @agent.tool_plain(name='search')
    async def look_up(query: str) -> str:
      """Searches an encyclopedia.

      Args:
        query: What to search for.
      """
      return (await tool_lib.call(search, {'query': query})).text

    async with _make_client(url) as client:
      model = OpenAIChatModel('policy', provider=OpenAIProvider(openai_client=client))
      try:
        await agent.run(task.messages[0]['content'], model=model)
      except pydantic_ai.UnexpectedModelBehavior:
        pass  # The library gave up on the policy, whose fault it is.

  return play


def _make_client(url: str) -> Any:
  """Makes OpenAI's client without TLS, which takes .2 ms of CPU time instead of 26."""
  import openai

  http = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
  return openai.AsyncOpenAI(base_url=url, api_key='none', http_client=http)


async def _call(search: tool_lib.Tool, arguments: str) -> str:
  """Runs a call with arguments that the policy wrote, or returns the error in them."""
  try:
    given = json.loads(arguments)
  except ValueError:
    error = call_formats.HERMES.parse(arguments)[0]
    return f'Error: {getattr(error, "message", "invalid tool call")}'
  return (await tool_lib.call(search, given)).text
