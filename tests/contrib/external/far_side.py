"""Servers that speak as vLLM: the project's own, and one that says what it is told."""

import contextlib
import json

import answers
import serving
from starlette import routing
import tiny

from agent_r1_jax.models.files import weights
from agent_r1_jax.serve import server
from agent_r1_jax.web import http


@contextlib.contextmanager
def serve(directory):
  """An engine with the model of a directory; yields its address and what it was sent."""
  shape, params = weights.load(directory)
  engine = tiny.engine(params, shape=shape, narrow=False)
  app, loaded = server.make_app(engine, tiny.chat()), []

  async def load(request):
    fields = await request.json()
    assert fields == {'method': 'reload_weights'}
    params = weights.load(directory)[1]
    loaded.append(params)
    engine.sync_weights(params, len(loaded))
    return http.answer_json({'results': [None]})

  async def forget(request):
    return http.answer_json({})

  calls = {'/collective_rpc': load, '/reset_prefix_cache': forget}
  app.router.routes.extend(
    routing.Route(path, handle, methods=['POST']) for path, handle in calls.items()
  )
  with serving.run(engine, app) as url:
    yield url, loaded


@contextlib.contextmanager
def answer(*said):
  """Answers (status, JSON) in turn, the last one for ever; yields address and bodies."""
  bodies, left = [], list(said)

  def take(_, fields):
    bodies.append(fields)
    status, content = left.pop(0) if len(left) > 1 else left[0]
    return status, json.dumps(content).encode()

  with answers.serve_posts(take) as url:
    yield url, bodies
