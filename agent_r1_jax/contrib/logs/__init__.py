"""Logs of episodes, for the programs of others."""
