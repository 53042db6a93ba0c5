"""Servers that speak as vLLM: the project's own, and one that says what it is told."""

import contextlib
from http import server as http_server
import json
import threading

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
def answer(*answers):
  """Answers (status, JSON) in turn, the last one for ever; yields address and bodies."""
  bodies, left = [], list(answers)

  class Handler(http_server.BaseHTTPRequestHandler):
    def do_POST(self):
      bodies.append(json.loads(self.rfile.read(int(self.headers['Content-Length']))))
      status, fields = left.pop(0) if len(left) > 1 else left[0]
      body = json.dumps(fields).encode()
      self.send_response(status)
      self.send_header('Content-Length', str(len(body)))
      self.end_headers()
      self.wfile.write(body)

    def log_message(self, *args):
      pass

  with http_server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as listening:
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{listening.server_address[1]}', bodies
    listening.shutdown()
