"""Reports of a run: metrics, alarms, curves, tables, logs of trajectories."""
