"""The endpoint of running episodes: each has its own address.

  {url}/chat/completions  as in serve/server.py, and the given dialects
  {url}/reward  POST {"reward": 1.0, "metrics": {"steps": 3}}; the reward may be
                          a dict of named parts, which are summed; metrics are
                          optional. With a session's header X-Session-ID it belongs
                          to the session's last reply, else to the episode's

An address contains a key that cannot be guessed; the same key works as API key at the
address without it. The server listens on the loopback interface, in the engine's event
loop, and stops with it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
import contextlib
import functools
import math
import secrets
from typing import Any

import pydantic

from agent_r1_jax import types
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.serve import conversation as conversation_lib
from agent_r1_jax.serve import dialect as dialect_lib
from agent_r1_jax.serve import requests
from agent_r1_jax.serve import server as server_lib
from agent_r1_jax.web import http


class _Endpoint:
  """The server of one event loop.

  Attributes:
    url: Its address.
    episodes: The running episodes, by key.
  """

  def __init__(
    self,
    chat: chat_lib.Chat,
    vocab_size: int,
    dialects: Sequence[dialect_lib.Dialect],
    on_end: Callable[[], Any],
  ):
    self.episodes: dict[str, conversation_lib.EpisodeSource] = {}
    self._server = server_lib.Server(
      self._find,
      chat,
      vocab_size,
      name='policy',
      max_replies=math.inf,
      seconds=math.inf,
      restrict=False,
      dialects=dialects,
    )
    routes = []
    for prefix in ('', '/episodes/{episode}'):
      routes += self._server.make_routes(prefix)
      reward = f'{prefix}/v1/reward'
      routes.append(self._server.make_route(reward, self._reward, 'POST'))
    self._app = self._server.make_app(routes)
    listener = http.listen('127.0.0.1', 0)
    self.url = f'http://127.0.0.1:{listener.getsockname()[1]}'
    self._task = asyncio.create_task(self._serve(listener, on_end))

  def _find(self, episode: str | None, key: str) -> conversation_lib.EpisodeSource:
    conversation = self.episodes.get(episode or key)
    if conversation is None:
      raise http.RefusedError(
        410, 'there is no such episode, or it is over', 'no_episode'
      )
    return conversation

  async def _serve(self, listener, on_end):
    server = http.make_server(self._app, shutdown_seconds=1, lifespan='off')
    try:
      await server.serve([listener])
    finally:  # The event loop is shutting down.
      on_end()
      server.force_exit = True
      await server.shutdown([listener])

  async def _reward(self, request: Any):
    conversation: Any = self._server.find_source(request)
    make = functools.partial(http.check_fields, _RewardReport)
    report = await http.read_json(request, 1 << 16, make)
    session = request.headers.get(requests.SESSION_HEADER, '')
    conversation.report(report.to_step(), session)
    return http.answer_json({})


class _RewardReport(pydantic.BaseModel):
  reward: pydantic.FiniteFloat | dict[str, pydantic.FiniteFloat] = 0.0
  metrics: dict[str, pydantic.FiniteFloat] | None = None

  def to_step(self) -> types.Step:
    if not isinstance(self.reward, dict):
      return types.Step([], self.reward, metrics=self.metrics or {})
    if not math.isfinite(reward := sum(self.reward.values())):
      raise http.RefusedError(400, 'the parts of reward have no finite sum')
    named = {f'reward/{name}': part for name, part in self.reward.items()}
    return types.Step([], reward, metrics=named | (self.metrics or {}))


# By event loop, chat and dialects.
_endpoints: dict[tuple, _Endpoint] = {}


@contextlib.asynccontextmanager
async def open(
  conversation: conversation_lib.EpisodeSource,
  chat: chat_lib.Chat,
  vocab_size: int,
  dialects: Sequence[dialect_lib.Dialect],
) -> AsyncIterator[str]:
  """Yields the address of an episode; later requests to it get HTTP 410."""
  place = asyncio.get_running_loop(), chat, *dialects
  if place not in _endpoints:
    end = lambda: _endpoints.pop(place)
    _endpoints[place] = _Endpoint(chat, vocab_size, dialects, end)
  endpoint, key = _endpoints[place], secrets.token_urlsafe(16)
  endpoint.episodes[key] = conversation
  try:
    yield f'{endpoint.url}/episodes/{key}/v1'
  finally:
    del endpoint.episodes[key]
