"""Interfaces of others' systems, on top of the core; README.md says how they are kept."""
