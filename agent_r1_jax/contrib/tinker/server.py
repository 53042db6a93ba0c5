"""A server of the Tinker API: clients train adapters of one model, and sample from them.

The client is `tinker`, a package of its own; docs/tinker.md has a script. A request to
compute gets the id of a result at once, and /api/v1/retrieve_future waits for it.

An error is {"error": TEXT, "category": "user" or "server"}: 400 for what cannot be done,
401 for a wrong key, 404 for what is not there, 410 for a session that has ended, 413 for
a body that is too long, 429 where too much waits already, 503 where the device is lost.
What fails while it is computed is such an object with the status 200, as the client wants
it.

The handlers run in the engine's own event loop, and one thread computes (work.py).
"""

import asyncio
from collections.abc import Callable, Collection
import functools
from typing import Any

from agent_r1_jax.agent import chat as chat_lib
from agent_r1_jax.contrib.tinker import (
  catalog,
  learning,
  messages,
  sampling,
  states,
  training,
  wire,
  work,
)
from agent_r1_jax.engine import engine as engine_lib
from agent_r1_jax.web import http

# Bytes of a request with data, and of one in JSON.
_MAX_BODY, _MAX_JSON = 1 << 23, 1 << 22
_API = '/api/v1'
# What the client asks at its start: how it shall speak with this server.
_CLIENT_CONFIG = {
  'pjwt_auth_enabled': False,
  # Parts of one pass come one after the other, so that each finds the part before it.
  'parallel_fwdbwd_chunks': False,
  'fwdbwd_max_chunk_len': messages.MOST_DATA,
  'fwdbwd_max_chunk_bytes_count': _MAX_BODY // 4,
  'use_pyqwest_transport': False,
  'sample_use_retrieve_futures': False,
}
_DYNAMIC_CONFIG = {'sample_cancel_enabled': True}


class _Handlers:
  """Answers requests; each method returns what becomes JSON."""

  def __init__(
    self,
    trainings: training.Trainings,
    samplers: sampling.Samplers,
    *,
    slots: int,
    keys: Collection[str],
  ):
    self._trainings, self._samplers = trainings, samplers
    self._slots, self._keys = slots, keys

  def check_key(self, request: Any):
    """Raises RefusedError if the client has none of the keys."""
    http.check_key(request.headers.get('X-API-Key', ''), self._keys, 'give api_key=KEY')

  async def config(self, request) -> dict:
    return _CLIENT_CONFIG

  async def dynamic_config(self, request) -> dict:
    return _DYNAMIC_CONFIG

  async def capabilities(self, request) -> dict:
    row = self._trainings.learning.shape.row_tokens
    model = {
      'model_name': self._trainings.base_model,
      'max_context_length': min(self._slots, row),
      'trainable': True,
      'sampleable': True,
    }
    return {'supported_models': [model]}

  async def telemetry(self, request) -> dict:
    await http.read_body(request, _MAX_JSON)  # It is dropped.
    return {'status': 'accepted'}

  async def create_session(self, request) -> dict:
    await _read(request, wire.CreateSession)
    session_id = self._trainings.begin_session()
    kind = {'type': 'create_session', 'info_message': training.UNEMBED}
    return kind | {'session_id': session_id}

  async def heartbeat(self, request) -> dict:
    fields = await _read(request, wire.SessionId)
    self._trainings.find_session(fields.session_id)
    return {'type': 'session_heartbeat'}

  async def finish_session(self, request) -> dict:
    await http.read_body(request, _MAX_JSON)
    self._trainings.finish_session(request.path_params['session_id'])
    return {}

  async def create_model(self, request) -> dict:
    return self._trainings.create(await _read(request, wire.CreateModel))

  async def get_info(self, request) -> dict:
    fields = await _read(request, wire.ModelId)
    return self._trainings.describe(fields.model_id)

  async def forward_backward(self, request) -> dict:
    read, begin = self._trainings.read_forward_backward, self._trainings.forward_backward
    reading = http.read, _MAX_BODY, messages.read_names
    return await self._begin(request, read, begin, reading)

  async def optim_step(self, request) -> dict:
    return await self._begin(request, wire.OptimStep, self._trainings.optim_step)

  async def save_weights(self, request) -> dict:
    return await self._begin(request, wire.SaveWeights, self._trainings.save)

  async def load_weights(self, request) -> dict:
    return await self._begin(request, wire.LoadWeights, self._trainings.load)

  async def save_for_sampler(self, request) -> dict:
    return await self._begin(request, wire.SaveForSampler, self._samplers.save)

  async def _begin(self, request, model: Any, begin: Callable, reading: Any = None):
    """Begins a run's operation; if it can never be done, the next do not wait for it."""
    read, most, find_names = reading or (http.read_json, _MAX_JSON, dict)
    make, names = model if reading else functools.partial(http.check_fields, model), {}

    def read_all(given: Any) -> Any:
      names.update(find_names(given))
      return make(given)

    try:
      return begin(await read(request, most, read_all))
    except (http.RefusedError, ValueError) as error:
      if getattr(error, 'status', 400) not in (409, 429, 503):
        self._trainings.skip(names.get('model_id'), names.get('seq_id'))
      raise

  async def create_sampling_session(self, request) -> dict:
    return self._samplers.create(await _read(request, wire.CreateSamplingSession))

  async def sampler(self, request) -> dict:
    return self._samplers.describe(request.path_params['sampler_id'])

  async def sample(self, request) -> dict:
    return self._samplers.sample(await _read(request, wire.Sample))

  async def cancel(self, request) -> dict:
    fields = await _read(request, wire.RetrieveFuture)
    self._samplers.cancel(fields.request_id)
    return {}

  async def retrieve(self, request) -> Any:
    fields = await _read(request, wire.RetrieveFuture)
    result = await self._trainings.results.wait(fields.request_id)
    if result is None:  # The client asks again at once.
      again = {'type': 'try_again', 'queue_state': 'active'}
      return http.answer_json(again | {'request_id': fields.request_id}, 408)
    if isinstance(result, bytes):
      from starlette import responses

      return responses.Response(result, media_type=messages.MEDIA_TYPE)
    return result

  async def weights_info(self, request) -> dict:
    fields = await _read(request, wire.TinkerPath)
    return catalog.describe_adapter(self._trainings.states.describe(fields.tinker_path))

  async def checkpoints(self, request) -> dict:
    run_id = request.path_params.get('run_id')
    found = await asyncio.to_thread(self._trainings.states.describe_all, run_id)
    return _page(request, 'checkpoints', found)

  async def delete_checkpoint(self, request) -> dict:
    run_id, kind, name = (
      request.path_params[part] for part in ('run_id', 'kind', 'name')
    )
    path = f'tinker://{run_id}/{kind}/{name}'
    await asyncio.to_thread(self._trainings.states.delete, path)
    return {}

  async def runs(self, request) -> dict:
    return _page(request, 'training_runs', await self._list_runs())

  async def run(self, request) -> dict:
    run_id = request.path_params['run_id']
    for run in await self._list_runs():
      if run['training_run_id'] == run_id:
        return run
    raise http.RefusedError(404, f'there is no training run {run_id!r:.120}')

  async def _list_runs(self) -> list[dict]:
    saved = await asyncio.to_thread(self._trainings.states.describe_all)
    return catalog.list_runs(self._trainings, saved)


async def _read(request: Any, model: Any) -> Any:
  make = functools.partial(http.check_fields, model)
  return await http.read_json(request, _MAX_JSON, make)


def _page(request: Any, name: str, found: list[dict]) -> dict:
  """Makes the page of a list that a client asks for."""
  numbers = {'limit': 100, 'offset': 0}
  for key in numbers:
    text = request.query_params.get(key, f'{numbers[key]}')
    if not text.isdecimal() or len(text) > 9:
      raise http.RefusedError(
        400, f'{key} is {text!r:.40}; it must be a number from 0 on'
      )
    numbers[key] = int(text)
  limit, offset = numbers['limit'], numbers['offset']
  cursor = numbers | {'total_count': len(found)}
  return {name: found[offset : offset + limit], 'cursor': cursor}


def make_app(
  engine: engine_lib.Engine,
  chat: chat_lib.Chat,
  learner: learning.Learning,
  saved: states.States,
  *,
  base_model: str,
  keys: Collection[str] = (),
  clients: int = 8,
  max_waiting: int = 256,
  seconds: float = 600.0,
  idle_seconds: float = 1800.0,
) -> Any:
  """Makes an ASGI application; it runs in the engine's event loop.

  Args:
    engine: Samples; has the base's weights, and room for adapters of the learner's rank.
    chat: Knows the stop tokens and the bytes of the tokens.
    learner: Trains.
    saved: Where states are saved.
    base_model: What clients call the base model.
    keys: The keys of which a client must have one; none asks for none.
    clients: The most training runs at a time.
    max_waiting: How many replies may wait for a row; further ones get 429.
    seconds: The most seconds of a reply, and three times of a computation.
    idle_seconds: How long a session must be silent before its run may give its place.
  """
  worker = work.Worker(most_waiting=64, most_bytes=1 << 28, seconds=3 * seconds)
  trainings = training.Trainings(
    learner,
    saved,
    worker,
    work.Results(),
    base_model=base_model,
    most=clients,
    idle_seconds=idle_seconds,
  )
  samplers = sampling.Samplers(
    engine,
    chat,
    trainings,
    most_replies=engine.sizes.rows * len(engine.replicas) + max_waiting,
    seconds=seconds,
  )
  handlers = _Handlers(trainings, samplers, slots=engine.sizes.slots, keys=keys)
  return _route(handlers, worker)


def _route(handlers: _Handlers, worker: work.Worker) -> Any:
  from starlette import applications, routing

  def wrap(answer: Callable) -> Callable:
    async def handle(request):
      handlers.check_key(request)
      content = await answer(request)
      return http.answer_json(content) if isinstance(content, dict) else content

    return http.guard(handle, _refuse)

  async def health(request):
    status = 503 if worker.stuck else 200
    return http.answer_json({'status': worker.stuck or 'ok'}, status)

  posts = {
    '/client/config': handlers.config,
    '/client/dynamic_config': handlers.dynamic_config,
    '/telemetry': handlers.telemetry,
    '/create_session': handlers.create_session,
    '/session_heartbeat': handlers.heartbeat,
    '/sessions/{session_id}/finish': handlers.finish_session,
    '/create_model': handlers.create_model,
    '/get_info': handlers.get_info,
    '/forward_backward': handlers.forward_backward,
    '/optim_step': handlers.optim_step,
    '/save_weights': handlers.save_weights,
    '/load_weights': handlers.load_weights,
    '/save_weights_for_sampler': handlers.save_for_sampler,
    '/create_sampling_session': handlers.create_sampling_session,
    '/asample': handlers.sample,
    '/retrieve_future': handlers.retrieve,
    '/cancel_future': handlers.cancel,
    '/weights_info': handlers.weights_info,
  }
  gets = {
    '/get_server_capabilities': handlers.capabilities,
    '/samplers/{sampler_id}': handlers.sampler,
    '/checkpoints': handlers.checkpoints,
    '/training_runs': handlers.runs,
    '/training_runs/{run_id}': handlers.run,
    '/training_runs/{run_id}/checkpoints': handlers.checkpoints,
  }
  state = '/training_runs/{run_id}/checkpoints/{kind}/{name}'
  routes = [
    *(
      routing.Route(_API + path, wrap(fn), methods=['POST']) for path, fn in posts.items()
    ),
    *(routing.Route(_API + path, wrap(fn)) for path, fn in gets.items()),
    routing.Route(_API + state, wrap(handlers.delete_checkpoint), methods=['DELETE']),
    routing.Route(_API + '/healthz', health),
  ]
  missing = {404: _explain_missing, 405: _explain_missing}
  return applications.Starlette(routes=routes, exception_handlers=missing)


def _refuse(error: http.RefusedError) -> Any:
  category = 'server' if error.status >= 500 else 'user'
  content = {'error': str(error), 'category': category}
  return http.answer_json(content, error.status, error.headers)


async def _explain_missing(request: Any, error: Any) -> Any:
  """Answers a request for what this server has not."""
  text = f'{request.method} {request.url.path:.200} is not supported; see docs/tinker.md'
  return _refuse(http.RefusedError(404, text))
