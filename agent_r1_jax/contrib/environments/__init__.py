"""Environments written for other systems, and the servers that play them."""
