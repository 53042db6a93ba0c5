"""A collector that is slow, or of which there is none, neither ends nor delays a run."""

import contextlib
import logging
import threading
import urllib.request

from opentelemetry.sdk import metrics as metrics_sdk
from opentelemetry.sdk import trace as trace_sdk
from opentelemetry.sdk.metrics import export as metrics_export
from opentelemetry.sdk.trace import export as trace_export
import pytest
import runs
import traced

from agent_r1_jax.contrib.opentelemetry import providers
from agent_r1_jax.contrib.opentelemetry import sink as sink_lib
from agent_r1_jax.train import metrics
from agent_r1_jax.web import http

pytestmark = pytest.mark.usefixtures('no_curves', 'traced_once')
model = runs.model


class _Asks:
  """Posts to an address, and waits for the answer without a bound."""

  def __init__(self, url):
    self._url, self.asked = url, threading.Event()
    self._preferred_temporality = self._preferred_aggregation = {}

  def export(self, batch, **_):
    self.asked.set()
    with contextlib.suppress(OSError):  # The test has ended.
      urllib.request.urlopen(self._url, b'spans')

  def shutdown(self, *_, **__): ...

  def force_flush(self, *_, **__):
    return True


@pytest.fixture
def silent():
  """The address of a server that takes requests and never answers."""
  with http.listen('127.0.0.1', 0) as listener:
    yield f'http://127.0.0.1:{listener.getsockname()[1]}'


def test_one_that_never_answers_costs_spans_alone(
  model, tmp_path, monkeypatch, caplog, silent
):
  monkeypatch.setattr(providers, '_FLUSH_SECONDS', 0.2)
  exporter = _Asks(silent)
  tracers = trace_sdk.TracerProvider(shutdown_on_exit=False)
  queue = {'max_queue_size': 16, 'max_export_batch_size': 4}
  tracers.add_span_processor(trace_export.BatchSpanProcessor(exporter, **queue))
  reader = metrics_export.PeriodicExportingMetricReader(
    _Asks(silent), export_interval_millis=10
  )
  meters = metrics_sdk.MeterProvider([reader], shutdown_on_exit=False)
  make_sink = lambda: sink_lib.Sink(tracers, meters)
  config = runs.config(model, steps=2, sinks='')
  with caplog.at_level(logging.WARNING):
    traced.run(config, tmp_path / 'silent', make_sink)
  reader.shutdown(timeout_millis=1)
  assert exporter.asked.is_set()
  assert 'has not sent all within 0.2 seconds' in caplog.text
  assert [line['step'] for line in metrics.read(tmp_path / 'silent')] == [0, 1, 2]
  traced.run(config, tmp_path / 'plain', None)
  plain, slow = (runs.read_numbers(tmp_path / name) for name in ('plain', 'silent'))
  assert plain == slow


@pytest.mark.parametrize(
  ('variables', 'name'),
  [
    ({'OTEL_TRACES_EXPORTER': 'none'}, None),
    ({'OTEL_TRACES_EXPORTER': 'console'}, 'ConsoleSpanExporter'),
  ],
)
def test_variables_choose_the_exporter(monkeypatch, variables, name):
  for variable, value in variables.items():
    monkeypatch.setenv(variable, value)
  exporter = providers._load_exporter('traces')
  assert exporter.__name__ == name if name else exporter is None


def test_an_exporter_complains_once(monkeypatch, caplog):
  monkeypatch.setenv('OTEL_METRICS_EXPORTER', 'console')
  exporter = providers._load_exporter('metrics')
  for second in range(3):
    logging.getLogger(exporter.__module__).warning('It is down for %d s', second)
  assert caplog.messages == ['It is down for 0 s']


def test_an_exporter_that_is_not_installed_is_refused(monkeypatch):
  monkeypatch.setenv('OTEL_METRICS_EXPORTER', 'nosuch')
  with pytest.raises(ValueError, match="no exporter 'nosuch' of metrics here; pip inst"):
    providers._load_exporter('metrics')
