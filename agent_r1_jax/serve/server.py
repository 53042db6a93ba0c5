"""A server of OpenAI's API over the one engine; see contrib/dialects/guide.md.

  POST /v1/chat/completions  tools, streams, log-probs, stop, seed, n, JSON schemas
  POST /v1/completions       texts or tokens to go on from, and their log-probs
  GET  /v1/models            the names of the policy and of its adapters; /v1/models/NAME
  GET  /health               200 while the engine's event loop runs
  GET  /metrics              counts and times in Prometheus's text format

The caller may pass further dialects (serve/dialect.py).

An error is {"error": {"message", "type", "code"}}, or the dialect's own form: 400 for an
invalid request, 401 for a wrong key, 404 for an unknown adapter or path, 405 for a wrong
method, 413 for a body that is too long, 429 with Retry-After if too many replies are in
progress, 504 for a reply that took too long.

If the engine has adapters, a request's `model` names the policy or one of them. Otherwise
it is ignored.

The handlers run in the engine's own event loop. If a client disconnects, its reply is
cancelled, and the row is free at the next decode.
"""

from collections.abc import Callable, Collection, Sequence
import functools
import signal
import time
from typing import Any

from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.engine import clients
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.serve import answer as answer_lib
from agent_r1_jax.serve import (
  completions,
  replies,
  request_grammars,
  requests,
  sources,
)
from agent_r1_jax.serve import dialect as dialect_lib
from agent_r1_jax.web import fairness, http

_MAX_BODY = 1 << 22  # Of a request, in bytes.
_SHUTDOWN_SECONDS = 30  # How long running replies may take after SIGTERM.


class Server:
  """The HTTP handlers; `find` authenticates clients.

  Attributes:
    metrics: The server's counters.
    replies: The replies in progress, by client.
  """

  def __init__(
    self,
    find: Callable[[str | None, str], sources.ReplySource],
    chat: chat_lib.Chat,
    vocab_size: int,
    *,
    name: str,
    max_replies: float,
    seconds: float,
    restrict: bool = True,
    dialects: Sequence[dialect_lib.Dialect] = (),
  ):
    """Makes the handlers.

    Args:
      find: (episode or None, key) -> the source of a client's replies; raises
        RefusedError.
      chat: Encodes messages with the policy's tokenizer.
      vocab_size: Tokens of the policy.
      name: The policy's name.
      max_replies: How many replies may be queued or sampled; further ones get HTTP 429.
      seconds: Time limit of a reply.
      restrict: Whether schemas and required calls restrict replies.
      dialects: The dialects besides chat completions and completions.
    """
    self._find, self.metrics = find, answer_lib.Metrics()
    self._chat, self._name, self._seconds = chat, name, seconds
    self._max_replies, self._restrict = max_replies, restrict
    self._dialects = completions.CHAT, completions.TEXT, *dialects
    self.replies = fairness.Shares()
    self._grammars = request_grammars.Grammars(chat, vocab_size)

  async def answer(self, dialect: dialect_lib.Dialect, request: Any) -> Any:
    """Begins the replies to one request; returns the answer that sends them."""
    began, source = time.perf_counter(), self.find_source(request)
    asked, generations = await self._begin(dialect, source, request)
    name = generations[0].request.adapter or self._name
    prompts = [len(g.sequence) for g in generations[:: asked.request.n]]
    return answer_lib.Answer(
      dialect,
      dialect_lib.Head(asked, name, next(replies.numbers), sum(prompts)),
      source,
      generations,
      chat=self._chat,
      metrics=self.metrics,
      seconds=self._seconds,
      began=began,
      on_end=functools.partial(self._end_replies, http.client.get(), len(generations)),
    )

  async def count_tokens(self, dialect: dialect_lib.Dialect, request: Any) -> Any:
    """Answers with a request's number of tokens."""
    source = self.find_source(request)
    asked = await self._read(dialect, source, request, counts=True)
    return http.answer_json(dialect.write_count(await source.count(asked.request)))

  async def _begin(self, dialect, source, request):
    """Begins the replies to a request; tells the source if they are refused."""
    try:
      asked = await self._read(dialect, source, request)
      automata = await self._grammars.make(asked.request, self._restrict)
      return asked, await self._submit(source, asked.request, automata)
    except http.RefusedError as error:
      source.note_refusal(error)
      raise

  async def _read(self, dialect, source, request, counts=False) -> dialect_lib.Asked:
    def read(fields: dict[str, Any]) -> dialect_lib.Asked:
      sources.check_count(source, fields, dialect.conversation)
      asked = dialect.read(fields, source.memory, counts)
      _ = asked.request.messages  # Cached on first access: make them here.
      return asked

    asked = await http.read_json(request, _MAX_BODY, read)
    asked.request.session = request.headers.get(requests.SESSION_HEADER, '')
    return asked

  async def _submit(self, source, api_request, automata) -> list[request_lib.Generation]:
    """Begins replies; they count before they are encoded, which may take a while."""
    client, count = http.client.get(), api_request.count
    self.replies.take(client, count, self._max_replies)
    self.metrics.replies.set(self.replies.total)
    try:
      return await source.submit(api_request, automata)
    except BaseException:
      self._end_replies(client, count)
      raise

  def _end_replies(self, client: str, count: int):
    self.replies.give(client, count)
    self.metrics.replies.set(self.replies.total)

  def find_source(self, request: Any) -> sources.ReplySource:
    """Finds the source of the client that sent a request."""
    scheme, _, key = request.headers.get('Authorization', '').partition(' ')
    if scheme.lower() != 'bearer':
      key = request.headers.get('x-api-key', '')
    key = key.strip()
    return self._find(request.path_params.get('episode'), key)

  def make_route(
    self,
    path: str,
    handle: Any,
    method: str,
    dialect: dialect_lib.Dialect = completions.CHAT,
  ) -> Any:
    """Makes a route; its errors are answered in the dialect."""
    from starlette import routing

    refuse = functools.partial(self.metrics.refuse, dialect)
    return routing.Route(path, http.guard(handle, refuse), methods=[method])

  def make_routes(self, prefix: str = '') -> list[Any]:
    """Makes the routes under a prefix."""

    async def models(request):
      names = self._name, *self.find_source(request).adapters
      asked = request.path_params.get('name')
      if asked not in (None, *names):
        text = f'there is no model {asked!r:.120}; there are: {", ".join(names)}'
        raise http.RefusedError(404, text, 'model_not_found')
      model = {'object': 'model', 'created': 0, 'owned_by': 'policy'}
      models = [{'id': name, **model} for name in names if asked in (None, name)]
      return http.answer_json(models[0] if asked else {'object': 'list', 'data': models})

    routes = [
      self.make_route(prefix + path, models, 'GET')
      for path in ('/v1/models', '/v1/models/{name:path}')
    ]
    for dialect in self._dialects:
      paths = {dialect.path: self.answer, dialect.count_path: self.count_tokens}
      for path, answer in paths.items():
        if path:
          handle = functools.partial(answer, dialect)
          routes.append(self.make_route(prefix + path, handle, 'POST', dialect))
    return routes

  def make_app(self, routes: list[Any], **options: Any) -> Any:
    """Makes an ASGI application; unknown paths and methods get OpenAI's errors."""
    from starlette import applications

    async def refuse(request, error):
      text = (
        f'{request.method} {request.url.path:.200} is not served here: {error.detail}'
      )
      refused = http.RefusedError(error.status_code, text, 'unknown_url')
      answer = self.metrics.refuse(completions.CHAT, refused)
      answer.headers.update(error.headers or {})  # Such as Allow.
      return answer

    missing = {404: refuse, 405: refuse}
    return applications.Starlette(routes=routes, exception_handlers=missing, **options)


def read_keys(text: str) -> list[str]:
  """Reads comma-separated keys; an empty text has none.

  Raises:
    ValueError: The text is not empty but has no key: the server would be open.
  """
  keys = [key.strip() for key in text.split(',') if key.strip()]
  if text and not keys:
    raise ValueError(
      f'AGENT_R1_API_KEYS is {text!r}, which has no key; give keys separated by commas, '
      'or unset it to serve everyone.'
    )
  return keys


def make_app(
  engine: engine_lib.Engine,
  chat: chat_lib.Chat,
  *,
  name: str = 'policy',
  keys: Collection[str] = (),
  max_waiting: int = 256,
  seconds: float = 600.0,
  dialects: Sequence[dialect_lib.Dialect] = (),
) -> Any:
  """Makes an ASGI application that serves a policy; it runs in the engine's event loop.

  Args:
    engine: The engine, with the policy's weights.
    chat: Encodes messages with the policy's tokenizer.
    name: What clients call the policy.
    keys: The accepted keys; if empty, no key is needed.
    max_waiting: How many replies may wait for a row; further ones get HTTP 429.
    seconds: Time limit of a reply.
    dialects: The dialects besides chat completions and completions.
  """
  from starlette import middleware, routing
  from starlette.middleware import cors

  free = sources.StatelessSource(engine, chat, name)

  def find(episode: str | None, key: str) -> sources.ReplySource:
    http.check_key(key, keys, 'send it as Authorization: Bearer KEY or as x-api-key')
    return free

  server = Server(
    find,
    chat,
    engine.config.vocab_size,
    name=name,
    max_replies=engine.sizes.rows * len(engine.replicas) + max_waiting,
    seconds=seconds,
    dialects=dialects,
  )

  async def health(request):
    return http.answer_json({'status': 'ok', 'replies': server.replies.total})

  # Any origin is safe: a key is in a header, never in a cookie.
  anyone: Any = {f'allow_{x}': ['*'] for x in ('origins', 'methods', 'headers')}
  return server.make_app(
    [
      *server.make_routes(),
      routing.Route('/health', health),
      routing.Route('/metrics', http.show_metrics(server.metrics.registry)),
    ],
    middleware=[middleware.Middleware(cors.CORSMiddleware, **anyone)],
  )


def serve(engine: engine_lib.Engine, app: Any, host: str = '127.0.0.1', port: int = 8000):
  """Serves until SIGTERM or SIGINT; prints the address once it accepts requests.

  Running replies then have _SHUTDOWN_SECONDS to finish.

  Args:
    engine: The engine that `app` was made with.
    app: The application of `make_app`.
    host: The address to listen on; 0.0.0.0 accepts other machines.
    port: The port; 0 chooses a free one.
  """
  server = http.make_server(app, _SHUTDOWN_SECONDS, lifespan='off')

  def stop(number, frame):
    # A second signal ends running replies too.
    server.force_exit, server.should_exit = server.should_exit, True

  with engine.open(), http.listen(host, port) as listener:
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, stop)
    print(f'http://{host}:{listener.getsockname()[1]}', flush=True)
    clients.wait(engine.start([server.serve([listener])])).result()
