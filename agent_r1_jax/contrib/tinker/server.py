"""A server of the Tinker API: clients train adapters of one model, and sample from them.

The client is the separate package `tinker`; guide.md has a script. A request to compute
gets the id of its result at once, and /api/v1/retrieve_future waits for the result.

An error is {"error": TEXT, "category": "user" or "server"}: 400 for an invalid request,
401 for a wrong key, 404 for a missing object, 410 for a session that has ended, 413 for a
body that is too long, 429 if too much waits already, 503 if the device is lost. A failure
during computation is such an object with status 200, which the client expects.

The handlers run in the engine's own event loop, and one thread computes (work.py).
"""

import asyncio
from collections.abc import Callable, Collection
import functools
from typing import Any

from agent_r1_jax.contrib.tinker import catalog, messages, sampling, training, wire
from agent_r1_jax.web import http

# Maximum bytes of a request with data, and of a JSON request.
_MAX_BODY, _MAX_JSON = 1 << 23, 1 << 22
_API = '/api/v1'
# The settings that the client requests at its start.
_CLIENT_CONFIG = {
  'pjwt_auth_enabled': False,
  # Parts of a pass are sent one after the other, so that each finds the previous part.
  'parallel_fwdbwd_chunks': False,
  'fwdbwd_max_chunk_len': messages.MOST_DATA,
  'fwdbwd_max_chunk_bytes_count': _MAX_BODY // 4,
  'use_pyqwest_transport': False,
  'sample_use_retrieve_futures': False,
}
_DYNAMIC_CONFIG = {'sample_cancel_enabled': True}


class _Handlers:
  """Answers requests; each handler returns a response, or an object to send as JSON."""

  def __init__(self, trainings: training.Trainings, samplers: sampling.Samplers):
    self._trainings, self._samplers = trainings, samplers

  def list_posts(self) -> dict[str, Callable]:
    """Lists the POST handlers by path."""
    trainings, samplers = self._trainings, self._samplers
    data = trainings.read_forward_backward, trainings.forward_backward
    return {
      '/client/config': _say(_CLIENT_CONFIG),
      '/client/dynamic_config': _say(_DYNAMIC_CONFIG),
      '/telemetry': _say({'status': 'accepted'}),  # The content is dropped.
      '/create_session': _answer(wire.CreateSession, trainings.begin_session),
      '/session_heartbeat': _answer(wire.SessionId, self.heartbeat),
      '/sessions/{session_id}/finish': self.finish_session,
      '/create_model': _answer(wire.CreateModel, trainings.create),
      '/get_info': _answer(wire.ModelId, trainings.describe),
      '/forward_backward': self._begin(_read_message, *data),
      '/optim_step': self._begin_json(wire.OptimStep, trainings.optim_step),
      '/save_weights': self._begin_json(wire.SaveWeights, trainings.save),
      '/load_weights': self._begin_json(wire.LoadWeights, trainings.load),
      '/save_weights_for_sampler': self._begin_json(wire.SaveForSampler, samplers.save),
      '/create_sampling_session': _answer(wire.CreateSamplingSession, samplers.create),
      '/asample': _answer(wire.Sample, samplers.sample),
      '/retrieve_future': self.retrieve,
      '/cancel_future': _answer(wire.RetrieveFuture, samplers.cancel),
      '/weights_info': _answer(wire.TinkerPath, self.weights_info),
    }

  def list_gets(self) -> dict[str, Callable]:
    """Lists the GET handlers by path."""
    return {
      '/get_server_capabilities': self.capabilities,
      '/samplers/{sampler_id}': self.sampler,
      '/checkpoints': self.checkpoints,
      '/training_runs': self.runs,
      '/training_runs/{run_id}': self.run,
      '/training_runs/{run_id}/checkpoints': self.checkpoints,
    }

  def _begin_json(self, model: Any, begin: Callable) -> Callable:
    return self._begin(_read_json, _check(model), begin)

  def _begin(self, read: Callable, make: Callable, begin: Callable) -> Callable:
    """Handles a run's operation; if it is invalid, later ones do not wait for it."""

    async def handle(request):
      names: dict[str, Any] = {}

      def make_all(fields: dict[str, Any]) -> Any:
        names.update(fields)
        return make(fields)

      try:
        return begin(await read(request, make_all))
      except (http.RefusedError, ValueError) as error:
        if getattr(error, 'status', 400) not in (409, 429, 503):
          self._trainings.skip(names.get('model_id'), names.get('seq_id'))
        raise

    return handle

  async def capabilities(self, request) -> dict:
    row = self._trainings.learning.shape.row_tokens
    model = {
      'model_name': self._trainings.states.base,
      'max_context_length': min(self._samplers.slots, row),
      'trainable': True,
      'sampleable': True,
    }
    return {'supported_models': [model]}

  def heartbeat(self, fields: wire.SessionId) -> dict:
    self._trainings.hear(fields.session_id)
    return {'type': 'session_heartbeat'}

  async def finish_session(self, request) -> dict:
    await http.read_body(request, _MAX_JSON)
    self._trainings.finish_session(request.path_params['session_id'])
    return {}

  async def sampler(self, request) -> dict:
    return self._samplers.describe(request.path_params['sampler_id'])

  async def retrieve(self, request) -> Any:
    from starlette import responses

    fields = await _read_json(request, _check(wire.RetrieveFuture))
    result = await self._trainings.results.wait(fields.request_id)
    if result is None:  # The client asks again at once.
      again = {'type': 'try_again', 'queue_state': 'active'}
      return http.answer_json(again | {'request_id': fields.request_id}, 408)
    if isinstance(result, bytes):
      return responses.Response(result, media_type=messages.MEDIA_TYPE)
    return result

  def weights_info(self, fields: wire.TinkerPath) -> dict:
    return catalog.describe_adapter(self._trainings.states.describe(fields.tinker_path))

  async def checkpoints(self, request) -> dict:
    run_id = request.path_params.get('run_id')
    found = await asyncio.to_thread(self._trainings.states.describe_all, run_id)
    return _page(request, 'checkpoints', found)

  async def delete_checkpoint(self, request) -> dict:
    path = 'tinker://{run_id}/{kind}/{name}'.format(**request.path_params)
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


def _check(model: Any) -> Callable[[dict[str, Any]], Any]:
  return functools.partial(http.check_fields, model)


async def _read_json(request: Any, make: Callable[[dict[str, Any]], Any]) -> Any:
  return await http.read_json(request, _MAX_JSON, make)


async def _read_message(request: Any, make: Callable[[dict[str, Any]], Any]) -> Any:
  return await http.read(request, _MAX_BODY, lambda body: make(messages.parse(body)))


def _answer(model: Any, answer: Callable[[Any], dict]) -> Callable:
  """Handles a JSON request, which `answer` gets as the model."""

  async def handle(request):
    return answer(await _read_json(request, _check(model)))

  return handle


def _say(content: dict) -> Callable:
  """Gives all requests the same answer."""

  async def handle(request):
    await http.read_body(request, _MAX_JSON)
    return content

  return handle


def _page(request: Any, name: str, found: list[dict]) -> dict:
  """Returns the requested page of a list."""
  page = http.check_fields(wire.Page, dict(request.query_params))
  cursor = page.model_dump() | {'total_count': len(found)}
  return {name: found[page.offset : page.offset + page.limit], 'cursor': cursor}


def make_app(
  trainings: training.Trainings, samplers: sampling.Samplers, keys: Collection[str] = ()
) -> Any:
  """Makes an ASGI application; it runs in the engine's event loop.

  If there are `keys`, clients must have one of them.
  """
  from starlette import applications, routing

  def route(path: str, answer: Callable, method: str) -> routing.Route:
    async def handle(request):
      key = request.headers.get('X-API-Key', '')
      http.check_key(key, keys, 'give api_key=KEY')
      content = await answer(request)
      return http.answer_json(content) if isinstance(content, dict) else content

    return routing.Route(_API + path, http.guard(handle, _refuse), methods=[method])

  async def health(request):
    stuck = trainings.worker.stuck
    return http.answer_json({'status': stuck or 'ok'}, 503 if stuck else 200)

  handlers = _Handlers(trainings, samplers)
  state = '/training_runs/{run_id}/checkpoints/{kind}/{name}'
  routes = [
    *(route(path, answer, 'POST') for path, answer in handlers.list_posts().items()),
    *(route(path, answer, 'GET') for path, answer in handlers.list_gets().items()),
    route(state, handlers.delete_checkpoint, 'DELETE'),
    routing.Route(_API + '/healthz', health),
  ]
  missing = {404: _explain_missing, 405: _explain_missing}
  return applications.Starlette(routes=routes, exception_handlers=missing)


def _refuse(error: http.RefusedError) -> Any:
  category = 'server' if error.status >= 500 else 'user'
  content = {'error': str(error), 'category': category}
  return http.answer_json(content, error.status, error.headers)


async def _explain_missing(request: Any, error: Any) -> Any:
  """Answers requests for paths and methods that this server lacks."""
  asked, page = f'{request.method} {request.url.path:.200}', 'contrib/tinker/guide.md'
  text = f'{asked} is not supported; see {page}'
  return _refuse(http.RefusedError(404, text))
