"""One server that samples replies, over HTTP."""

import asyncio
from collections.abc import Collection
import functools
import itertools
import json
from typing import Any, NamedTuple

import numpy as np

from agent_r1_jax import types
from agent_r1_jax.contrib.external import dialects
from agent_r1_jax.engine import protocol
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.web import bounded_http

# How often `serve` checks for a signal to end.
_POLL_SECONDS = 0.5
# Maximum seconds between two attempts of a call, and maximum bytes of an answer.
_MAX_WAIT, _MAX_ANSWER = 5.0, 1 << 28


class LostServerError(ConnectionError):
  """No server answered in time; the text names one and the reason."""


class _TransientError(Exception):
  """A temporary failure of a server."""


class Sizes(NamedTuple):
  """Sequences that clients may keep open at once, per server; tokens of a sequence."""

  rows: int
  slots: int
  drafts: int = 0


class Options(NamedTuple):
  """The settings that all servers share; see http_engine.connect."""

  dialect: dialects.Dialect
  model: str
  seconds: float
  patience: float


class Server(protocol.AnyReplica):
  """One server, and the replies requested from it.

  Attributes:
    url: Its address.
    step: The policy_step of its policy.
    others: All servers; if one fails, another takes over its replies.
    stale: Whether its weights are older than those last synced.
  """

  def __init__(self, url: str, config, sizes: Sizes, stats, options: Options):
    """Sends nothing yet."""
    self.url, self.config, self.sizes = url, config, sizes
    self.step, self.stale, self.others = 0, False, [self]
    self._stats, self._options = stats, options
    self._numbers = itertools.count()
    self._under_way: dict[request_lib.Generation, asyncio.Task] = {}

  def start(self):
    """Opens the connections; call this in the event loop that will run `serve`."""
    import httpx2

    super().start()
    # One connection per reply, ignoring the environment's proxies.
    limits = httpx2.Limits(max_connections=None)
    self._client = httpx2.AsyncClient(limits=limits, trust_env=False)

  async def serve(self):
    """Waits; the replies have tasks of their own."""
    try:
      while not self.interrupted():
        await asyncio.sleep(_POLL_SECONDS)
        if self._reservations.count and not self._under_way:
          self._stats.idle_seconds += _POLL_SECONDS
      raise protocol.PreemptedError
    finally:
      await self._client.aclose()

  def stop(self):
    """Cancels all replies."""
    for generation in [*self._under_way]:
      generation.cancel()

  @property
  def load(self) -> int:
    """The number of replies in progress."""
    return len(self._under_way)

  def stop_sharing(self):
    """Does nothing: servers drop their prefix caches when they load weights."""

  def submit(self, request):
    """Requests a reply; see AnyReplica.submit."""
    self._refuse(request)
    sequence = self._extend_sequence(request)

    def cancel():
      self._under_way.pop(generation).cancel()

    number = next(self._numbers)
    generation = request_lib.Generation(request, sequence, number, cancel)
    self._under_way[generation] = asyncio.create_task(self._answer(generation))
    return generation

  def _refuse(self, request: request_lib.Request):
    """Raises ValueError for an unsupported request."""
    sizes = {'vocab_size': self.config.vocab_size, 'slots': self.sizes.slots}
    request_lib.check(request, **sizes, guides=())
    wrong = {
      'an adapter': request.adapter,
      'the likeliest tokens': request.top_logprobs,
      'log-probs of the prompt': request.score_prompt,
      'replay': request.replay and self.config.num_experts,
      'a grammar': any(automaton.restricts for automaton in request.automata),
      'a sequence that is being sampled': any(
        g.sequence is request.parent for g in self._under_way
      ),
    }
    if names := [name for name, value in wrong.items() if value]:
      raise ValueError(f'An external engine cannot do {", ".join(names)}.')

  async def _answer(self, generation: request_lib.Generation):
    """Asks until the reply is complete: a server may end one at a token of its own."""
    request, sequence = generation.request, generation.sequence
    states = [0] * len(request.automata)
    stop_ids = sorted({i for a in request.automata for i in _list_stop_ids(a)})
    step = request.policy.step if request.policy else self.step
    try:
      while not generation.done:
        key = request_lib.make_key(*request.key.tolist(), len(sequence))
        ask = dialects.Ask(
          sequence.tokens.tolist(),
          generation.remaining,
          request.sampling,
          int.from_bytes(key.tobytes(), 'little') >> 1,
          stop_ids,
          self._options.model,
        )
        tokens, logprobs = await self._ask(ask)
        chunk = _make_chunk(tokens, logprobs, step, request.automata, states)
        sequence.append(chunk.tokens)
        self._stats.sampled += len(chunk.tokens)
        self._stats.calls += len(chunk.tokens)
        generation.add(chunk)
    except Exception as error:
      generation.fail(error)
    finally:
      self._under_way.pop(generation, None)

  async def _ask(self, ask: dialects.Ask) -> tuple[list[int], list[float]]:
    """Asks this server, and after a failure the next, until `patience` ends."""
    import tenacity

    fresh = [server for server in self.others if not server.stale]
    first = fresh.index(self) if self in fresh else 0
    turns = itertools.cycle([*fresh[first:], *fresh[:first]])

    async def ask_next():
      return await next(turns)._ask_once(ask)

    attempts = tenacity.AsyncRetrying(
      retry=tenacity.retry_if_exception_type(_TransientError),
      wait=tenacity.wait_random_exponential(0.1, _MAX_WAIT),
      stop=tenacity.stop_after_delay(self._options.patience),
    )
    try:
      return await attempts(ask_next)
    except tenacity.RetryError as error:
      last = error.last_attempt.exception()
      seconds = self._options.patience
      raise LostServerError(f'no reply within {seconds:g} seconds: {last}') from last

  async def _ask_once(self, ask: dialects.Ask) -> tuple[list[int], list[float]]:
    path, fields = self._options.dialect.write(ask)
    import httpx2

    try:
      async with asyncio.timeout(self._options.seconds):
        response = await self._client.post(self.url + path, json=fields, timeout=None)
    except (TimeoutError, httpx2.TransportError) as error:
      raise _TransientError(f'{self.url}{path}: {error!r}') from error
    answer = self._parse(path, response.status_code, response.content)
    try:
      tokens, logprobs = self._options.dialect.read(answer)
    except dialects.BadAnswerError as error:
      raise dialects.BadAnswerError(f'{self.url}{path}: {error}') from error
    if len(tokens) > ask.max_tokens or max(tokens) >= self.config.vocab_size:
      raise dialects.BadAnswerError(
        f'{self.url}{path}: {len(tokens)} tokens of {ask.max_tokens}, the highest '
        f'{max(tokens)} of {self.config.vocab_size}'
      )
    return tokens, logprobs

  def _parse(self, path: str, status: int, body: bytes) -> Any:
    """Parses an answer; raises for any status except 200."""
    if status == 200:
      # vLLM answers some calls with an empty body.
      return json.loads(body) if body else {}
    text = f'{self.url}{path}: status {status}: {body[:200].decode(errors="replace")}'
    if status in (408, 429) or status >= 500:
      raise _TransientError(text)
    raise dialects.BadAnswerError(text)

  def update(self, directory: str) -> str:
    """Makes the server load the weights; returns the error, or '' on success.

    Called in a thread, between rollouts.
    """
    import httpx2
    import tenacity

    # A server that was lost gets one attempt, so that it delays nobody twice.
    patience = 0.0 if self.stale else self._options.patience
    attempts = tenacity.Retrying(
      retry=tenacity.retry_if_exception_type(_TransientError),
      wait=tenacity.wait_random_exponential(0.1, _MAX_WAIT),
      stop=tenacity.stop_after_delay(patience),
      reraise=True,
    )
    self.stale = True
    try:
      with httpx2.Client(trust_env=False) as client:
        for path, fields in self._options.dialect.update(directory):
          attempts(self._post, client, path, fields)
    except (_TransientError, dialects.BadAnswerError) as error:
      return str(error)
    self.stale = False
    return ''

  def _post(self, client: Any, path: str, fields: dict[str, Any]):
    import httpx2

    try:
      status, _, body = bounded_http.post(
        client,
        self.url + path,
        fields,
        seconds=self._options.seconds,
        max_bytes=_MAX_ANSWER,
      )
    except (TimeoutError, httpx2.HTTPError) as error:
      raise _TransientError(f'{self.url}{path}: {error!r}') from error
    self._options.dialect.check_update(self._parse(path, status, body))


@functools.lru_cache(maxsize=64)
def _list_stop_ids(automaton: types.Automaton) -> list[int]:
  """Lists the tokens that end a reply at once, whatever precedes them."""
  ends_QC = automaton.ends[automaton.table[~automaton.ends]]
  ends_C = np.all(ends_QC, axis=0)
  return np.flatnonzero(ends_C[automaton.classes]).tolist()


def _make_chunk(
  tokens: list[int],
  logprobs: list[float],
  step: int,
  automata: Collection[types.Automaton],
  states: list[int],
) -> request_lib.Chunk:
  """Makes a chunk, cut where an automaton ends the reply; updates `states`."""
  stopped, n = False, 0
  while n < len(tokens) and not stopped:
    for i, automaton in enumerate(automata):
      states[i] = int(automaton.table[states[i], automaton.classes[tokens[n]]])
      stopped |= bool(automaton.ends[states[i]])
    n += 1
  x = np.array(logprobs[:n], np.float32)
  return request_lib.Chunk(
    tokens=np.array(tokens[:n], np.int32),
    logprobs=x,
    policy_steps=np.full(n, step, np.int32),
    stopped=stopped,
    top_tokens=np.zeros((n, 0), np.int32),
    top_logprobs=np.zeros((n, 0), np.float32),
    values=np.zeros(n, np.float32),
    behaviour_logprobs=x,
  )
