"""Plays the episodes that a run learns from, and those that it is evaluated by."""
