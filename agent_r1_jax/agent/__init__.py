"""The text side of an agent: tokens, calls, tools and environments."""
