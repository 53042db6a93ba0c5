"""Tools to give to an agent."""
