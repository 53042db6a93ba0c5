"""Reports of a run: metrics, alarms, curves, tables, logs of trajectories."""

from agent_r1_jax.report.watcher import Watcher as Watcher
