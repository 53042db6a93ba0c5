"""What a run tells people: metrics, alarms, curves, tables, trajectories."""
