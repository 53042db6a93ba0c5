"""Reports of a run: metrics, alarms, curves, tables, logs of episodes, the page."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from agent_r1_jax.report.watcher import Watcher as Watcher


def __getattr__(name: str) -> Any:
  if name != 'Watcher':
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  # Late: it imports the loop, which `python -m agent_r1_jax.report.episodes` does not
  # need.
  from agent_r1_jax.report import watcher

  return watcher.Watcher
