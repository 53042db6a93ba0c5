"""What a reply may be: regular expressions, JSON schemas, calls of tools."""
