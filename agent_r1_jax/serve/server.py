"""An OpenAI-compatible server over the one engine.

  POST /v1/chat/completions  tools, streams, log-probs, stop, seed, n, JSON schemas
  POST /v1/completions       text or tokens to go on from
  GET  /v1/models            the names of the policy and of its adapters
  GET  /health               200 while the engine's event loop runs
  GET  /metrics              counts and times in Prometheus's text format

An error is {"error": {"message", "type", "code"}}: 400 for what cannot be done, 401 for a
wrong key, 404 for an unknown adapter, 413 for a body that is too long, 429 with
Retry-After where too many replies are under way, 504 for a reply that took too long.

If the engine has adapters, a request's `model` names the policy or one of them. Else it
is ignored.

The handlers run in the engine's own event loop. A reply whose client has gone is
cancelled, and its row is free at the next decode.
"""

import asyncio
from collections.abc import Callable, Collection
import contextlib
import functools
import hmac
import json
import signal
import time
from typing import Any

from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import event_loop
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.serve import replies, request_grammars, sources
from agent_r1_jax.web import http

_MAX_BODY = 1 << 22  # Bytes of a request.
_SEND_SECONDS = 30.0  # For an answer that is complete.
_SHUTDOWN_SECONDS = 30  # What SIGTERM leaves to replies that have begun.


class _Metrics:
  def __init__(self):
    import prometheus_client as prometheus

    self.registry = prometheus.CollectorRegistry()
    options: dict[str, Any] = {'registry': self.registry}
    self.answers = prometheus.Counter(
      'endpoint_answers', 'Answers by HTTP status.', ['status'], **options
    )
    self.vanished = prometheus.Counter(
      'endpoint_vanished', 'Requests whose client did not wait for the answer.', **options
    )
    self.tokens = prometheus.Counter(
      'endpoint_tokens', 'Tokens by kind: prompt or reply.', ['kind'], **options
    )
    self.replies = prometheus.Gauge(
      'endpoint_replies', 'Replies that wait or are sampled.', **options
    )
    seconds = {'buckets': [0.001 * 2**i for i in range(18)], **options}
    self.first = prometheus.Histogram(
      'endpoint_first_token_seconds',
      'Seconds from request to first token of choice 0.',
      **seconds,
    )
    self.each = prometheus.Histogram(
      'endpoint_token_seconds', 'Seconds of each further token of choice 0.', **seconds
    )


class Server:
  """The handlers of requests, for whoever `find` says that a client is.

  Attributes:
    find: (episode or None, key) -> the source of a client's replies; raises
      RefusedError.
    chat: Encodes messages with the policy's tokenizer.
    name: The policy's name.
    seconds: The most seconds of a reply.
    metrics: What is counted.
    count: The replies that are under way.
  """

  def __init__(
    self,
    find: Callable[[str | None, str], sources.Source],
    chat: chat_lib.Chat,
    vocab_size: int,
    *,
    name: str,
    max_replies: float,
    seconds: float,
    restrict: bool = True,
  ):
    """Makes the handlers.

    Args:
      find: See the class.
      chat: Encodes messages with the policy's tokenizer.
      vocab_size: Tokens of the policy.
      name: The policy's name.
      max_replies: How many replies may wait or be sampled; further ones get 429.
      seconds: The most seconds of a reply.
      restrict: Whether schemas and required calls restrict replies.
    """
    self.find, self.metrics, self.count = find, _Metrics(), 0
    self.chat, self.name, self.seconds = chat, name, seconds
    self._max_replies, self._restrict = max_replies, restrict
    self._grammars = request_grammars.Grammars(chat, vocab_size)

  async def answer(self, form: replies.Form, request: Any) -> Any:
    """Begins the replies to one request; returns what sends them."""
    began = time.perf_counter()
    try:
      source = self.find_source(request)
      fields = await http.read_json(request, _MAX_BODY)
      sources.check_count(source, fields.get('messages'))
      api_request = http.check_fields(form.model, fields)
      automata = await self._grammars.make(api_request, self._restrict)
      generations = await self._submit(source, api_request, automata)
    except http.RefusedError as error:
      return self.refuse(error)
    except ValueError as error:  # The chat or the engine cannot do it.
      return self.refuse(http.RefusedError(400, str(error)))
    return _Answer(self, form, api_request, source, generations, began)

  async def _submit(self, source, api_request, automata) -> list[request_lib.Generation]:
    """Begins replies, which count from now on: their texts may have to be encoded."""
    if self.count + api_request.n > self._max_replies:
      text = f'{self.count} replies are under way; ask again later'
      raise http.RefusedError(429, text, 'overloaded')
    self.count_replies(api_request.n)
    try:
      return await source.submit(api_request, automata)
    except BaseException:
      self.count_replies(-api_request.n)
      raise

  def find_source(self, request: Any) -> sources.Source:
    """Finds the source of the client that asks."""
    scheme, _, key = request.headers.get('Authorization', '').partition(' ')
    key = key.strip() if scheme.lower() == 'bearer' else ''
    return self.find(request.path_params.get('episode'), key)

  def refuse(self, error: http.RefusedError) -> Any:
    """Makes the answer to a request that is refused."""
    self.metrics.answers.labels(error.status).inc()
    return http.answer_json(_describe(error), error.status, error.headers)

  def count_replies(self, more: int):
    """Counts replies that begin, or that have ended."""
    self.count += more
    self.metrics.replies.set(self.count)

  def make_routes(self, prefix: str = '') -> list[Any]:
    """Makes the routes under a prefix."""
    from starlette import routing

    async def models(request):
      try:
        names = self.name, *self.find_source(request).adapters
      except http.RefusedError as error:
        return self.refuse(error)
      model = {'object': 'model', 'created': 0, 'owned_by': 'policy'}
      models = [{'id': name, **model} for name in names]
      return http.answer_json({'object': 'list', 'data': models})

    def post(path, form):
      endpoint = functools.partial(self.answer, form)
      return routing.Route(prefix + path, endpoint, methods=['POST'])

    return [
      post('/v1/chat/completions', replies.CHAT),
      post('/v1/completions', replies.TEXT),
      routing.Route(prefix + '/v1/models', models),
    ]


class _Answer:
  """Sends the replies to one request, unless its client goes before that."""

  def __init__(self, server: Server, form, api_request, source, generations, began):
    self._server, self._form = server, form
    self._api_request, self._source = api_request, source
    self._generations, self._began = generations, began
    name = generations[0].request.adapter or server.name
    self._frame = functools.partial(form.frame, name, f'reply-{next(replies.numbers)}')
    self._prompt = len(generations[0].text)
    self._sampled = 0

  async def __call__(self, scope, receive, send):
    """Sends the answer; in the end no reply is left under way."""
    send_answer = self._send_stream if self._api_request.stream else self._send_whole
    work = asyncio.ensure_future(send_answer(scope, receive, send))
    disconnected = asyncio.ensure_future(_wait_until_disconnected(receive))
    try:
      await asyncio.wait(
        [work, disconnected],
        timeout=self._server.seconds + _SEND_SECONDS,
        return_when=asyncio.FIRST_COMPLETED,
      )
      # It is cancelled where its time is up and the client does not read.
      if work.done() and not work.cancelled():
        work.result()
      else:
        self._server.metrics.vanished.inc()
    finally:
      disconnected.cancel()
      work.cancel()
      for generation in self._generations:
        generation.cancel()
        self._source.close(generation)
      self._server.count_replies(-len(self._generations))

  async def _follow(self):
    """Yields (choice, further text, its log-probs, None); in the end the reply, not None.

    All replies are sampled at the same time; they are yielded one after the other. So
    only the first is timed: tokens of the others are here late.
    """
    server, metrics = self._server, self._server.metrics
    async with asyncio.timeout(server.seconds):
      for index, generation in enumerate(self._generations):
        choice = replies.Choice(index, generation, self._api_request, server.chat)
        first = 0.0
        async for chunk in generation:
          if not (first or index):
            first = time.perf_counter()
            metrics.first.observe(first - self._began)
          logprobs = None
          if self._api_request.top_logprobs is not None:
            logprobs = replies.write_logprobs(chunk, server.chat)
          yield choice, choice.add(chunk), logprobs, None
        more = len(choice.tokens) - 1
        if first and more > 0:
          metrics.each.observe((time.perf_counter() - first) / more)
        self._sampled += len(choice.tokens)
        reply, rest = choice.finish()
        # Before the client hears of it, and asks for more.
        self._source.accept(generation, reply)
        yield choice, rest, None, reply
    metrics.tokens.labels('prompt').inc(self._prompt)
    metrics.tokens.labels('reply').inc(self._sampled)

  async def _send_whole(self, scope, receive, send):
    choices, scored = [], []
    try:
      async with contextlib.aclosing(self._follow()) as parts:
        async for choice, _, logprobs, reply in parts:
          scored += logprobs or []
          if reply:
            logprobs = scored if self._api_request.top_logprobs is not None else None
            written = self._form.choice(reply.text, reply.calls, logprobs)
            reason = {'finish_reason': reply.reason}
            choices.append({'index': choice.index, **written, **reason})
            scored = []
    except TimeoutError:
      answer = self._server.refuse(self._make_late_error())
    else:
      self._server.metrics.answers.labels(200).inc()
      answer = http.answer_json(self._frame(choices, usage=self._count_usage()))
    await answer(scope, receive, send)

  async def _send_stream(self, scope, receive, send):
    headers = [(b'content-type', b'text/event-stream'), (b'cache-control', b'no-cache')]
    await send({'type': 'http.response.start', 'status': 200, 'headers': headers})

    async def event(content: Any, more: bool = True):
      text = content if isinstance(content, str) else json.dumps(content)
      body = f'data: {text}\n\n'.encode()
      await send({'type': 'http.response.body', 'body': body, 'more_body': more})

    status = 200
    try:
      async with contextlib.aclosing(self._follow()) as parts:
        async for choice, text, logprobs, reply in parts:
          if text or logprobs or reply:
            part = self._form.delta(text, reply.calls if reply else (), logprobs)
            reason = {'finish_reason': reply.reason if reply else None}
            part = {'index': choice.index, **part, **reason}
            await event(self._frame([part], part=True))
      if self._api_request.usage:
        await event(self._frame([], part=True, usage=self._count_usage()))
    except TimeoutError:
      error = self._make_late_error()
      status = error.status
      await event(_describe(error))
    self._server.metrics.answers.labels(status).inc()
    await event('[DONE]', more=False)

  def _make_late_error(self) -> http.RefusedError:
    return http.RefusedError(504, f'no reply within {self._server.seconds:g} seconds')

  def _count_usage(self) -> dict[str, int]:
    prompt, reply = self._prompt, self._sampled
    total = {'total_tokens': prompt + reply}
    return {'prompt_tokens': prompt, 'completion_tokens': reply} | total


async def _wait_until_disconnected(receive):
  while (await receive())['type'] != 'http.disconnect':
    pass


def _describe(error: http.RefusedError) -> dict[str, Any]:
  kind = 'server_error' if error.status >= 500 else 'invalid_request_error'
  return {'error': {'message': str(error), 'type': kind, 'code': error.code}}


def read_keys(text: str) -> list[str]:
  """Reads keys that are separated by commas; an empty text has none.

  Raises:
    ValueError: The text is not empty and has none: a server would ask for no key.
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
) -> Any:
  """Makes an ASGI application that serves a policy; it runs in the engine's event loop.

  Args:
    engine: The engine, with the policy's weights.
    chat: Encodes messages with the policy's tokenizer.
    name: What clients call the policy.
    keys: The keys of which a client must have one; none asks for none.
    max_waiting: How many replies may wait for a row; further ones get 429.
    seconds: The most seconds of a reply.
  """
  from starlette import applications, routing

  free = sources.StatelessSource(engine, chat, name)

  def find(episode: str | None, key: str) -> sources.Source:
    # Every key is compared in full, so that the time tells nothing.
    if keys and not sum(hmac.compare_digest(key.encode(), k.encode()) for k in keys):
      text = 'the API key is wrong; send it as Authorization: Bearer KEY'
      raise http.RefusedError(401, text, 'invalid_api_key')
    return free

  server = Server(
    find,
    chat,
    engine.config.vocab_size,
    name=name,
    max_replies=engine.sizes.rows * len(engine.replicas) + max_waiting,
    seconds=seconds,
  )

  async def health(request):
    return http.answer_json({'status': 'ok', 'replies': server.count})

  return applications.Starlette(
    routes=[
      *server.make_routes(),
      routing.Route('/health', health),
      routing.Route('/metrics', http.show_metrics(server.metrics.registry)),
    ]
  )


def serve(engine: engine_lib.Engine, app: Any, host: str = '127.0.0.1', port: int = 8000):
  """Serves until SIGTERM or SIGINT, and prints the address once it accepts requests.

  Replies under way then have _SHUTDOWN_SECONDS to end.

  Args:
    engine: The engine that `app` was made with.
    app: The application of `make_app`.
    host: The address to listen at; 0.0.0.0 is reached from other machines.
    port: 0 takes a free one.
  """
  server = http.make_server(app, _SHUTDOWN_SECONDS, lifespan='off')

  def stop(number, frame):
    # A second signal ends the replies, too.
    server.force_exit, server.should_exit = server.should_exit, True

  with engine.open(), http.listen(host, port) as listener:
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, stop)
    print(f'http://{host}:{listener.getsockname()[1]}', flush=True)
    event_loop.wait(engine.start([server.serve([listener])])).result()
