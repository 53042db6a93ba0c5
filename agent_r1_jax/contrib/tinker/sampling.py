"""Sampling sessions: the weights that each one samples from, and the replies.

The engine has room for a few adapters (Engine.adapters), and there may be more sampling
sessions: a session's weights are loaded into the engine on demand, and replace the least
recently used.
"""

import asyncio
import collections
from collections.abc import Awaitable, Sequence
import dataclasses
import secrets
from typing import Any

import numpy as np

from agent_r1_jax import config as config_lib
from agent_r1_jax import types
from agent_r1_jax.agent import automata
from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.contrib.tinker import data as data_lib
from agent_r1_jax.contrib.tinker import learning, messages, training, wire
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.engine import request as request_lib
from agent_r1_jax.models import decoder
from agent_r1_jax.web import fairness, http

# Maximum unnamed snapshots of one client process, and maximum sessions in total.
_MOST_SNAPSHOTS, _MOST_SESSIONS = 16, 4096


@dataclasses.dataclass
class Sampler:
  """A sampling session.

  Attributes:
    session: The session of the client's process.
    name: The engine's name for its weights, never reused.
    path: The path of the saved weights, if they are saved.
    adapter: A snapshot's weights, at the server's rank.
    replies: The number of replies in progress.
  """

  session: str
  name: str
  path: str | None = None
  adapter: decoder.Params | None = None
  replies: int = 0


class Samplers:
  """The sampling sessions of all clients, by id.

  Attributes:
    by_id: The sessions, least recently used first.
    slots: The maximum number of tokens of a prompt and its reply.
  """

  def __init__(
    self,
    engine: engine_lib.Engine,
    chat: chat_lib.Chat,
    trainings: training.Trainings,
    *,
    max_waiting: int = 256,
    seconds: float = 600.0,
  ):
    """Makes no session.

    Args:
      engine: Samples; has the base's weights, and room for adapters of the learner's
        rank. Everything here runs in its event loop.
      chat: Knows the stop tokens and the bytes of the tokens.
      trainings: Has the sessions, the saved states, the scoring thread and the results.
      max_waiting: How many replies may wait for a row; further ones get HTTP 429.
      seconds: Time limit of a request.
    """
    self.by_id: collections.OrderedDict[str, Sampler] = collections.OrderedDict()
    self.slots = engine.sizes.slots
    self._engine, self._chat, self._trainings = engine, chat, trainings
    self._most_replies = engine.sizes.rows * len(engine.replicas) + max_waiting
    self._seconds, self._replies = seconds, fairness.Shares()
    self._setting = asyncio.Lock()  # Held while weights are loaded into the engine.

  def create(self, request: wire.CreateSamplingSession) -> dict[str, Any]:
    """Begins a session with saved weights, or with the base's."""
    trainings = self._trainings
    trainings.hear(request.session_id)
    trainings.check_base(request.base_model)
    sampler_id = f'{request.session_id}:sample:{request.sampling_session_seq_id}'
    if request.model_path is not None:
      trainings.check_state(request.model_path)
    elif request.base_model is None:
      raise http.RefusedError(400, 'give base_model or model_path')
    old = self.by_id.get(sampler_id)
    if not old or (old.path, old.adapter) != (request.model_path, None):
      self._add(sampler_id, request.session_id, path=request.model_path)
    return {'sampling_session_id': sampler_id, 'type': 'create_sampling_session'}

  def save(self, request: wire.SaveForSampler) -> dict[str, Any]:
    """Saves a run's weights under a name, or begins a session with a snapshot of them."""
    if request.path is not None:
      return self._trainings.save(request)
    loop = asyncio.get_running_loop()
    session = self._trainings.find(request.model_id).session
    sampler_id = f'{session}:sample:{request.sampling_session_seq_id}'

    def compute(run: learning.TrainingRun) -> dict[str, Any]:
      adapter = self._trainings.learning.get_adapter(run)
      loop.call_soon_threadsafe(self._keep, session, sampler_id, adapter)
      return {'type': 'save_weights_for_sampler', 'sampling_session_id': sampler_id}

    return self._trainings.begin(request, compute)

  def _keep(self, session: str, sampler_id: str, adapter: decoder.Params):
    """Stores a snapshot; clients that have a run keep their newest snapshots."""
    self._add(sampler_id, session, adapter=adapter)
    live = {training.session for training in self._trainings.by_id.values()}
    snapshots = [(k, s) for k, s in self.by_id.items() if s.adapter]
    own = [k for k, s in snapshots if s.session == session][:-_MOST_SNAPSHOTS]
    for old, sampler in snapshots:
      if (old in own or sampler.session not in live) and not sampler.replies:
        del self.by_id[old]

  def describe(self, sampler_id: str) -> dict[str, Any]:
    """Describes a session as the client reads it."""
    path, base = self.find(sampler_id).path, self._trainings.states.base
    return {'sampler_id': sampler_id, 'base_model': base, 'model_path': path}

  def _add(self, sampler_id: str, session: str, **weights: Any):
    """Begins a session, replacing an earlier one with the same id."""
    self.by_id[sampler_id] = Sampler(session, secrets.token_hex(8), **weights)
    self.by_id.move_to_end(sampler_id)
    while len(self.by_id) > _MOST_SESSIONS:
      self.by_id.popitem(last=False)

  def find(self, sampler_id: str) -> Sampler:
    """Finds a session, and marks it as the most recently used."""
    if sampler_id not in self.by_id:
      text = (
        f'there is no sampling session {sampler_id!r:.120}: the server was restarted, '
        f'or the client has made {_MOST_SNAPSHOTS} newer ones; '
        'save_weights_for_sampler(name) keeps weights'
      )
      raise http.RefusedError(404, text)
    self.by_id.move_to_end(sampler_id)
    return self.by_id[sampler_id]

  def sample(self, request: wire.Sample) -> dict[str, Any]:
    """Begins replies to a prompt."""
    sampler, count = self.find(request.sampling_session_id), request.num_samples
    request_id = f'{request.sampling_session_id}:{request.seq_id}'
    start = lambda: self._start(request, sampler)
    if task := self._trainings.results.begin(request_id, request, start):
      task.add_done_callback(lambda _: self._end(sampler, count))
    names = [f'{request_id}:{i}' for i in range(count)]
    return {'request_id': request_id, 'sample_sequence_ids': names}

  def _start(self, request: wire.Sample, sampler: Sampler) -> Awaitable[bytes]:
    """Checks a request, and counts its replies."""
    params, count = request.sampling_params, request.num_samples
    if count > self._most_replies:
      text = f'num_samples is {count}, and at most {self._most_replies}'
      raise http.RefusedError(400, f'{text} replies may be under way at a time')
    prompt, max_tokens = self._read_prompt(request)
    stops = self._make_stops(params.stop)
    targets = self._make_targets(request, prompt)
    one = request_lib.Request(
      prompt,
      max_tokens=max_tokens,
      sampling=config_lib.Sampling(
        params.temperature, max(params.top_k, 0), params.top_p
      ),
      automata=stops,
      top_logprobs=request.topk_sample_logprobs,
      client=sampler.session,
    )
    size = self._engine.config.vocab_size
    request_lib.check(one, vocab_size=size, slots=self.slots, guides=())
    self._replies.take(sampler.session, count, self._most_replies)
    sampler.replies += count
    return self._work(request, sampler, one, targets)

  def cancel(self, request: wire.RetrieveFuture) -> dict[str, Any]:
    """Ends a request that its client has given up; ignores unknown ones."""
    if request.request_id.rpartition(':')[0] in self.by_id:
      self._trainings.results.cancel(request.request_id)
    return {}

  def _end(self, sampler: Sampler, count: int):
    self._replies.give(sampler.session, count)
    sampler.replies -= count

  def _read_prompt(self, request: wire.Sample) -> tuple[np.ndarray, int]:
    """Returns the prompt and the maximum number of tokens in a reply."""
    tokens = [token for chunk in request.prompt.chunks for token in chunk.tokens]
    room = self.slots - len(tokens)
    most = request.sampling_params.max_tokens
    most = room if most is None else most
    if not tokens or room < 1 or most > room:
      text = f'the prompt has {len(tokens)} tokens, and a reply may have {max(most, 1)}'
      raise http.RefusedError(400, f'{text}; there is room for 1 to {self.slots} in all')
    self._check_tokens(tokens)
    return np.array(tokens, np.int32), most

  def _check_tokens(self, tokens: Sequence[int], where: str = ''):
    size = self._engine.config.vocab_size
    if outside := [token for token in tokens if not 0 <= token < size]:
      text = f'{where}token {outside[0]} is outside the vocabulary of {size}'
      raise http.RefusedError(400, text)

  def _make_stops(self, stop: str | Sequence[Any] | None) -> list[types.Automaton]:
    """Makes the stop automata: they include the model's own, unless `stop` is []."""
    size = self._engine.config.vocab_size
    if stop == []:
      return []
    stop = [stop] if isinstance(stop, str) else stop or []
    strings = [x for x in stop if isinstance(x, str)]
    ids = [x for x in stop if not isinstance(x, str)]
    if len(ids) > 1024:
      raise http.RefusedError(400, f'stop has {len(ids)} tokens, and 1024 are allowed')
    self._check_tokens(ids, 'stop: ')
    if not strings:
      return [automata.stop([*self._chat.stop_ids, *ids], size)]
    found, _, strings, pieces = self._chat.find_stops(size, strings)
    return [automata.stop([*found, *ids], size, strings, pieces)]

  def _make_targets(
    self, request: wire.Sample, prompt: np.ndarray
  ) -> data_lib.Datum | None:
    """Makes a datum that scores other tokens than the prompt's own, if any are given."""
    last = request.prompt_logprobs_last_n
    if len(prompt) < 2 and (request.prompt_logprobs or request.target_prompt_logprobs):
      raise http.RefusedError(400, 'a prompt of one token has no log-probs')
    if last is not None and (not request.prompt_logprobs or last >= len(prompt)):
      text = 'prompt_logprobs_last_n needs prompt_logprobs, and 1 to len(prompt) - 1'
      raise http.RefusedError(400, text)
    if (sent := request.target_prompt_logprobs) is None:
      return None
    csr = None
    if sent.sparse_crow_indices is not None:
      indices = sent.sparse_crow_indices, sent.sparse_col_indices or []
      csr = [np.array(x, np.int64) for x in indices]
    values, name = np.array(sent.data, np.int64), 'target_prompt_logprobs'
    column = data_lib.make_column(values, sent.shape, name, csr)
    column = np.ma.masked_equal(column, -1)
    datum = data_lib.make_datum(prompt[:-1], {'target_tokens': column})
    size = self._engine.config.vocab_size
    data_lib.check([datum], size, self._trainings.learning.shape.row_tokens)
    return datum

  async def _work(
    self,
    request: wire.Sample,
    sampler: Sampler,
    one: request_lib.Request,
    targets: data_lib.Datum | None,
  ) -> bytes:
    """Samples and scores; returns the message.

    Args:
      request: The client's request.
      sampler: Its session.
      one: A request to the engine, without weights and random key.
      targets: Tokens to score.
    """
    seed = request.sampling_params.seed
    seed = secrets.token_hex(8) if seed is None else seed
    keys = [request_lib.make_key('tinker', seed, i) for i in range(request.num_samples)]
    try:
      async with asyncio.timeout(self._seconds):
        one = dataclasses.replace(one, adapter=await self._give_weights(sampler))
        requests = [dataclasses.replace(one, key=key) for key in keys]
        if request.prompt_logprobs:
          # At temperature 1, as in `forward`.
          rest = {'automata': (), 'top_logprobs': 0, 'sampling': config_lib.GREEDY}
          scored = dataclasses.replace(one, max_tokens=1, score_prompt=True, **rest)
          requests.append(scored)
        generations = await self._sample(requests)
        named = await self._score(sampler, targets) if targets else None
    except TimeoutError:
      raise http.RefusedError(504, f'no reply within {self._seconds:g} seconds') from None
    own = None
    if request.prompt_logprobs:
      own = generations.pop().prompt.logprobs.copy()
      own[: len(own) - (request.prompt_logprobs_last_n or len(own))] = np.nan
    replies = [request_lib.join(generation.chunks) for generation in generations]
    return messages.write_samples(replies, own, named)

  async def _sample(self, requests: Sequence[request_lib.Request]) -> list[Any]:
    """Returns the complete generations."""
    generations = [self._engine.submit(request) for request in requests]
    try:
      for generation in generations:
        await generation
    finally:
      for generation in generations:
        generation.cancel()
        generation.sequence.close()
    return generations

  async def _score(self, sampler: Sampler, targets: data_lib.Datum) -> np.ndarray:
    """Computes the log-probs of targets, in the turn of the client's process."""
    score = self._trainings.learning.score
    loss = self._trainings.losses.find('cross_entropy', {})
    compute = lambda: score(self._get_weights(sampler), [targets], loss)
    result = await self._trainings.worker.run(sampler.session, compute)
    return result.logprobs[0]

  async def _give_weights(self, sampler: Sampler) -> str | None:
    """Loads a session's weights into the engine; returns the adapter's name."""
    if sampler.path is None and sampler.adapter is None:
      return None
    table, name = self._engine.adapters, sampler.name
    if name in table.names:  # Need not queue for a slot.
      return name
    async with self._setting:
      if name not in table.names:
        weights = await asyncio.to_thread(self._get_weights, sampler)
        await self._free_slot()
        setting = asyncio.ensure_future(
          asyncio.to_thread(self._engine.adapters.set, name, weights)
        )
        try:
          await asyncio.shield(setting)
        finally:  # If cancelled, keep the lock until the thread is done.
          await asyncio.wait([setting])
    return name

  def _get_weights(self, sampler: Sampler) -> decoder.Params:
    """Returns a session's weights; loads saved weights."""
    learner = self._trainings.learning
    if sampler.path is None:
      return sampler.adapter or learner.no_adapter
    _, adapter, _ = self._trainings.states.load(sampler.path, optimizer=False)
    return learner.pad(adapter)

  async def _free_slot(self):
    """Evicts weights from the engine if no slot is free, and waits for a slot.

    Unused weights are evicted before used ones, then weights without a session, then the
    least recently used. Running requests continue, and free the slot when they end; new
    ones queue behind this one.
    """
    table = self._engine.adapters
    if not table.free and table.names:
      ages = {sampler.name: age for age, sampler in enumerate(self.by_id.values(), 1)}
      unused = table.unused
      first = min(table.names, key=lambda x: (x not in unused, ages.get(x, 0)))
      self._engine.adapters.remove(first)
    while not table.free:
      await asyncio.sleep(0.05)  # Until the request times out.
