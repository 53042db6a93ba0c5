"""Runs whose spans and metrics stay in memory, and what their watcher was told."""

from collections.abc import Callable
import pathlib
from typing import Any

from opentelemetry.sdk import metrics as metrics_sdk
from opentelemetry.sdk import trace as trace_sdk
from opentelemetry.sdk.metrics import export as metrics_export
from opentelemetry.sdk.trace import export as trace_export
from opentelemetry.sdk.trace.export import in_memory_span_exporter
import runs
import tiny

from agent_r1_jax import config as config_lib
from agent_r1_jax import report, train
from agent_r1_jax.agent import calls
from agent_r1_jax.agent import env as env_lib
from agent_r1_jax.contrib.opentelemetry import sink as sink_lib
from agent_r1_jax.rollout import rollout, sockets


class Memory:
  """Providers that keep what they get.

  Attributes:
    tracers: The provider of spans.
    meters: The provider of metrics.
  """

  def __init__(self):
    self._spans = in_memory_span_exporter.InMemorySpanExporter()
    self.tracers = trace_sdk.TracerProvider(shutdown_on_exit=False)
    processor = trace_export.SimpleSpanProcessor(self._spans)
    self.tracers.add_span_processor(processor)
    self._reader = metrics_export.InMemoryMetricReader()
    self.meters = metrics_sdk.MeterProvider([self._reader], shutdown_on_exit=False)

  def make_sink(self) -> sink_lib.Sink:
    return sink_lib.Sink(self.tracers, self.meters)

  @property
  def spans(self) -> list[trace_sdk.ReadableSpan]:
    """The spans that have ended, in the order of their beginnings."""
    return sorted(self._spans.get_finished_spans(), key=lambda span: span.start_time)

  def find(self, name: str) -> list[trace_sdk.ReadableSpan]:
    """The spans whose names begin with a word."""
    return [span for span in self.spans if span.name.split()[0] == name]

  def list_under(self, span, name: str) -> list[trace_sdk.ReadableSpan]:
    """The spans of that name whose parent this one is."""
    number = span.context.span_id
    return [s for s in self.find(name) if s.parent and s.parent.span_id == number]

  def read_metrics(self) -> dict[str, list]:
    """The points of each metric."""
    data = self._reader.get_metrics_data()
    found = {}
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
      found[metric.name] = metric.data.data_points
    return found


class Watcher(report.Watcher):
  """Also keeps all episodes, by the step of their line and their order."""

  def __init__(self, *run_sinks):
    super().__init__(*run_sinks)
    self.played = []

  def see_episodes(self, step, played):
    super().see_episodes(step, played)
    self.played.append((step, played))


def _parse(reply):
  """Finds none, one or two calls in a reply."""
  return [calls.ToolCall('look', {'seconds': 0.001})] * (len(reply) % 3)


def make_env():
  return env_lib.ToolEnv([runs.look], runs.reward, parse=_parse)


def run(
  config, workdir: pathlib.Path, make_sink: Callable | None, algorithm=runs.GRPO
) -> tuple[object, Watcher]:
  """Trains, with or without a sink; returns the parameters and the watcher."""
  watcher = Watcher(*([make_sink()] if make_sink else []))
  options = {'tasks': runs.tasks(), 'evals': {'dev': runs.tasks(2)}}
  options |= {'algorithm': algorithm, 'make_env': make_env, 'watcher': watcher}
  return tiny.within(train.run, config, str(workdir), **options), watcher


def collect(memory: Memory, engine, chat, tasks, make_env, **options):
  """Plays episodes of no run, and watches them."""
  no_run: Any = {'label': 'a test', 'step': 0, 'next_line': 0}
  no_run |= {'call_format': None, 'engine': engine}

  def play():
    info = sockets.RunInfo(config_lib.Config(), pathlib.Path('a test'), **no_run)
    with memory.make_sink().open(info):
      return rollout.collect(engine, chat, tasks, make_env, **options)

  return tiny.within(play)
