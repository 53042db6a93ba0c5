"""The official exporter, chosen by OTEL_*, against a collector in a thread."""

import http.server
import logging
import threading

import pytest
import runs
import traced

from agent_r1_jax.contrib.opentelemetry import providers
from agent_r1_jax.contrib.opentelemetry import sink as sink_lib
from agent_r1_jax.train import metrics
from agent_r1_jax.web import http as http_lib

pytest.importorskip(
  'opentelemetry.exporter.otlp.proto.http', reason='see test_with_otlp.py'
)
pytestmark = pytest.mark.usefixtures('no_curves', 'traced_once')
model = runs.model


@pytest.fixture
def collector():
  """The address of a collector, and the bodies that it got, by path."""
  bodies = {'/v1/traces': [], '/v1/metrics': []}

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
      body = self.rfile.read(int(self.headers['Content-Length']))
      bodies[self.path].append(body)
      self.send_response(200)
      self.end_headers()

    def log_message(self, *args):
      pass

  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}', bodies
    server.shutdown()


def test_a_run_is_sent_to_the_address_of_the_variables(
  model, tmp_path, monkeypatch, collector
):
  from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
  from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

  url, bodies = collector
  monkeypatch.setenv('OTEL_EXPORTER_OTLP_ENDPOINT', url)
  sinks = 'agent_r1_jax.contrib.opentelemetry.sink'
  traced.run(runs.config(model, steps=2, sinks=sinks), tmp_path, None)
  names, resources = [], set()
  for body in bodies['/v1/traces']:
    for part in trace_service_pb2.ExportTraceServiceRequest.FromString(
      body
    ).resource_spans:
      pairs = part.resource.attributes
      resources |= {(pair.key, pair.value.string_value) for pair in pairs}
      names += [span.name for scope in part.scope_spans for span in scope.spans]
  assert [names.count(name) for name in ('run', 'rl.loop', 'rl.train')] == [1, 2, 2]
  assert {name.split()[0] for name in names} == {
    *('run', 'rl.loop', 'rl.sample', 'rl.train', 'evaluation', 'invoke_agent'),
    *('turn', 'chat', 'execute_tool'),
  }
  assert ('service.name', 'agent_r1_jax') in resources
  sent = {
    metric.name
    for body in bodies['/v1/metrics']
    for part in metrics_service_pb2.ExportMetricsServiceRequest.FromString(
      body
    ).resource_metrics
    for scope in part.scope_metrics
    for metric in scope.metrics
  }
  assert {'rl.loop.duration', 'agent_r1_jax.rollout.reward'} <= sent


def test_a_server_that_never_answers_is_given_up(model, tmp_path, monkeypatch, caplog):
  monkeypatch.setattr(providers, '_FLUSH_SECONDS', 0.2)
  with http_lib.listen('127.0.0.1', 0) as listener:
    url = f'http://127.0.0.1:{listener.getsockname()[1]}'
    monkeypatch.setenv('OTEL_EXPORTER_OTLP_ENDPOINT', url)
    made = providers._make_tracer_provider(), providers._make_meter_provider()
    with caplog.at_level(logging.WARNING):
      config = runs.config(model, steps=2, sinks='')
      traced.run(config, tmp_path, lambda: sink_lib.Sink(*made))
  assert 'has not sent all within 0.2 seconds' in caplog.text
  assert [line['step'] for line in metrics.read(tmp_path)] == [0, 1, 2]
