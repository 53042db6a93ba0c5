"""A run's metrics: each number of a line, and the names of proposal #88."""

from collections.abc import Mapping
import re
from typing import Any

from opentelemetry import metrics as metrics_lib

# Durations in a line, in seconds, and their histograms in the proposal.
_DURATIONS = {'time/rollout': 'rl.sample.duration', 'time/update': 'rl.train.duration'}
_LOSSES = {
  'train/loss': 'policy',
  'train/kl': 'kl_divergence',
  'train/value_loss': 'value',
}
_EVALUATION = {
  'reward': 'rl.environment.reward.mean',
  'turns': 'rl.environment.episode.length.mean',
}


class Lines:
  """Records the lines of metrics.jsonl."""

  def __init__(self, meter: metrics_lib.Meter, facts: Mapping[str, Any]):
    """`facts` are the attributes of all numbers of the run."""
    self._meter, self._facts = meter, dict(facts)
    self._gauges: dict[str, Any] = {}
    histogram = lambda name: meter.create_histogram(name, unit='s')
    self._durations = {name: histogram(name) for name in _DURATIONS.values()}
    self._loop = histogram('rl.loop.duration')
    self._steps = meter.create_counter('rl.train.steps')
    self._episodes = meter.create_counter('rl.sample.episodes')

  def count_episodes(self, episodes: int) -> None:
    """Counts the episodes of a finished training rollout."""
    self._episodes.add(episodes, self._facts)

  def record(self, metrics: Mapping[str, float]) -> None:
    """Records the numbers of a line."""
    for name, value in metrics.items():
      self._set(f'agent_r1_jax.{_clean(name)}', value)
      if name in _DURATIONS:
        self._durations[_DURATIONS[name]].record(value, self._facts)
      if name in _LOSSES:
        self._set('rl.train.loss', value, {'rl.loss.type': _LOSSES[name]})
      kind, _, rest = name.partition('/')
      tasks, _, last = rest.rpartition('/')
      if kind == 'eval' and last in _EVALUATION:
        self._set(_EVALUATION[last], value, {'agent_r1_jax.tasks': tasks})
    if 'time/update' in metrics:
      self._steps.add(1, self._facts)
      self._loop.record(sum(metrics.get(n, 0.0) for n in _DURATIONS), self._facts)

  def _set(self, name: str, value: float, attributes: Mapping[str, Any] | None = None):
    if name not in self._gauges:
      self._gauges[name] = self._meter.create_gauge(name)
    self._gauges[name].set(value, self._facts | dict(attributes or {}))


def _clean(name: str) -> str:
  """Makes a valid OpenTelemetry instrument name."""
  return re.sub(r'[^\w.-]', '_', name.replace('/', '.'), flags=re.ASCII)[:200]
