"""Checks before a run: its settings, sizes, memory, environments, and its fingerprint."""
