"""A sink that sends a run's spans and metrics to OpenTelemetry.

  agent-r1-jax quickstart \
    --config.sinks=tensorboard,agent_r1_jax.contrib.opentelemetry.sink

README.md shows the tree of spans.
"""

from collections.abc import Iterator, Mapping
import contextlib
import hashlib
import logging
import pathlib
from typing import Any

from opentelemetry import context as context_lib
from opentelemetry import metrics as metrics_lib
from opentelemetry import propagate, trace

import agent_r1_jax
from agent_r1_jax import types
from agent_r1_jax.contrib.opentelemetry import gauges, providers
from agent_r1_jax.host import moments
from agent_r1_jax.rollout import sockets

_LOGGER = logging.getLogger(__name__)


class Sink:
  """Makes a span of each moment (host/moments.py), and metrics of each line."""

  def __init__(
    self,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics_lib.MeterProvider | None = None,
  ):
    """Finds the providers, by default the process's (see providers.py).

    Raises:
      ValueError: An exporter that OTEL_* names is not installed.
    """
    if tracer_provider is None or meter_provider is None:
      tracers, meters = providers.find()
      tracer_provider = tracer_provider or tracers
      meter_provider = meter_provider or meters
    self._providers = tracer_provider, meter_provider
    self._tracer = tracer_provider.get_tracer('agent_r1_jax', agent_r1_jax.__version__)
    self._meter = meter_provider.get_meter('agent_r1_jax', agent_r1_jax.__version__)
    # The open spans of steps, by number: several if rollouts are ahead.
    self._loops: dict[int, trace.Span] = {}

  @contextlib.contextmanager
  def open(self, run: sockets.RunInfo) -> Iterator[None]:
    """Watches a run inside `with`; its end waits a few seconds for the exporter."""
    model = pathlib.Path(run.config.model.path).name
    self._facts = {
      'rl.run.id': _make_id(run.workdir),
      'rl.environment.name': run.label,
      'rl.model.name': model,
    }
    self._agent = {
      'gen_ai.provider.name': 'agent_r1_jax',
      'gen_ai.request.model': model,
    }
    self._lines = gauges.Lines(self._meter, self._facts)
    token = moments.observer.set(self)
    try:
      self._run = self._tracer.start_span('run', attributes=self._facts)
      with trace.use_span(self._run, record_exception=False):
        try:
          yield
        finally:
          # Remaining steps are rollouts that were ahead.
          for span in (*self._loops.values(), self._run):
            with self._caught():
              span.end()
          self._loops.clear()
    finally:
      moments.observer.reset(token)
      providers.flush(*self._providers)

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Records the metrics of a line; another thread sends them."""
    with self._caught():
      self._lines.record(metrics)

  def carrier(self) -> dict[str, str]:
    """Returns traceparent, and the other headers of OTEL_PROPAGATORS."""
    headers: dict[str, str] = {}
    with self._caught():
      propagate.inject(headers)
    return headers

  @contextlib.contextmanager
  def watch(self, moment: Any) -> Iterator[Any]:
    """Makes a span of a moment; it is the current span inside `with`."""
    span = trace.INVALID_SPAN
    with self._caught():
      span = self._start(moment)
    # Neither an exception's text nor its stack: they may quote what an agent said.
    quiet = {'record_exception': False, 'set_status_on_exception': False}
    with trace.use_span(span, **quiet):
      try:
        yield moment
      except Exception as error:
        _set_error(span, type(error).__name__)
        raise
      finally:
        with self._caught():
          self._finish(span, moment)
        with self._caught():  # A user's processor may raise.
          span.end()

  def _start(self, moment: Any) -> trace.Span:
    begin = self._tracer.start_span
    match moment:
      case moments.Step(number):
        return self._find_loop(number)
      case moments.Rollout(None) if trace.get_current_span() is self._run:
        return self._start_root('evaluation', {})
      case moments.Rollout(step):
        attributes = {'rl.sample.batch_size': moment.episodes}
        loop = self._find_loop(step) if step else trace.get_current_span()
        within = trace.set_span_in_context(loop)
        return begin('rl.sample', within, attributes=attributes)
      case moments.Update():
        attributes = {'rl.train.batch_size': moment.episodes}
        return begin('rl.train', attributes=attributes)
      case moments.Episode(trajectory):
        name = self._facts['rl.environment.name']
        attributes = self._describe('invoke_agent', {'gen_ai.agent.name': name})
        attributes['agent_r1_jax.task.id'] = str(trajectory.task.id)
        attributes['agent_r1_jax.sample'] = trajectory.sample
        return begin(f'invoke_agent {name}', attributes=attributes)
      case moments.Turn(number):
        return begin('turn', attributes={'agent_r1_jax.turn': number})
      case moments.Reply():
        attributes = self._describe('chat', {})
        return begin(f'chat {attributes["gen_ai.request.model"]}', attributes=attributes)
      case moments.ToolCall(name):
        attributes = {
          'gen_ai.operation.name': 'execute_tool',
          'gen_ai.tool.name': name,
          'gen_ai.tool.type': 'function',
        }
        return begin(f'execute_tool {name}', attributes=attributes)
    return begin(type(moment).__name__)  # A moment newer than this file.

  def _finish(self, span: trace.Span, moment: Any) -> None:
    """Adds what is known when a moment ends."""
    match moment:
      case moments.Step(number):
        self._loops.pop(number, None)
      case moments.Rollout(step) if step:
        self._lines.count_episodes(moment.episodes)
      case moments.Episode(trajectory):
        _finish_episode(span, trajectory)
      case moments.Reply():
        span.set_attribute('gen_ai.usage.input_tokens', moment.context_tokens)
        if (chunk := moment.chunk) is not None:
          span.set_attribute('gen_ai.usage.output_tokens', len(chunk.tokens))
          reason = 'stop' if chunk.stopped else 'length'
          span.set_attribute('gen_ai.response.finish_reasons', [reason])
          step = int(chunk.policy_steps[-1])
          span.set_attribute('agent_r1_jax.policy_step', step)
      case moments.ToolCall() if moment.result is not None and not moment.result.ok:
        late = 'timeout' if moment.result.timed_out else '_OTHER'
        _set_error(span, moment.result.error or late)

  def _describe(self, operation: str, attributes: dict[str, Any]) -> dict[str, Any]:
    return {'gen_ai.operation.name': operation, **self._agent, **attributes}

  def _find_loop(self, step: int) -> trace.Span:
    """Returns the span of a step, starting it if this is the step's first moment."""
    if step not in self._loops:
      attributes = {'rl.loop.iteration': step, **self._facts}
      self._loops[step] = self._start_root('rl.loop', attributes)
    return self._loops[step]

  def _start_root(self, name: str, attributes: dict[str, Any]) -> trace.Span:
    """Starts a trace of its own, with a link to the run's span.

    A run in one trace would be too large to store and show, and incomplete until its end.
    """
    links = [trace.Link(self._run.get_span_context())]
    attributes = {**self._facts, **attributes}
    return self._tracer.start_span(
      name, context_lib.Context(), links=links, attributes=attributes
    )

  @contextlib.contextmanager
  def _caught(self) -> Iterator[None]:
    """Logs exceptions raised inside: nothing here may end a run or an episode."""
    try:
      yield
    except Exception:
      _LOGGER.exception('OpenTelemetry: a moment was not described')


def _finish_episode(span: trace.Span, trajectory: types.Trajectory) -> None:
  span.set_attribute('agent_r1_jax.status', str(trajectory.status))
  span.set_attribute('agent_r1_jax.reward', trajectory.reward)
  span.set_attribute('agent_r1_jax.turns', len(trajectory.turns))
  if trajectory.status == types.Status.FAILED:
    names = (name for name in trajectory.metrics if name.startswith('error/'))
    _set_error(span, next(names, '_OTHER').removeprefix('error/'))


def _set_error(span: trace.Span, kind: str) -> None:
  span.set_attribute('error.type', kind)
  span.set_status(trace.StatusCode.ERROR)


def _make_id(workdir: pathlib.Path) -> str:
  """Makes a run's id from its directory, so that a resumed run keeps it."""
  digest = hashlib.sha256(str(workdir.resolve()).encode()).hexdigest()
  return f'{workdir.resolve().name}-{digest[:8]}'
