"""Contributed interfaces to other systems, on top of the core (README.md)."""
