"""Grammars of replies: regular expressions, JSON schemas, tool calls."""
