"""Logs of episodes, in the formats of other programs."""
