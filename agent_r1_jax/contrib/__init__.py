"""What is contributed: interfaces of others' systems, on top of the core (README.md)."""
