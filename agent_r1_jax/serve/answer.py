"""Sends the replies to one request, in the dialect of that request."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
import contextlib
import dataclasses
import functools
import json
import time
from typing import Any

from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.serve import dialect as dialect_lib
from agent_r1_jax.serve import replies, sources
from agent_r1_jax.web import http

_SEND_SECONDS = 30.0  # To send a complete answer.
# More prompt log-probs than this, top tokens included, are written in a thread.
_MAX_LOGPROBS = 1 << 11


class Metrics:
  """The server's counters, in prometheus_client's registry."""

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

  def refuse(self, dialect: dialect_lib.Dialect, error: http.RefusedError) -> Any:
    """Makes and counts the answer to a rejected request."""
    self.answers.labels(error.status).inc()
    return http.answer_json(dialect.describe(error), error.status, error.headers)


@dataclasses.dataclass(eq=False)
class Answer:
  """Sends the replies to one request; stops if its client disconnects.

  Attributes:
    dialect: The format of the answer.
    head: What is known before the first token.
    source: Where the replies come from.
    generations: The replies, already submitted.
    chat: Decodes the replies.
    metrics: The server's counters.
    seconds: Time limit for the replies.
    began: When the request arrived, by time.perf_counter.
    on_end: Called once no reply is running any longer.
  """

  dialect: dialect_lib.Dialect
  head: dialect_lib.Head
  source: sources.ReplySource
  generations: Sequence[request_lib.Generation]
  chat: chat_lib.Chat
  metrics: Metrics
  seconds: float
  began: float
  on_end: Callable[[], None]

  def __post_init__(self):
    self._sampled, self._api_request = 0, self.head.asked.request
    asked = self._api_request
    # Whether the answer has the prompt's log-probs, and so many that writing takes long.
    self._echoes = asked.echo and asked.top_logprobs is not None
    count = self.head.prompt_tokens * asked.n * (1 + (asked.top_logprobs or 0))
    self._is_long = self._echoes and count > _MAX_LOGPROBS

  async def __call__(self, scope, receive, send):
    """Sends the answer; leaves no reply running."""
    send_answer = self._send_stream if self._api_request.stream else self._send_whole
    work = asyncio.ensure_future(send_answer(scope, receive, send))
    disconnected = asyncio.ensure_future(_wait_until_disconnected(receive))
    try:
      await asyncio.wait(
        [work, disconnected],
        timeout=self.seconds + _SEND_SECONDS,
        return_when=asyncio.FIRST_COMPLETED,
      )
      # `work` is cancelled if it times out while the client does not read.
      if work.done() and not work.cancelled():
        work.result()
      else:
        self.metrics.vanished.inc()
    finally:
      disconnected.cancel()
      work.cancel()
      self.source.cancel(self.generations)
      self.on_end()

  async def _follow(self) -> AsyncGenerator[dialect_lib.ReplyPart, None]:
    """Yields parts of the replies.

    All replies are sampled concurrently but yielded one after the other, so only the
    first is timed: the tokens of the others were ready before they were read.
    """
    metrics, prompt = self.metrics, []
    async with asyncio.timeout(self.seconds):
      for index, generation in enumerate(self.generations):
        choice = replies.PartialReply(index, generation, self._api_request, self.chat)
        first = 0.0
        async for chunk in generation:
          if not (first or index):
            first = time.perf_counter()
            metrics.first.observe(first - self.began)
          is_first, text = not choice.tokens, choice.add(chunk)
          logprobs = choice.write_logprobs(chunk)
          if self._echoes and is_first:
            if index % self._api_request.n == 0:  # The others share this prompt.
              options = generation, self.chat, self._api_request.tokens_as_ids
              prompt = await self._write(
                functools.partial(replies.write_prompt, *options)
              )
            logprobs = [*prompt, *(logprobs or ())]
          yield dialect_lib.ReplyPart(index, text, logprobs, None)
        more = len(choice.tokens) - 1
        if first and more > 0:
          metrics.each.observe((time.perf_counter() - first) / more)
        reply, rest = choice.finish()
        self._sampled += len(choice.tokens)
        # Before the client sees the reply and sends its next request.
        self.source.accept(generation, reply)
        yield dialect_lib.ReplyPart(index, rest, None, reply)
    metrics.tokens.labels('prompt').inc(self.head.prompt_tokens)
    metrics.tokens.labels('reply').inc(self._sampled)

  async def _write(self, fn: Callable[[], Any]) -> Any:
    """Runs a function that writes part of the answer, in a thread if it takes long."""
    return await http.run_in_thread(fn) if self._is_long else fn()

  async def _send_whole(self, scope, receive, send):
    parts, scored = [], []
    try:
      async with contextlib.aclosing(self._follow()) as follow:
        async for part in follow:
          scored += part.logprobs or []
          if part.reply:
            wanted = self._api_request.top_logprobs is not None
            whole = part._replace(text=part.reply.text)
            parts.append(whole._replace(logprobs=scored if wanted else None))
            scored = []
      write = lambda: self.dialect.write(self.head, parts, self._sampled)
      answer = await self._write(lambda: http.answer_json(write()))
      self.metrics.answers.labels(200).inc()
    except (TimeoutError, http.RefusedError) as error:
      answer = self.metrics.refuse(self.dialect, self._make_error(error))
    await answer(scope, receive, send)

  async def _send_stream(self, scope, receive, send):
    headers = [(b'content-type', b'text/event-stream'), (b'cache-control', b'no-cache')]
    await send({'type': 'http.response.start', 'status': 200, 'headers': headers})

    async def write(body: bytes, more: bool = True):
      if body:
        await send({'type': 'http.response.body', 'body': body, 'more_body': more})

    status, stream = 200, self.dialect.stream(self.head)
    try:
      await write(_encode(stream.begin))
      async with contextlib.aclosing(self._follow()) as follow:
        async for part in follow:
          if part.text or part.logprobs or part.reply:
            encode = functools.partial(_encode, stream.add, part)
            await write(await self._write(encode))
      end = _encode(stream.finish, self._sampled)
    except (TimeoutError, http.RefusedError) as caught:
      error = self._make_error(caught)
      status, end = error.status, _encode(stream.fail, error)
    self.metrics.answers.labels(status).inc()
    await write(end, more=False)

  def _make_error(self, error: Exception) -> http.RefusedError:
    if isinstance(error, http.RefusedError):
      return error
    return http.RefusedError(504, f'no reply within {self.seconds:g} seconds')


async def _wait_until_disconnected(receive):
  while (await receive())['type'] != 'http.disconnect':
    pass


def _encode(write: Callable[..., Sequence[dialect_lib.Event]], *args: Any) -> bytes:
  """Encodes the events that a stream writes, as server-sent events."""
  return b''.join(map(_encode_event, write(*args)))


def _encode_event(event: dialect_lib.Event) -> bytes:
  text = event.data if isinstance(event.data, str) else json.dumps(event.data)
  name = f'event: {event.name}\n' if event.name else ''
  return f'{name}data: {text}\n\n'.encode()
