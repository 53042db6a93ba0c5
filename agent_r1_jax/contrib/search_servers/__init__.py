"""Retrieval over HTTP, in the protocols of Search-R1, SkyRL and Agent-R1."""
