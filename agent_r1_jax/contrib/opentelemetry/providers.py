"""The process's providers of spans and metrics, from the variables OTEL_*."""

import importlib.metadata
import logging
import os
import threading
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.sdk import metrics as metrics_sdk
from opentelemetry.sdk import resources
from opentelemetry.sdk import trace as trace_sdk
from opentelemetry.sdk.metrics import export as metrics_export
from opentelemetry.sdk.trace import export as trace_export

import agent_r1_jax

_LOGGER = logging.getLogger(__name__)
# How long the end of a run waits for the exporters to send the rest.
_FLUSH_SECONDS = 10.0
_PROTOCOLS = {'http/protobuf': 'otlp_proto_http', 'grpc': 'otlp_proto_grpc'}


def find() -> tuple[trace.TracerProvider, metrics.MeterProvider]:
  """Returns the process's providers; creates and sets missing ones.

  A created provider exports in its own thread, from a bounded queue; the end of the
  process does not wait for it.

  Raises:
    ValueError: An exporter that OTEL_* names is not installed.
  """
  if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
    trace.set_tracer_provider(_make_tracer_provider())
  if not isinstance(metrics.get_meter_provider(), metrics_sdk.MeterProvider):
    metrics.set_meter_provider(_make_meter_provider())
  return trace.get_tracer_provider(), metrics.get_meter_provider()


def flush(*found: Any) -> None:
  """Flushes providers; gives up after _FLUSH_SECONDS, with a log message."""
  flushes = [getattr(provider, 'force_flush', lambda: None) for provider in found]
  # The SDK's flush of spans has no time limit.
  threads = [threading.Thread(target=f, daemon=True) for f in flushes]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(_FLUSH_SECONDS)
  if any(thread.is_alive() for thread in threads):
    text = 'OpenTelemetry: the exporter has not sent all within %g seconds; the run ends.'
    _LOGGER.warning(text, _FLUSH_SECONDS)


def _make_tracer_provider() -> trace_sdk.TracerProvider:
  provider = trace_sdk.TracerProvider(resource=_describe(), shutdown_on_exit=False)
  if exporter := _load_exporter('traces'):
    provider.add_span_processor(trace_export.BatchSpanProcessor(exporter()))
  return provider


def _make_meter_provider() -> metrics_sdk.MeterProvider:
  readers, exporter = [], _load_exporter('metrics')
  if exporter and issubclass(exporter, metrics_export.MetricReader):
    readers = [exporter()]  # Such as Prometheus's, which is scraped.
  elif exporter:
    readers = [metrics_export.PeriodicExportingMetricReader(exporter())]
  return metrics_sdk.MeterProvider(readers, _describe(), shutdown_on_exit=False)


class _Once(logging.Filter):
  """Logs each kind of message once: exporters repeat theirs every few seconds."""

  def __init__(self):
    super().__init__()
    self._seen: set[str] = set()

  def filter(self, record: logging.LogRecord) -> bool:
    is_new = str(record.msg) not in self._seen
    self._seen.add(str(record.msg))
    return is_new


def _describe() -> resources.Resource:
  name = {'service.name': 'agent_r1_jax', 'rl.system': 'agent_r1_jax'}
  ours = resources.Resource.create(name | {'rl.system.version': agent_r1_jax.__version__})
  return ours.merge(resources.OTELResourceDetector().detect())


def _load_exporter(signal: str) -> Any:
  """Returns the exporter class of a signal, 'traces' or 'metrics', or None."""
  variable = f'OTEL_{signal.upper()}_EXPORTER'
  name = os.environ.get(variable) or 'otlp'
  if name == 'none':
    return None
  if name == 'otlp':
    own = os.environ.get(f'OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL')
    protocol = own or os.environ.get('OTEL_EXPORTER_OTLP_PROTOCOL') or 'http/protobuf'
    name = _PROTOCOLS.get(protocol, protocol)
  group = f'opentelemetry_{signal}_exporter'
  for entry in importlib.metadata.entry_points(group=group, name=name):
    exporter = entry.load()
    logging.getLogger(exporter.__module__).addFilter(_Once())
    return exporter
  raise ValueError(
    f'sinks: OpenTelemetry has no exporter {name!r} of {signal} here; pip install '
    f"'agent_r1_jax[opentelemetry]', or set {variable} to none, console or another one."
  )
